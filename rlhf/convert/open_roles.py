"""Opens all models of one checkpoint, by role."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from rlhf.checkpoint.export.layout_native import REFERENCE_ROLE, NativeCheckpoint
from rlhf.convert.layouts import AUTO, open_source
from rlhf.models.hf.source import Origin, TensorSource
from rlhf.storage.layout import REFERENCE

ACTOR, CRITIC = "actor", "critic"


@contextmanager
def open_roles(origin: Origin, backend: str = AUTO, *, trained: bool = False) -> Iterator[dict[str, TensorSource]]:
    """Yield the open models by role. `trained`: leave out a reference that `ref.update_freq` updated.

    Raises the errors of `open_source`.
    """
    with ExitStack() as stack:
        actor = open_source(replace(origin, role=ACTOR), backend)
        stack.callback(actor.close)
        roles = {ACTOR: actor}
        for role in _others(origin.path, actor):
            if trained and role == REFERENCE_ROLE:
                continue
            roles[role] = open_source(replace(origin, role=role), backend)
            stack.callback(roles[role].close)
        yield roles


def _others(path: Path, actor: TensorSource) -> list[str]:
    if isinstance(actor, NativeCheckpoint):
        manifest = actor.manifest
        moving = [REFERENCE_ROLE] if manifest.in_folder(REFERENCE) else []
        return [role for role in manifest.roles if role != ACTOR] + moving
    # verl puts the critic into a folder of this name.
    return [CRITIC] if (path / CRITIC).is_dir() else []
