"""Computes log-probs and entropies of given tokens from hidden states, with logits of only a chunk at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from rlhf.config.buffer_sizes import CHUNK_ELEMENTS, HEAD_GRADIENT_BYTES

Finish = Callable[[Tensor], Tensor]


def token_log_probs(
    hidden: Tensor,
    labels: Tensor,
    temperature: float,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    finish: Finish | None = None,
    with_entropy: bool,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-prob of each label and the entropy of its distribution, [M] each, float32 or wider.

    The entropy is None unless `with_entropy`.

    The product with the head's weight is in the type of `hidden`, the softmax in float32. Tokens with a logit of -inf,
    such as padding entries of a vocabulary, add nothing to the entropy and have no gradient.

    Args:
        hidden: [M, H], or with `weight=None` logits [M, V].
        labels: [M] int64.
        temperature: divides the logits.
        weight: [V, H] of the head, with its `bias` [V].
        finish: computes the logits [m, V] from hidden @ weight^T + bias, for example by soft-capping; None if this
            sum already is the logits.
        kept: [M, K] integers, ids padded with -1: renormalize each row's distribution over these tokens, among which is
            the label. The others then have the probability 0. A row of only -1 keeps the whole vocabulary.
    """
    log_probs, entropy = _TokenLogProbs.apply(hidden, weight, bias, labels, temperature, finish, with_entropy, kept)
    return log_probs, entropy


