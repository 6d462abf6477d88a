import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.checkpoint.__main__ import main
from rlhf.checkpoint.commit.formats import FORMAT, OLDEST
from rlhf.checkpoint.commit.manifest import Manifest, describe, read_manifest, write_manifest
from rlhf.checkpoint.commit.removal import to_trash
from rlhf.checkpoint.verbs import list as list_verb
from rlhf.checkpoint.verbs import verify
from rlhf.checkpoint.verbs.addresses import find_runs
from rlhf.checkpoint.verbs.runs import LocalCheckpoint
from rlhf.config.resolved import to_yaml
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.storage.files import write_json
from rlhf.storage.layout import step_dir
from tests.support.checkpoints import (
    PlainReference,
    PlainRole,
    files_of,
    flip_bit,
    make_checkpointer,
    make_config,
    make_driver,
    save_steps,
)
from tests.support.published import publish
from tests.support.terminal import Terminal


@pytest.fixture
def run_dir(tmp_path) -> Path:
    config = make_config(tmp_path)
    config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
    save_steps(config, PlainRole(), 9, 10)
    return config.run_dir


def test_list_shows_the_checkpoints_pointer_and_set_aside_folders_of_a_run(run_dir, command):
    (run_dir / "global_step_4.damaged-1").mkdir()
    (run_dir / "global_step_2.superseded-1").mkdir()
    code, out, err = command("list", run_dir)
    assert (code, err) == (0, "")
    rows = [line for line in out.splitlines() if "committed" in line]
    assert [row.split()[0] for row in rows] == ["10", "9"]
    assert all(part in rows[0] for part in ("MiB", "fsdp2", "model, optimizer, extra, hf_model"))
    assert "latest_checkpointed_iteration.txt: 10" in out
    assert "set aside as damaged: global_step_4.damaged-1" in out
    assert "set aside as superseded: global_step_2.superseded-1" in out


def test_list_says_why_each_is_kept(tmp_path, command):
    config = make_config(tmp_path)
    config.checkpoint = CheckpointConfig(max_to_keep=1, keep_every=6, keep_best=1)
    for step, accuracy in ((2, 0.25), (4, 0.75), (6, 0.5), (8, None), (9, 0.5), (10, None)):
        publish(config.run_dir, step, {} if accuracy is None else {"val/accuracy": accuracy})
    flip_bit(step_dir(config.run_dir, 9) / "manifest.json", 100)

    def column(*names: str) -> list[list[str]]:
        lines = command("list", config.run_dir)[1].splitlines()
        heading, *rows = [line for line in lines if line[:4] == "step" or line[:1].isdigit()]
        starts = sorted(heading.index(name) for name in ("step", "created", "accuracy", "kept", "state"))
        ends = dict(zip(starts, [*starts[1:], None], strict=True))
        places = [(heading.index(name), ends[heading.index(name)]) for name in names]
        return [[row[start:end].strip() for start, end in places] for row in rows]

    # Without the settings of a start or a save, the list has metric values, but no reasons.
    figures = [["10", ""], ["9", ""], ["8", ""], ["6", "0.5000"], ["4", "0.7500"], ["2", "0.2500"]]
    assert column("step", "accuracy") == figures
    assert column("kept") == [[""]] * 6
    (config.run_dir / "resolved.yaml").write_text(to_yaml(config))
    assert column("kept") == [["newest"], ["unreadable"], ["may go"], ["for good"], ["best"], ["may go"]]
    # A run under torchrun has the settings in its checkpoints only.
    (config.run_dir / "resolved.yaml").write_text("broken: [")
    publish(config.run_dir, 11, config=to_yaml(config))
    reasons = [["newest"], ["may go"], ["unreadable"], ["may go"], ["for good"], ["best"], ["may go"]]
    assert column("kept") == reasons
    (step_dir(config.run_dir, 11) / "config.yaml").write_text("checkpoint: {max_to_keep: x}")
    assert column("kept") == [[""]] * 7
    # The list of a single checkpoint does not say why it is kept.
    assert "newest" not in command("list", step_dir(config.run_dir, 8))[1]


