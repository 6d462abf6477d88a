"""Log-probs of response tokens from a causal LM, in bounded memory."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.algorithms.statistics import masked
from rlhf.batch import Batch

# Logits are turned into float32 in chunks of at most this many values (256 MiB).
CHUNK_ELEMENTS = 1 << 26


def response_log_probs(
    model: nn.Module, batch: Batch, temperature: float, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the response tokens under `model`, and the entropies they were drawn at, [N, R] float32; zero on
    padding.

    Sequences are padded on the right, so with causal attention no padding reaches a real token and no mask is needed.
    """
    ids, mask = batch.input_ids, batch.response_mask
    first = int(batch.prompt_lengths.min()) - 1
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=ids.shape[1] - first).logits
    else:
        logits = model(input_ids=ids, use_cache=False).logits[:, first:]
    log_probs, entropy = _TokenLogProbs.apply(logits, ids[:, first + 1 :], temperature, with_entropy)
    # Where in these columns each response token is; padding points anywhere and is zeroed.
    index = batch.prompt_lengths[:, None] - 1 - first + torch.arange(mask.shape[1], device=ids.device)
    index = index.clamp(max=log_probs.shape[1] - 1)
    log_probs = masked(log_probs.gather(1, index), mask)
    return log_probs, masked(entropy.gather(1, index), mask) if with_entropy else None


class _TokenLogProbs(torch.autograd.Function):
    """Log-prob of each label [N, C] and entropy [N, C] from logits [N, C + 1, V] in any float type; the last column
    predicts nothing.

    What autograd would keep, several float32 copies of the logits, is made again chunk by chunk in the backward pass;
    an entropy that is only looked at costs that pass nothing. A logit of -inf, as models have for entries that pad
    their vocabulary, is a token that cannot come: it adds nothing to the entropy and has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        normaliser = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        log_probs = torch.empty_like(normaliser)
        entropy = torch.empty_like(normaliser) if with_entropy else None
        for part in _chunks(labels, logits.shape[2]):
            scaled = logits[part].float() / temperature
            normaliser[part] = scaled.logsumexp(dim=-1)
            log_probs[part] = scaled.gather(2, labels[part][..., None])[..., 0] - normaliser[part]
            if entropy is not None:
                probs = torch.exp(scaled - normaliser[part][..., None])
                entropy[part] = normaliser[part] - (probs * scaled.masked_fill_(probs == 0, 0.0)).sum(dim=-1)
        ctx.save_for_backward(logits, labels, normaliser, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits, labels, normaliser, entropy = ctx.saved_tensors
        of_log_probs, of_entropy = gradients
        if of_log_probs is None:
            of_log_probs = torch.zeros_like(normaliser)
        result = torch.zeros_like(logits)
        for part in _chunks(labels, logits.shape[2]):
            # d log p_label / d logit_v = ([v = label] - p_v) / T;  d entropy / d logit_v = -p_v (log p_v + entropy) / T
            every = logits[part].float() / ctx.temperature - normaliser[part][..., None]
            weight = of_log_probs[part][..., None]
            if of_entropy is not None:
                surprise = every.masked_fill(every.isneginf(), 0.0) + entropy[part][..., None]
                weight = weight + of_entropy[part][..., None] * surprise
            gradient = every.exp_().mul_(weight).neg_()
            gradient.scatter_add_(2, labels[part][..., None], of_log_probs[part][..., None])
            result[part] = gradient.div_(ctx.temperature)
        return result, None, None, None


def _chunks(labels: Tensor, vocab: int) -> Iterator[tuple[slice, slice]]:
    rows, columns = labels.shape
    if not labels.numel():
        return
    tokens = max(1, CHUNK_ELEMENTS // vocab)
    width = min(tokens, columns)
    height = max(1, tokens // width)
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            yield slice(top, top + height), slice(left, min(left + width, columns))