class _TokenLogProbs(torch.autograd.Function):
    """Recomputes each chunk's logits in the backward pass. An entropy without gradient adds no work to this pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        finish: Finish | None,
        with_entropy: bool,
        kept: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = hidden.new_empty(labels.shape, dtype=wide)
        normalizer = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        for rows in _chunks(hidden, weight):
            product = _product(hidden[rows], weight, bias)
            scaled = _scaled(product if finish is None else finish(product), temperature, wide)
            _exclude(scaled, labels[rows], kept, rows)
            of_label = scaled.gather(1, labels[rows, None])[:, 0]
            top = scaled.amax(dim=1)
            below = scaled.sub_(top[:, None])
            if entropy is None:
                normalizer[rows] = below.exp_().sum(dim=1).log_().add_(top)
            else:
                unnormalized = below.exp()
                total = unnormalized.sum(dim=1)
                normalizer[rows] = total.log().add_(top)
                # An impossible token has probability 0 and logarithm -inf; their product counts as 0.
                mean = unnormalized.mul_(below.clamp_(min=torch.finfo(wide).min)).sum(dim=1).div_(total)
                entropy[rows] = total.log_().sub_(mean)
            log_probs[rows] = of_label - normalizer[rows]
        ctx.save_for_backward(hidden, weight, bias, labels, normalizer, entropy, kept)
        ctx.temperature, ctx.finish = temperature, finish
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normalizer, entropy, kept = ctx.saved_tensors
        of_log_probs, of_entropy = gradients
        if of_log_probs is None:
            of_log_probs = torch.zeros_like(normalizer)
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = _Sum(weight, len(hidden)) if ctx.needs_input_grad[1] else None
        of_bias = _Sum(bias, len(hidden)) if ctx.needs_input_grad[2] else None
        for rows in _chunks(hidden, weight):
            logits = product = _product(hidden[rows], weight, bias)
            if ctx.finish is not None:
                with torch.enable_grad():
                    logits = ctx.finish(product.requires_grad_())
            log_p = _scaled(logits.detach(), ctx.temperature, normalizer.dtype).sub_(normalizer[rows, None])
            _exclude(log_p, labels[rows], kept, rows)
            # d log p_label / d logit_v = ([v = label] - p_v) / T;  d entropy / d logit_v = -p_v (log p_v + entropy) / T
            of_label = of_log_probs[rows, None] / ctx.temperature
            factor = -of_label
            if of_entropy is not None:
                surprise = log_p.masked_fill(log_p.isneginf(), 0.0).add_(entropy[rows, None])
                factor = surprise.mul_(of_entropy[rows, None] / -ctx.temperature).sub_(of_label)
            gradient = log_p.exp_().mul_(factor).scatter_add_(1, labels[rows, None], of_label).to(logits.dtype)
            if ctx.finish is not None:
                (gradient,) = torch.autograd.grad(logits, product, gradient)
            if of_hidden is not None:
                of_hidden[rows] = gradient if weight is None else gradient @ weight
            if of_weight is not None:
                of_weight.add_product(gradient, hidden[rows])
            if of_bias is not None:
                of_bias.add(gradient)
        sums = [None if total is None else total.result() for total in (of_weight, of_bias)]
        return of_hidden, *sums, None, None, None, None, None


def _chunks(hidden: Tensor, weight: Tensor | None) -> Iterator[slice]:
    vocabulary = hidden.shape[1] if weight is None else weight.shape[0]
    rows = max(1, CHUNK_ELEMENTS[hidden.device.type] // vocabulary)
    for first in range(0, len(hidden), rows):
        yield slice(first, first + rows)


def _product(part: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return part if weight is None else linear(part, weight, bias)


def _scaled(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """Return the logits divided by the temperature in `dtype`, always as a new tensor."""
    return torch.div(logits, temperature) if logits.dtype == dtype else logits.to(dtype).div_(temperature)


def _exclude(scaled: Tensor, labels: Tensor, kept: Tensor | None, rows: slice) -> None:
    """Set the logits `scaled` [m, V] to -inf outside the tokens `kept` [M, K] of the `rows`, in place."""
    if kept is None:
        return
    ids = kept[rows].long()
    excluded = (ids >= 0).any(dim=1, keepdim=True).repeat(1, scaled.shape[1])
    excluded.scatter_(1, torch.where(ids < 0, labels[:, None], ids), False)
    scaled.masked_fill_(excluded, -torch.inf)


class _Sum:
    """Sums a parameter's gradient over the chunks, `tokens` tokens in all, in float32 or wider.

    Adds the products of many chunks at once: on a GPU, adding to a large sum takes longer than one chunk's product.
    """

    def __init__(self, parameter: Tensor, tokens: int) -> None:
        self._dtype, self._tokens = parameter.dtype, tokens
        wide = torch.promote_types(parameter.dtype, torch.float32)
        self._sum = torch.zeros_like(parameter, dtype=wide, memory_format=torch.contiguous_format)
        # Factors of products that are not added yet: rows [0, _waiting) of _left, and _right.
        self._left: Tensor | None = None
        self._right: list[Tensor] = []
        self._waiting = 0

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left^T right, of [m, V] and [m, H]. The caller may overwrite `left` afterwards, but not `right`."""
        room = min(self._tokens, HEAD_GRADIENT_BYTES[left.device.type] // (left.shape[1] * left.element_size()))
        if room < 2 * len(left) and self._left is None:
            self._add(left, right)
            return
        if self._left is None:
            self._left = left.new_empty(room, left.shape[1])
        if self._waiting + len(left) > len(self._left):
            self._flush()
        self._left[self._waiting : self._waiting + len(left)] = left
        self._right.append(right)
        self._waiting += len(left)

    def _flush(self) -> None:
        if self._left is not None and self._right:
            self._add(self._left[: self._waiting], torch.cat(self._right))
        self._right, self._waiting = [], 0

    def _add(self, left: Tensor, right: Tensor) -> None:
        if left.dtype == self._sum.dtype:
            self._sum.addmm_(left.t(), right)
        else:
            self._sum += left.t() @ right

    def add(self, rows: Tensor) -> None:
        """Add the sum of `rows`, [m, V]."""
        self._sum += rows.sum(dim=0, dtype=self._sum.dtype)

    def result(self) -> Tensor:
        self._flush()
        return self._sum.to(self._dtype)
