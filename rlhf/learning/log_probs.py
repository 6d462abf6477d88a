"""Log-probs of response tokens from a causal LM, in bounded memory."""

import torch
from torch import Tensor, nn

from rlhf.batch import Batch
from rlhf.models.log_prob_head import Targets


def response_log_probs(
    model: nn.Module, batch: Batch, temperature: float, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the response tokens under `model`, and the entropies they were drawn at, [N, R] float32; zero on
    padding.

    Sequences are padded on the right, so with causal attention no padding reaches a real token and no mask is needed.

    Args:
        model: as `with_log_probs` leaves it, or an engine around it.
    """
    ids, mask = batch.input_ids, batch.response_mask.bool()
    starts = torch.arange(len(batch), device=ids.device) * ids.shape[1] + batch.prompt_lengths - 1
    index = (starts[:, None] + torch.arange(mask.shape[1], device=ids.device))[mask]
    targets = Targets(index, ids.flatten()[index + 1], temperature, with_entropy)
    log_probs, entropy = model(input_ids=ids, use_cache=False, targets=targets)
    return _at(mask, log_probs), None if entropy is None else _at(mask, entropy)


def _at(mask: Tensor, values: Tensor) -> Tensor:
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
