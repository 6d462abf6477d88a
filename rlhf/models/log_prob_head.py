"""Makes a causal LM return log-probs of tokens instead of logits; logits exist for one chunk at a time."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from rlhf.algorithms.liger_log_probs import liger_log_probs
from rlhf.algorithms.token_log_probs import Finish, token_log_probs


@dataclass(frozen=True)
class Targets:
    """M tokens whose log-probs are needed."""

    index: Tensor  # [M] int64: the position that predicts each token, in the flattened [N, L] input
    labels: Tensor  # [M] int64: token ids
    temperature: float
    with_entropy: bool
    kept: Tensor | None = None  # [M, K] int32: see `token_log_probs`


class LogProbHead(nn.Linear):
    """Computes logits [..., V] from hidden states [..., H]; with `targets`, log-probs and entropies [M] from [M, H]."""

    use_liger: bool

    def forward(self, hidden: Tensor, *, targets: Targets | None = None, finish: Finish | None = None) -> Any:
        if targets is None:
            return super().forward(hidden)
        liger = self.use_liger and finish is None and not targets.with_entropy and targets.kept is None
        if liger and len(hidden):
            return liger_log_probs(hidden, targets.labels, targets.temperature, self.weight, self.bias), None
        return token_log_probs(
            hidden,
            targets.labels,
            targets.temperature,
            weight=self.weight,
            bias=self.bias,
            finish=finish,
            with_entropy=targets.with_entropy,
            kept=targets.kept,
        )


class LogProbModel(nn.Module):
    """Mixin for a causal LM: with `targets`, `forward` returns log-probs and entropies, else the usual output.

    The mixin calls trunk and head as modules, because engines gather sharded weights in hooks around module calls.
    """

    whole_logits: str | None
    """Reason why the logits of all targets are computed at once; None if they are computed in chunks."""
    _parts: "_Parts"

    def forward(self, *args: Any, targets: Targets | None = None, **inputs: Any) -> Any:
        if targets is None:
            return super().forward(*args, **inputs)
        if self.whole_logits is not None:
            logits = super().forward(*args, **inputs).logits.flatten(0, 1)[targets.index]
            return token_log_probs(
                logits, targets.labels, targets.temperature, with_entropy=targets.with_entropy, kept=targets.kept
            )
        hidden = self.get_submodule(self._parts.trunk)(*args, **inputs)[0].flatten(0, 1)[targets.index]
        return self.get_submodule(self._parts.head)(hidden, targets=targets, finish=self._parts.finish)


def with_log_probs(model: Any, *, use_liger: bool = False) -> Any:
    """Make `model.forward` accept `targets`; return `model`, with unchanged weights and names.

    Args:
        use_liger: use Liger's kernel where no entropy is needed and the logits are exactly the head's output.
    """
    if isinstance(model, LogProbModel):
        return model
    parts = _parts_of(model)
    if isinstance(parts, str):
        whole_logits = parts
    else:
        whole_logits = None
        model._parts = parts
        head = model.get_submodule(parts.head)
        head.__class__, head.use_liger = LogProbHead, use_liger
    kind = type(model)
    model.__class__ = type(kind.__name__, (LogProbModel, kind), {"__module__": kind.__module__})
    model.whole_logits = whole_logits
    return model


@dataclass(frozen=True)
class _Parts:
    """Names of a causal LM's trunk and head.

    `finish` turns the head's output into logits; it is None if the head's output already is the logits.
    """

    trunk: str
    head: str
    finish: Finish | None


def _parts_of(model: Any) -> _Parts | str:
    """Return the parts, or the reason why the model cannot be split into a trunk and a head."""
    kind = type(model).__name__
    children = {id(child): name for name, child in model.named_children()}
    trunk = children.get(id(getattr(model, "base_model", None)))
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if trunk is None or id(head) not in children:
        return f"{kind} does not consist of a trunk and a head"
    if type(head) is not nn.Linear:
        return f"the head of {kind} is a {type(head).__name__}"
    tail = _Tail(model, trunk, children[id(head)])
    head_output = torch.zeros(1, 1, head.out_features)
    try:
        unchanged = tail.logits(head_output) is head_output
    except Exception as error:  # the model's own code may raise anything
        return f"the forward pass of {kind} can't be split at its head ({type(error).__name__}: {error})"
    return _Parts(trunk, children[id(head)], None if unchanged else tail)


class _Tail:
    """Computes logits from the head's output, for example by soft-capping.

    Runs the model's own `forward` with stand-ins for trunk and head.
    """

    def __init__(self, model: nn.Module, trunk: str, head: str) -> None:
        self._model, self._head = copy.copy(model), head
        stand_in: Any = _Trunk()
        self._model._modules = model._modules | {trunk: stand_in}

    def __call__(self, head_output: Tensor) -> Tensor:
        """Return logits [m, V] of the head's output [m, V]."""
        return self.logits(head_output[None])[0]

    def logits(self, head_output: Tensor) -> Tensor:
        """Return logits [1, m, V] of the head's output [1, m, V]; the same object if the model changes nothing."""
        head: Any = lambda _: head_output  # noqa: E731
        self._model._modules[self._head] = head
        ids = torch.zeros(head_output.shape[:2], dtype=torch.int64, device=head_output.device)
        try:
            return self._model.forward(input_ids=ids, use_cache=False).logits
        finally:
            del self._model._modules[self._head]


class _Trunk:
    """Stand-in for a trunk and for every module in it."""

    def __call__(self, input_ids: Tensor, **_: Any) -> Any:
        hidden = torch.zeros(*input_ids.shape, 1, device=input_ids.device)
        return _Outputs(last_hidden_state=hidden)

    def __getattr__(self, name: str) -> "_Trunk":
        if name.startswith("__"):  # `copy` and other modules look up special methods
            raise AttributeError(name)
        return self


class _Outputs(BaseModelOutput):
    """Output of a trunk; optional fields are None."""

    def __getattr__(self, name: str) -> None:
        return None