def test_inspect_shows_the_newest_in_detail(run_dir, command):
    code, out, err = command("inspect", run_dir)
    assert (code, err) == (0, "")
    for part in (
        str(step_dir(run_dir, 10)),
        f"in {len(files_of(step_dir(run_dir, 10))) - 1} files",
        "1, fsdp2",
        "step                           10",
        "weight  F32 [1000]  in 1 shard(s)",
        "weight.exp_avg  F32 [1000]  in 1 shard(s)",
        "actor/huggingface: ",
        "rng: ",
        "torch 2.",
    ):
        assert part in out, part
    assert str(step_dir(run_dir, 9)) in command("inspect", step_dir(run_dir, 9))[1]


def test_list_shows_linked_bytes_apart_from_written_bytes(tmp_path, command):
    config, reference = make_config(tmp_path), PlainReference(300_000)
    driver = make_driver()
    checkpointer = make_checkpointer(config, PlainRole(), driver=driver, reference=reference)
    for driver.step in (1, 2):
        checkpointer.save(driver.step)
    old, new = step_dir(config.run_dir, 1), step_dir(config.run_dir, 2)
    newest, first = [line for line in command("list", config.run_dir)[1].splitlines() if "committed" in line]
    assert "0.03 MiB and 1.14 MiB linked" in newest
    assert "1.17 MiB" in first
    assert "linked" not in first
    assert "linked           nothing\n" in command("inspect", old)[1]
    out = command("inspect", new)[1]
    assert "size             0.03 MiB and 1.14 MiB linked in" in out
    assert "linked           ref/model from global_step_1\n" in out
    assert "ref/model: 1.14 MiB, 1 tensors" in out
    assert command("verify", new)[1].endswith("0.03 MiB and 1.14 MiB linked in 10 files\n")


def test_verify_reads_all_of_a_run_or_one(run_dir, command):
    code, out, _ = command("verify", run_dir)
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == [str(step_dir(run_dir, s)) for s in (10, 9)]
    assert out.count("intact") == 2
    assert command("verify", step_dir(run_dir, 9))[1].count("intact") == 1


def test_verify_names_the_damaged_file_and_goes_on(run_dir, command):
    flip_bit(step_dir(run_dir, 10) / "actor/model/rank_00000.safetensors", 999)
    code, out, _ = command("verify", run_dir)
    assert code == 1
    damaged, intact = out.splitlines()
    assert damaged == (
        f"{step_dir(run_dir, 10)} is damaged: actor/model/rank_00000.safetensors: content differs from its hash"
    )
    assert intact.startswith(f"{step_dir(run_dir, 9)}: intact")


RETIRED = ("before", "while reading", "replaced")
"""When a run retires step 9: before a verb reads it, while the verb reads it, or with a different one in its place."""


@pytest.fixture(params=RETIRED)
def retiring_run(run_dir, monkeypatch, request) -> Path:
    """A run that retires step 9 once a verb has found both checkpoints."""

    def retire() -> None:
        trash = to_trash(step_dir(run_dir, 9))
        if request.param == "replaced":
            shutil.copytree(trash, step_dir(run_dir, 9))
            flip_bit(step_dir(run_dir, 9) / "manifest.json", 100)

    for verb in (list_verb, verify):
        hidden = lambda path, **_: (find_runs(path), request.param != "before" or retire())[0]  # noqa: E731
        monkeypatch.setattr(verb, "find_runs", hidden)
    if request.param == "before":
        return run_dir
    manifest = LocalCheckpoint.manifest

    def read(checkpoint: LocalCheckpoint) -> Manifest:
        found = manifest(checkpoint)
        if checkpoint.step == 9:
            retire()
            return found if request.param == "while reading" else manifest(checkpoint)
        return found

    monkeypatch.setattr(LocalCheckpoint, "manifest", read)
    return run_dir


