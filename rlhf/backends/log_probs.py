"""Log-probs of response tokens from a causal LM, in bounded memory."""

import inspect

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhf.batch import Batch

# Rows of logits are taken in chunks of about this many float32 values (256 MiB), recomputed in the backward pass when several.
CHUNK_ELEMENTS = 1 << 26


def response_log_probs(
    model: nn.Module, batch: Batch, temperature: float, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the response tokens under `model`, and the entropies they were drawn at, [N, R] float32; zero on padding.

    Sequences are padded on the right, so with causal attention no padding reaches a real token and no mask is needed.
    """
    first = int(batch.prompt_lengths.min()) - 1
    last = int((batch.prompt_lengths + batch.response_lengths).max()) - 1
    columns = torch.arange(first, last, device=batch.input_ids.device)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits = model(input_ids=batch.input_ids, use_cache=False, logits_to_keep=columns).logits
    else:
        logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, first:last]
    labels = batch.input_ids[:, first + 1 : last + 1]

    mask = batch.response_mask
    # Where in `columns` each response token's logits are; padding points anywhere and is zeroed.
    index = batch.prompt_lengths[:, None] - 1 - first + torch.arange(mask.shape[1], device=labels.device)
    index = index.clamp(max=columns.numel() - 1)
    outputs = []
    rows = max(1, CHUNK_ELEMENTS // (logits.shape[1] * logits.shape[2]))
    for part_logits, part_labels in zip(logits.split(rows), labels.split(rows), strict=True):
        arguments = (part_logits, part_labels, temperature, with_entropy)
        several = torch.is_grad_enabled() and rows < len(batch)
        outputs.append(checkpoint(_log_probs, *arguments, use_reentrant=False) if several else _log_probs(*arguments))
    log_probs = torch.cat([o[0] for o in outputs]).gather(1, index) * mask
    entropy = torch.cat([o[1] for o in outputs]).gather(1, index) * mask if with_entropy else None
    return log_probs, entropy


def _log_probs(logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
    scaled = logits.float() / temperature
    normaliser = scaled.logsumexp(dim=-1)
    chosen = scaled.gather(2, labels.unsqueeze(2)).squeeze(2) - normaliser
    if not with_entropy:
        return chosen, chosen
    return chosen, normaliser - (torch.softmax(scaled, dim=-1) * scaled).sum(dim=-1)
