"""Probe of a loaded model at the start: whether sequences packed into one row stay apart in it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rlhf.errors import UserError
from rlhf.models.packing import head_of, lay_out, pack, transformers_model, unpack
from rlhf.ranks import dims
from rlhf.ranks.collectives import any_rank

log = logging.getLogger(__name__)
LENGTHS = (9, 1, 17, 4, 4)
"""Tokens of the probe's sequences."""
TOLERANCE, COARSE_TOLERANCE = 1e-3, 5e-2
"""Largest difference of a token's hidden state over its size, in float32 and in types of 16 bits. Sequences that mix
differ by 0.1 and more somewhere."""
REFUSALS = (TypeError, ValueError, AttributeError, KeyError, NotImplementedError)
"""What a model may raise at arguments that it does not expect."""


def choose_packing(model: nn.Module, wanted: bool | None, setting: str) -> None:
    """Pack for `model` as the setting says, and log what was chosen and why. Collective.

    Args:
        model: an engine's module, with its weights.
        wanted: the setting's value; None packs where the model passes the probe.

    Raises:
        UserError: packing is wanted and the model fails the probe.
    """
    reason = f"{setting}=false" if wanted is False else why_not(model)
    if reason is not None and wanted:
        raise UserError(
            f"{setting}=true: sequences can't be packed for this model "
            f"({transformers_model(model).config.model_type}): {reason}. "
            f"Set {setting}=null, which packs only where results stay the same."
        )
    if dims.everyone().rank == 0:
        who = setting.split(".")[0]
        log.info("%s: sequences %s", who, "packed without padding" if reason is None else f"padded, since {reason}")


@torch.no_grad()
def why_not(model: nn.Module) -> str | None:
    """The reason why sequences can't be packed for `model`, or None, and it is left packed for. Collective.

    One packed row is compared with a pass of each sequence, at the input of the head: a value head that is still zero
    would hide everything. The tokens are always the same, and no random numbers are drawn.
    """
    device = next(model.parameters()).device
    reason = _difference(model, device)
    if any_rank(reason is not None, device):
        unpack(model)
        return reason or "on another rank packed sequences get other results than separate ones"
    return None


def _difference(model: nn.Module, device: torch.device) -> str | None:
    head = head_of(model)
    if head is None:
        return "its head is not where the library has one"
    vocabulary = transformers_model(model).config.get_text_config().vocab_size
    ids = (torch.arange(len(LENGTHS) * max(LENGTHS), device=device) * 7919 + 11) % vocabulary
    ids = ids.view(len(LENGTHS), -1)
    with _inputs_of(head) as seen:
        for row, length in zip(ids, LENGTHS, strict=True):
            model(input_ids=row[None, :length], use_cache=False)
        if any(hidden.dim() != 3 for hidden in seen):
            return "its head does not read every token"
        apart = torch.cat([hidden[0] for hidden in seen]).double()
        pack(model)
        packed = lay_out(model, ids, torch.tensor(LENGTHS, device=device))
        try:
            model(**packed.inputs)
        except REFUSALS as error:
            return f"it fails on a packed row ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
    row, coarse = seen[-1][0].double(), seen[-1].dtype.itemsize < 4
    together = torch.cat([row[a : a + n] for a, n in zip(packed.starts.tolist(), LENGTHS, strict=True)])
    difference = float(((together - apart).norm(dim=1) / apart.norm(dim=1)).max())
    if not difference <= (COARSE_TOLERANCE if coarse else TOLERANCE):
        return f"packed sequences get other results than separate ones (up to {difference:.2g} of their size)"
    return None


@contextmanager
def _inputs_of(head: nn.Module) -> Iterator[list[Tensor]]:
    """The hidden states, [rows, tokens, hidden size], that `head` is given in the passes of the context."""
    seen: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        yield seen
    finally:
        hook.remove()
