"""Makes tiny models of a few thousand weights, and batches of random tokens for them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
)

from rlhf.batch import ActorBatch, Batch, CriticBatch, RolloutBatch
from rlhf.learning.balancing import SampleBalance
from rlhf.learning.credit import Advantages
from rlhf.learning.guards import Guards

VOCAB = 40


def tiny_qwen2(seed: int = 0) -> PreTrainedModel:
    """Return a Qwen2 in eval mode with random float32 weights, so large that predictions are far from uniform."""
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config).float().eval()


def tiny_gemma2(seed: int = 0) -> PreTrainedModel:
    """Return a model like `tiny_qwen2`, with an untied head and an effective soft cap of the logits."""
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        final_logit_softcapping=2.0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    return Gemma2ForCausalLM(config).float().eval()


def tiny_value_model(seed: int = 0) -> PreTrainedModel:
    """Return a value model with `tiny_qwen2`'s configuration and random weights, its head included."""
    config = tiny_qwen2().config
    config.num_labels, config.classifier_dropout = 1, 0.0
    torch.manual_seed(seed)
    return Qwen2ForTokenClassification(config).float().eval()


@dataclass(kw_only=True)
class EveryBatch(RolloutBatch, ActorBatch, CriticBatch):
    """A batch with the fields of all stages, so that a test can run one part alone; unset fields are None."""

    scores: Any = None
    truncated: Any = None
    advantages: Any = None
    loss_mask: Any = None
    old_log_probs: Any = None
    ref_log_probs: Any = None
    values: Any = None
    returns: Any = None
    token_rewards: Any = None
    """Input of the advantage estimator."""

    @property
    def counted(self) -> torch.Tensor:
        return self.response_mask if self.loss_mask is None else self.loss_mask


def random_batch(
    seed: int, samples: int, prompt: tuple[int, int] = (1, 7), response: tuple[int, int] = (1, 9)
) -> EveryBatch:
    """Return samples with uniform lengths in the given bounds and random values per token; padding is zero."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(prompt[0], prompt[1] + 1, (samples,), generator=generator)
    responses = torch.randint(response[0], response[1] + 1, (samples,), generator=generator)
    sequences = [torch.randint(1, VOCAB, (int(n),), generator=generator) for n in prompts + responses]
    log_probs = [-3 * torch.rand(int(n), generator=generator) for n in responses]
    return EveryBatch(
        input_ids=pad_sequence(sequences, batch_first=True),
        prompt_lengths=prompts,
        response_lengths=responses,
        response_mask=pad_sequence([torch.ones(int(n), dtype=torch.bool) for n in responses], batch_first=True),
        rollout_log_probs=pad_sequence(log_probs, batch_first=True),
        scores=torch.randint(0, 2, (samples,), generator=generator).float(),
        uids=torch.arange(samples) // 2,
        numbers=torch.arange(samples) % 2,
        advantages=_padded(generator, responses),
        returns=_padded(generator, responses),
    )


def with_observations(batch: EveryBatch) -> EveryBatch:
    """Return the same batch with observations at about every third token, never at a response's first."""
    rows, columns = torch.meshgrid(*map(torch.arange, batch.response_mask.shape), indexing="ij")
    return replace(
        batch, response_mask=batch.response_mask.masked_fill((columns > 0) & ((rows + columns) % 3 == 0), 0.0)
    )


def fill(advantages: Advantages, batch: EveryBatch, guards: Guards) -> dict[str, float]:
    """Set the advantages, returns and mask that `Advantages` computes; return its metrics. Collective."""
    estimator = advantages._estimator

    def watched(inputs: Any, config: Any) -> Any:
        batch.token_rewards = inputs.token_rewards
        return estimator(inputs, config)

    policies = (batch.old_log_probs, batch.ref_log_probs) if advantages.uses_kl else None
    advantages._estimator = watched
    credit, figures = advantages.estimate(batch, batch.values, policies, guards)
    advantages._estimator = estimator
    batch.advantages, batch.returns, batch.response_mask = credit
    return figures


def balance_in_order(batch: Batch, mini_batches: int = 1, ranks: int = 1) -> SampleBalance:
    """Return the balance of a step with the same samples on every rank, in the order of `batch`."""
    lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
    size = len(lengths) // mini_batches
    return SampleBalance([[lengths[start : start + size]] * ranks for start in range(0, len(lengths), size)])


def _padded(generator: torch.Generator, lengths: torch.Tensor) -> torch.Tensor:
    return pad_sequence([torch.randn(int(n), generator=generator) for n in lengths], batch_first=True)
