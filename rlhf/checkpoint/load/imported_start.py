"""Start of a run at a checkpoint that was imported from another tool: what it takes over, and what begins anew."""

from collections.abc import Collection

from rlhf.checkpoint.load.locations import FileLocations
from rlhf.checkpoint.state.run_state import RunState
from rlhf.errors import UserError
from rlhf.storage.layout import INDEX, SCHEDULE


def refuse_an_end(located: FileLocations, state: RunState) -> None:
    """Raise UserError for a checkpoint that is at the run's last step or beyond, which only the ranks know."""
    step = located.manifest.step
    if state.driver.ends_with(step, 0.0):
        raise UserError(
            f"trainer.resume_from_path={located.path} is at step {step}, and nothing is left to train from there: the "
            f"run has {state.driver.total_steps} steps in all. Raise trainer.total_training_steps (or "
            "trainer.total_epochs), or import it as global_step_0."
        )


def start_told(located: FileLocations, state: RunState, load_contents: Collection[str]) -> str:
    """One line about the new run: where its checkpoint is from, and which parts of `state` it does not have."""
    manifest = located.manifest
    taken: list[str] = []
    anew: list[str] = []
    for role in state.roles:
        there = role in manifest.roles
        moments = "optimizer" in load_contents and f"{role}/optimizer/{INDEX}" in manifest.files
        schedule = "extra" in load_contents and f"{role}/{SCHEDULE}" in manifest.files
        for part, comes in (("weights", there), ("moments", moments), ("schedule", schedule)):
            (taken if comes else anew).append(f"{role}'s {part}")
    anew += ["reference"] if state.reference is not None else []
    anew += ["generators", *state.stateful]
    origin = f"{manifest.imported['path']} ({manifest.imported['layout']})"
    return (
        f"{located.path} was imported from {origin}. A new run begins there, after step {manifest.step}, with "
        f"{', '.join(taken)}. It is not that run continued to the bit: {', '.join(anew)} begin anew."
    )
