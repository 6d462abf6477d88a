"""Samples from a Hugging Face causal LM in this process, with torch alone."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.config.schema.rollout import RolloutConfig
from rlhf.models.config_check import check_eos, check_positions
from rlhf.rollout.decoding import Decoding
from rlhf.rollout.engine import Completion, Listener, PartialEngine, Quota, Request, Weights, indices_by_params
from rlhf.rollout.kv_cache import RowCache
from rlhf.rollout.sample import Sample
from rlhf.rollout.weight_digest import WeightCheck, digest, read_digests


def check_lengths(model_config: Any, max_prompt: int, max_response: int) -> None:
    """Raise UserError if prompt plus response (in tokens) exceed the model's `max_position_embeddings`."""
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    check_positions(limit, max_prompt, max_response)


def eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return every token that ends a response: from the generation config and the tokenizer.

    Raises:
        UserError: the generation config has other values than tokens.
    """
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    check_eos("model.path: generation_config.json or config.json", configured, vocabulary)
    ids = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
    return sorted(i for i in ids if i is not None)


class EmbeddedEngine(PartialEngine):
    """Samples from a Hugging Face causal LM with full or sliding-window attention.

    Args:
        model: unsharded, in the precision for generation. The engine owns it.
        tokenizer: for the EOS token, and for the text in which stop strings are found.
        max_num_seqs: number of samples decoded together; further samples wait.

    Raises:
        UserError: the architecture caches state other than keys and values.
    """

    def __init__(self, model: Any, tokenizer: Any, max_num_seqs: int) -> None:
        RowCache(model.config)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.max_num_seqs = max_num_seqs
        self.version = 0
        self._check = WeightCheck()
        self._listener: Listener | None = None
        self.eos = torch.tensor(eos_token_ids(model, tokenizer), dtype=torch.int64, device=model.device)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @torch.no_grad()
    def update_weights(self, weights: Weights, version: int) -> None:
        """Copy every parameter and persistent buffer in place, converting precision and device.

        Names are those of `model.state_dict()`; one name of each tied weight is enough.

        Raises:
            ValueError: an unknown name, another shape, or missing names.
            WeightsMismatch: the model's weights differ from the sent weights afterwards.
        """
        targets = self.model.state_dict(keep_vars=True)
        updated, sent = set(), {}
        for name, tensor in weights():
            if name not in targets:
                raise ValueError(f"the rollout model has no weight named {name!r}")
            if tensor.shape != targets[name].shape:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}, the rollout model {list(targets[name].shape)}"
                )
            targets[name].copy_(tensor)
            sent[name] = digest(tensor, targets[name].dtype).to(self.eos.device)
            updated.add(id(targets[name]))
        if missing := [name for name, target in targets.items() if id(target) not in updated]:
            raise ValueError(f"{len(missing)} weights of the rollout model were not updated: {', '.join(missing[:5])}")
        model = self.model
        loaded = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
        received = read_digests({name: digest(loaded[name], loaded[name].dtype) for name in sent})
        self._check.check(read_digests(sent), [received], f"step {version}")
        self.version = version

    def generate(self, requests: Sequence[Request], *, seed: int, step: int) -> list[Sample]:
        """Return the sample of each request, in order.

        A sample depends only on the weights, `seed`, `step` and its request, not on other requests, their order or
        `max_num_seqs` (except where rounding decides between two tokens with equal scores). A continued response gets
        the tokens that it would have got without the interruption.

        Raises:
            ValueError: an empty prompt, or a continued response that already has `max_tokens` tokens.
            UserError: prompt and response exceed the model's positions.
        """
        return self._generate(requests, (), seed, step)

    def generate_until(
        self, requests: Sequence[Request], quotas: Sequence[Quota], *, seed: int, step: int
    ) -> list[Sample]:
        """Return a sample for each request as soon as every quota is reached (see `PartialEngine`).

        Decode the requests in their order, at most `max_num_seqs` at once. Raises the errors of `generate`.
        """
        return self._generate(requests, quotas, seed, step)

    def listen(self, listener: Listener | None) -> None:
        self._listener = listener

    @torch.inference_mode()
    def _generate(self, requests: Sequence[Request], quotas: Sequence[Quota], seed: int, step: int) -> list[Sample]:
        if not all(r.token_ids for r in requests):
            raise ValueError("a prompt has no tokens")
        samples: dict[int, Sample] = {}
        completion = Completion(requests, quotas)
        # The requests with the most common parameters come last. A group with a greedy baseline is complete only after
        # the baseline, so a quota can be reached before the end only if the baselines come first.
        by_params = sorted(indices_by_params(requests).items(), key=lambda item: len(item[1]))
        for params, indices in by_params:
            group = [requests[i] for i in indices]
            check_lengths(self.model.config, max(len(r.token_ids) for r in group), params.max_tokens)
            eos = self.eos[:0] if params.ignore_eos else self.eos
            decoding = Decoding(self.model, self.tokenizer, eos, group, self.max_num_seqs, completion, self._listener)
            samples |= zip(indices, decoding.run(seed, step, self.version), strict=True)
        return [samples[i] for i in range(len(requests))]


def build_embedded_engine(
    model: Any, tokenizer: Any, config: RolloutConfig, device: torch.device | str | None = None
) -> EmbeddedEngine:
    """Build an engine over a copy of `model`, the policy before sharding, in `config.engine_dtype`.

    The copy is on `device` (default: the model's device). If the model's weights are on the meta device, the engine
    needs `update_weights` before it can generate.
    """
    dtype = getattr(torch, config.engine_dtype)
    # Convert weights only: in half precision, buffers such as rotary frequencies are wrong at distant positions.
    memo: dict[int, Any] = {
        id(p): nn.Parameter(_own(p.detach(), device, dtype), requires_grad=False) for p in model.parameters()
    }
    own = copy.deepcopy(model, memo)
    return EmbeddedEngine(own if device is None else own.to(device), tokenizer, config.max_num_seqs)


def _own(weight: Tensor, device: torch.device | str | None, dtype: torch.dtype) -> Tensor:
    if weight.is_meta:
        return torch.empty_like(weight, device=device or "cpu", dtype=dtype)
    return weight.to(device=device, dtype=dtype, copy=True)