def test_verify_says_that_a_checkpoint_was_removed_by_its_run(retiring_run, command):
    code, out, _ = command("verify", retiring_run)
    intact, removed = out.splitlines()
    assert code == 0
    assert intact.startswith(f"{step_dir(retiring_run, 10)}: intact")
    assert "removed" in removed
    assert "damaged" not in removed
    assert str(step_dir(retiring_run, 9)) in removed


@pytest.mark.parametrize("retiring_run", ["before", "replaced"], indirect=True)
def test_list_leaves_out_a_checkpoint_that_its_run_removes(retiring_run, command):
    code, out, _ = command("list", retiring_run, "--json")
    (run,) = json.loads(out)["runs"]
    assert code == 0
    assert [row["step"] for row in run["checkpoints"]] == [10]


def test_the_removal_of_a_named_checkpoint_is_a_problem(retiring_run, command):
    code, out, _ = command("verify", step_dir(retiring_run, 9), "--json")
    (found,) = json.loads(out)["checkpoints"]
    assert code == 1
    assert found["state"] == "removed"
    assert "removed" in found["problem"]


def test_a_damaged_manifest(run_dir, command):
    (step_dir(run_dir, 10) / "manifest.json").unlink()
    code, out, _ = command("list", run_dir)
    assert code == 1
    assert "never committed" in out
    assert out.count(" committed") == 2  # in "never committed", and as the state of the intact checkpoint
    for action in ("inspect", "verify"):
        code, out, _ = command(action, step_dir(run_dir, 10))
        assert code == 1
        assert f"{step_dir(run_dir, 10)} has no manifest.json: it was never committed" in out


def test_a_checkpoint_of_another_format_is_not_called_damaged(run_dir, command):
    root = step_dir(run_dir, 10)
    manifest = read_manifest(root)
    (root / "manifest.json").unlink()
    write_manifest(root, replace(manifest, format=OLDEST - 1))
    remedy = (
        f"{root}/manifest.json has format {OLDEST - 1}, and this version of the trainer reads formats {OLDEST} to "
        f"{FORMAT}: use"
    )
    code, out, _ = command("list", run_dir)
    assert code == 1
    assert "damaged" not in out
    assert f"other format: {remedy}" in " ".join(out.split())
    for action in ("list", "verify"):
        code, out, _ = command(action, run_dir, "--json")
        (found,) = json.loads(out)["runs"] if action == "list" else [json.loads(out)]
        other, whole = found["checkpoints"]
        assert code == 1
        assert (other["state"], other["step"]) == ("other format", 10)
        assert other["problem"].startswith(remedy)
        assert (whole["state"], whole["problem"]) == ("committed" if action == "list" else "intact", None)


