"""Runs that start from an imported checkpoint: they train on each engine, and survive a kill after a save."""

import json
from pathlib import Path

import pytest

from rlhf.checkpoint.__main__ import main
from rlhf.errors import EXIT_DONE
from tests.support.compare_runs import differences
from tests.support.interrupter import at
from tests.support.launching import Ended, ranks, records, saved_steps, small


class Imported:
    """The undisturbed run's checkpoint of step 3, imported like another tool's, and runs that start from it."""

    def __init__(self, folder: Path, source: Path, sums: Path) -> None:
        self.folder, self.sums, self.path = folder, sums, folder / "imported" / "global_step_3"
        assert main(["import", str(source), str(self.path)]) == EXIT_DONE

    def start(self, name: str, *overrides: str, nproc: int = 1, environment: dict[str, str] | None = None) -> Ended:
        """Train two steps, with a save after each."""
        command = [
            *small(self.folder, name, self.sums, f"model.path={self.path}/actor/huggingface"),
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={self.path}",
            "trainer.total_training_steps=5",
            "trainer.save_freq=1",
            *overrides,
        ]
        return ranks(self.folder / "log", command, environment, nproc)

    def run_dir(self, name: str) -> Path:
        return self.folder / "rlhf" / name


@pytest.fixture
def imported(tmp_path, undisturbed, sums) -> Imported:
    return Imported(tmp_path, undisturbed.run_dir(1) / "global_step_3", sums)


def test_a_start_that_is_killed_after_its_first_save_ends_as_one_that_is_not(imported):
    whole = imported.start("whole")
    assert whole.code == EXIT_DONE, whole.output
    assert f"{imported.path} was imported from" in whole.output
    assert "with actor's weights, actor's moments, actor's schedule" in whole.output
    assert [record["step"] for record in records(imported.run_dir("whole"))] == [4, 5]
    killed = imported.start("killed", environment=at("commit.published", 1, "SIGKILL"))
    assert killed.code == -9, killed.output
    assert saved_steps(imported.run_dir("killed")) == [4]
    again = imported.start("killed")
    assert again.code == EXIT_DONE, again.output
    assert "was imported from" not in again.output, "it must continue from its own checkpoint"
    assert differences(imported.run_dir("whole"), imported.run_dir("killed")) == []
    ids = {json.loads((imported.run_dir(name) / "run.json").read_text())["run_id"] for name in ("whole", "killed")}
    ids.add(json.loads((imported.path / "driver_state.json").read_text())["run_id"])
    assert len(ids) == 3, "new runs"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_two_ranks_begin_there_with_the_base_model_as_reference(imported, engine):
    base = f"model.path={Path(__file__).parents[2] / 'rlhf' / 'models' / 'tiny_policy'}"
    end = imported.start("two", base, f"backend={engine}", nproc=2)
    assert end.code == EXIT_DONE, end.output
    assert "with actor's weights, actor's moments, actor's schedule" in end.output
    first, second = records(imported.run_dir("two"))
    assert (first["step"], second["step"]) == (4, 5)
    assert first["actor/kl_loss"] > 0, "the policy has moved away from the base model in the steps before"
    assert saved_steps(imported.run_dir("two")) == [5, 4]
