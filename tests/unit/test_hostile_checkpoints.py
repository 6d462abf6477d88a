"""Checkpoints that no trainer has written: verbs report each with one message and an exit code.

A resume and `prune` pass over them and use the intact checkpoint before.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.checkpoint.commit.deleter import Deleter
from rlhf.checkpoint.commit.retention import retire
from rlhf.checkpoint.load.verification import newest_usable
from rlhf.checkpoint.start.run_dir import driver_state_of, newest_run
from rlhf.checkpoint.state.run_file import read_run_file
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.config.schema.guards import GuardsConfig
from rlhf.errors import UserError
from rlhf.learning.guards import Guards
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.progress_pipe import ProgressDisplay
from rlhf.ranks.transport import Transport
from rlhf.storage.layout import DRIVER_STATE, POINTER, RESOLVED, RUN_FILE, step_dir
from rlhf.storage.state import Stateful
from rlhf.tracking.run_log import RunLog
from tests.support.checkpoints import PlainRole, make_config, resume, save_steps
from tests.support.hostile import (
    LYING_WEIGHTS,
    NO_MANIFEST,
    WEIGHTS,
    WRONG_DOCUMENTS,
    WRONG_FIELDS,
    WRONG_FILES,
    WRONG_STATES,
    intact_run,
    look,
    short_timeouts,
    sparse,
    with_hash,
)
from tests.support.published import steps

LOOKS = ("list", "inspect", "verify")


@pytest.fixture(autouse=True)
def with_short_timeouts() -> Iterator[None]:
    with short_timeouts():
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return intact_run(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def run_dir(saved, tmp_path) -> Path:
    return shutil.copytree(saved, make_config(tmp_path).run_dir)


def prune_to_one(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Prune all but the newest checkpoint; step 2, which is intact, must stay."""
    rules = ("--max-to-keep", "1", "--keep-every", "null", "--keep-best", "0", "--yes")
    code, output = look("prune", run_dir, capsys, *rules)
    assert code == 0
    assert step_dir(run_dir, 2).is_dir()
    return output


@pytest.mark.parametrize("harm", [*NO_MANIFEST.items(), *WRONG_FIELDS.items()], ids=lambda harm: harm[0])
def test_an_invalid_manifest_is_one_message(run_dir, harm, capsys):
    """Verbs print one message, and a resume passes over the checkpoint and uses the one before it."""
    newest = step_dir(run_dir, 4)
    harm[1](newest)
    for verb in LOOKS:
        code, output = look(verb, newest, capsys)
        assert code == 1
        assert len([line for line in output.splitlines() if str(newest) in line]) == 1
    # The verbs still report the intact checkpoint beside it.
    assert look("list", run_dir, capsys)[1].count(" committed") == 1 + (harm[0] == "nothing")
    assert look("verify", run_dir, capsys)[1].count(": intact") == 1
    assert "the newest intact one is 2" in prune_to_one(run_dir, capsys)
    single_process = Coordinator(Transport())
    assert newest_usable(run_dir, single_process) == step_dir(run_dir, 2)
    assert driver_state_of(newest) is None
    assert newest_run(run_dir)["run_id"] == "r"
    retire(run_dir, CheckpointConfig(max_to_keep=1, keep_best=1), 4, Deleter(), single_process)
    assert steps(run_dir)[-1] == 4


@pytest.mark.parametrize("harm", WRONG_FILES.items(), ids=lambda harm: harm[0])
def test_a_file_of_the_wrong_kind_or_size_is_damage(run_dir, harm, capsys):
    newest = step_dir(run_dir, 4)
    harm[1](newest)
    code, output = look("verify", newest, capsys)
    assert code == 1
    assert f"{newest} is damaged: " in output
    assert look("list", newest, capsys)[0] == 0
    assert look("inspect", newest, capsys)[0] == (1 if DRIVER_STATE in output else 0)
    assert newest_usable(run_dir, Coordinator(Transport())) == step_dir(run_dir, 2)
    assert "keeps steps 2, 4; the newest intact one is 2" in prune_to_one(run_dir, capsys)


@pytest.mark.parametrize("harm", WRONG_DOCUMENTS.items(), ids=lambda harm: harm[0])
def test_a_document_of_the_wrong_form_is_damage_when_it_is_read(tmp_path, run_dir, harm, capsys):
    newest = step_dir(run_dir, 4)
    harm[1](newest)
    code, output = look("inspect", newest, capsys)
    assert code == 1
    assert f"{newest} is damaged: " in output
    assert [look(verb, newest, capsys)[0] for verb in ("list", "verify")] == [0, 0]
    config = make_config(tmp_path)
    config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
    assert resume(config, PlainRole()) == 2
    assert (run_dir / "global_step_4.damaged-1").is_dir()


def real_parts() -> dict[str, Stateful]:
    return {"guards": Guards(GuardsConfig()), "history": RunLog(None, ProgressDisplay(), 10)}


@pytest.mark.parametrize("harm", WRONG_STATES.items(), ids=lambda harm: harm[0])
def test_a_state_of_the_wrong_form_is_damage_and_the_run_falls_back(tmp_path, run_dir, harm, caplog):
    config = make_config(tmp_path)
    config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
    harm[1](step_dir(run_dir, 4))
    parts = real_parts()
    assert resume(config, PlainRole(), parts=parts) == 2
    assert "global_step_4 is damaged" in caplog.text
    assert (run_dir / "global_step_4.damaged-1").is_dir()
    assert {name: part.state_dict() for name, part in parts.items()} == {
        name: part.state_dict() for name, part in real_parts().items()
    }


@pytest.mark.parametrize("lie", LYING_WEIGHTS.items(), ids=lambda lie: lie[0])
def test_weights_with_a_forged_header_are_damage(tmp_path, lie, capsys):
    config = make_config(tmp_path)
    config.checkpoint.contents = ["hf_model"]
    save_steps(config, PlainRole(), 2, 4)
    newest = step_dir(config.run_dir, 4)
    with_hash(WEIGHTS, lie[1])(newest)
    assert [look(verb, newest, capsys)[0] for verb in LOOKS] == [0, 0, 0]
    if lie[0] == "no tensors":  # a valid file, but of another model
        with pytest.raises(UserError, match="do not fit the architecture"):
            resume(config, PlainRole())
    else:
        assert resume(config, PlainRole()) == 2


@pytest.mark.parametrize("name", [POINTER, RESOLVED])
@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: path.write_text("[" * 3_000),
        lambda path: path.write_text("checkpoint: {max_to_keep: x, keep_every: [], keep_best: null, best_metric: 3}"),
        lambda path: path.write_text("checkpoint: 5"),
        lambda path: path.symlink_to(path.name),
        sparse,
    ],
    ids=["pipe", "folder", "binary", "deep", "wrong types", "a number", "circle", "terabyte"],
)
def test_an_invalid_pointer_or_resolved_yaml_does_not_hide_checkpoints(run_dir, name, make, capsys):
    (run_dir / name).unlink(missing_ok=True)
    make(run_dir / name)
    code, output = look("list", run_dir, capsys)
    assert code == 0
    assert output.count(" committed") == 2


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, Path.mkdir, lambda path: path.write_bytes(b"\xff"), lambda path: path.write_text("[]"), sparse],
    ids=["pipe", "folder", "binary", "list", "terabyte"],
)
def test_an_invalid_run_file_is_a_user_error(run_dir, make):
    (run_dir / RUN_FILE).unlink(missing_ok=True)
    make(run_dir / RUN_FILE)
    with pytest.raises(UserError, match="Remove the file; a checkpoint"):
        read_run_file(run_dir)