@pytest.mark.parametrize("name", ["driver_state.json", "actor/optimizer/index.safetensors"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_inspect_of_damaged_documents_says_so(run_dir, command, name, harm):
    path = step_dir(run_dir, 10) / name
    if harm == "flip":
        flip_bit(path, 3)
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    else:
        path.unlink()
    code, out, _ = command("inspect", run_dir)
    assert code == 1
    assert f"{step_dir(run_dir, 10)} is damaged: {name}: " in out


def test_verbs_read_a_checkpoint_that_was_set_aside(run_dir, command):
    moved = step_dir(run_dir, 10).rename(run_dir / "global_step_10.damaged-1")
    for action in ("inspect", "verify", "list"):
        assert command(action, moved)[0] == 0


@pytest.mark.parametrize("action", ["list", "inspect", "verify"])
def test_absent_and_empty_paths(tmp_path, command, action):
    code, out, err = command(action, tmp_path / "nothing")
    assert (code, out) == (2, "")
    assert f"{tmp_path / 'nothing'} does not exist. Give a run directory" in err
    code, out, err = command(action, tmp_path)
    assert (code, out) == (2, "")
    assert f"{tmp_path} has no checkpoint (global_step_N)" in err


def test_names_with_brackets_are_shown_as_they_are(tmp_path, command):
    config = make_config(tmp_path / "[bold]lr=1[/red]")
    save_steps(config, PlainRole(), 1)
    for action in ("inspect", "verify"):
        assert "[bold]lr=1[/red]" in command(action, config.run_dir)[1]
    (step_dir(config.run_dir, 1) / "manifest.json").write_text("{")
    assert "[bold]lr=1[/red]" in command("list", config.run_dir)[1]


def test_the_checkpoint_verbs_do_not_import_torch(run_dir):
    script = (
        "import runpy, sys\n"
        "for verb, *more in (['list'], ['verify'], ['prune'], ['inspect']):\n"
        f"    for place in ({str(run_dir)!r}, {str(run_dir.parents[1])!r}, 'file://' + {str(run_dir)!r}):\n"
        "        if verb == 'prune' and '://' in place:\n"
        "            continue\n"
        "        try:\n"
        "            sys.argv = ['checkpoint', verb, place, '--json']\n"
        "            runpy.run_module('rlhf.checkpoint', run_name='__main__')\n"
        "        except SystemExit as end:\n"
        "            heavy = {'torch', 'transformers', 'numpy', 'hydra', 'omegaconf'} & set(sys.modules)\n"
        "            print(f'{verb} exit {end.code} heavy {sorted(heavy)}', file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    light, with_index = [f"{verb} exit 0 heavy []" for verb in ("list", "verify")], "inspect exit 0 heavy ['numpy']"
    lines = [line for line in done.stderr.splitlines() if " exit " in line]
    assert lines == [line for line in light for _ in range(3)] + ["prune exit 0 heavy []"] * 2 + [with_index] * 3


def test_a_wrong_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["repair", "x"])
    assert caught.value.code == 2
    assert "list" in capsys.readouterr().err


def test_driver_state_is_shown_whole_and_without_python(run_dir, command):
    driver = json.loads((step_dir(run_dir, 10) / "driver_state.json").read_text())
    out = command("inspect", run_dir)[1]
    lines = out.partition("driver state\n")[2].splitlines()
    shown = {line.split()[0].partition(".")[0] for line in lines if line[:1] == " " and ".weight" not in line}
    assert shown >= set(driver)
    assert "{" not in out
    assert "'" not in out


def test_a_driver_state_of_any_size_is_shown_in_part(run_dir, command):
    root = step_dir(run_dir, 10)
    driver = json.loads((root / "driver_state.json").read_text())
    deep: dict = {}
    for _ in range(50):
        deep = {"deeper": deep, "value": 1}
    driver |= {
        "deep": deep,
        "many": {f"key_{i}": i for i in range(5000)},
        "data": {"long": "x" * 100_000},
        "y" * 100_000: {},
    }
    (root / "driver_state.json").unlink()
    manifest = read_manifest(root)
    files = manifest.files | describe([write_json(root, "driver_state.json", driver)])
    (root / "manifest.json").unlink()
    write_manifest(root, replace(manifest, files=files))
    code, out, _ = command("inspect", root)
    assert code == 0
    assert max(map(len, out.splitlines())) < 500
    assert len([line for line in out.splitlines() if line.startswith("  many.")]) < 100
    assert re.search(r"\.\.\. and 4,9\d\d more \(--json shows all\)", out)
    assert command("inspect", root, "--json")[1].count("key_") == 5000


def test_a_narrow_terminal_breaks_no_word(run_dir):
    terminal = Terminal(80, run_dir, "-m", "rlhf.checkpoint", "list", run_dir)
    assert terminal.end() == 0
    shown = terminal.text
    assert shown.count("committed") == 2
    assert "…" not in shown
    for word in ("created", "optimizer,", "hf_model", "newest", "latest_checkpointed_iteration.txt:"):
        assert word in shown.split(), shown
