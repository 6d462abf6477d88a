"""Checks at the start whether a loaded model keeps packed sequences (several in one row) apart."""

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
LENGTHS = (9, 1, 17, 4, 4)  # lengths of the probe's sequences in tokens
TOLERANCE, COARSE_TOLERANCE = 1e-3, 5e-2
"""Largest relative difference of a token's hidden state, in float32 and in 16-bit types. If sequences attend to
each other, some token differs by 0.1 or more."""
PACKING_ERRORS = (TypeError, ValueError, AttributeError, KeyError, NotImplementedError)
"""Exceptions that a model may raise for unexpected arguments."""


def choose_packing(model: nn.Module, wanted: bool | None, setting: str) -> None:
    """Switch packing on or off, and log the choice and its reason. Collective.

    Args:
        model: an engine's module with its weights.
        wanted: the value of `setting`; None packs if the model passes the probe.

    Raises:
        UserError: packing is wanted and the model fails the probe.
    """
    reason = f"{setting}=false" if wanted is False else packing_problem(model)
    if reason is not None and wanted:
        raise UserError(
            f"{setting}=true: sequences can't be packed for this model "
            f"({transformers_model(model).config.model_type}): {reason}. "
            f"Set {setting}=null, which packs only where results stay the same."
        )
    if dims.everyone().rank == 0:
        log_choice(setting, wanted, reason, next(model.parameters()).device)


def log_choice(setting: str, wanted: bool | None, reason: str | None, device: torch.device) -> None:
    """Log that sequences are packed, or why not. Warn if a GPU computes padding that the user did not choose."""
    level = logging.WARNING if reason is not None and wanted is None and device.type == "cuda" else logging.INFO
    choice = "packed without padding" if reason is None else f"padded, since {reason}"
    log.log(level, "%s: sequences %s", setting.split(".")[0], choice)


@torch.no_grad()
def packing_problem(model: nn.Module) -> str | None:
    """Switch packing on and return None, or return the reason why the model cannot pack sequences. Collective.

    Compare one packed row with a pass per sequence, at the head's input: a value head of zeros would hide every
    difference. The tokens are fixed, and no random numbers are drawn.
    """
    device = next(model.parameters()).device
    with _exact_products():
        reason = _difference(model, device)
    if any_rank(reason is not None, device):
        unpack(model)
        return reason or "on another rank, packed and separate sequences give different results"
    return None


def _difference(model: nn.Module, device: torch.device) -> str | None:
    head = head_of(model)
    if head is None:
        return "its head is not where transformers has one"
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
        packed = lay_out(model, ids, LENGTHS)
        try:
            model(**packed.inputs)
        except PACKING_ERRORS as error:
            return f"it fails on a packed row ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
    row, coarse = seen[-1][0].double(), seen[-1].dtype.itemsize < 4
    together = torch.cat([row[a : a + n] for a, n in zip(packed.starts.tolist(), LENGTHS, strict=True)])
    difference = float(((together - apart).norm(dim=1) / apart.norm(dim=1)).max())
    if not difference <= (COARSE_TOLERANCE if coarse else TOLERANCE):
        return f"packed and separate sequences give different results (relative difference {difference:.2g})"
    return None


@contextmanager
def _exact_products() -> Iterator[None]:
    """Multiply float32 matrices without TF32 inside the context.

    TF32's rounding differs by shape, and would look as if packed sequences attended to each other.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextmanager
def _inputs_of(head: nn.Module) -> Iterator[list[Tensor]]:
    """Record the inputs of `head`, [rows, tokens, hidden size] each, inside the context."""
    seen: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        yield seen
    finally:
        hook.remove()
