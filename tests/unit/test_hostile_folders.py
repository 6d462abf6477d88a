"""Folders that are no checkpoints: every verb reports each with one message and an exit code."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlhf.storage.layout import CONFIG, MANIFEST, step_dir
from tests.support.hostile import VERBS, bind, intact_run, look, short_timeouts, sparse


@pytest.fixture(autouse=True)
def with_short_timeouts() -> Iterator[None]:
    with short_timeouts():
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return intact_run(tmp_path_factory.mktemp("saved"))


def other_tool(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 10)
    return folder


def hugging_face(folder: Path) -> Path:
    other_tool(folder, "config.json", "tokenizer.json")
    save_file({"weight": torch.zeros(3)}, folder / "model.safetensors")
    return folder


def not_to_be_entered(folder: Path) -> Path:
    folder.mkdir(mode=0o000)
    return folder


FOREIGN: dict[str, tuple[Callable[[Path], Path], int]] = {
    "nothing": (lambda folder: folder / "nothing", 2),
    "an empty folder": (other_tool, 2),
    "a file": (lambda folder: other_tool(folder, "a") / "a", 2),
    "a file that is called a checkpoint": (lambda folder: other_tool(folder, "global_step_4") / "global_step_4", 2),
    "a device": (lambda folder: Path("/dev/null"), 2),
    "a file below a file": (lambda folder: other_tool(folder, "a") / "a/b", 2),
    "a name too long": (lambda folder: folder / ("x" * 300), 2),
    "a name with a zero byte": (lambda folder: folder / "a\0b", 2),
    "a name that is no text": (lambda folder: folder / os.fsdecode(b"\xff\xfe"), 2),
    "a name with escapes": (lambda folder: folder / "\x1b[31mred\x07", 2),
    "Hugging Face": (hugging_face, 2),
    "the Hugging Face trainer": (
        lambda folder: other_tool(folder, "checkpoint-500/trainer_state.json", "checkpoint-500/optimizer.pt"),
        2,
    ),
    "DeepSpeed": (
        lambda folder: other_tool(folder, "global_step20/mp_rank_00_model_states.pt", "latest", "zero_to_fp32.py"),
        2,
    ),
    "verl": (
        lambda folder: other_tool(
            folder,
            "global_step_20/actor/model_world_size_2_rank_0.pt",
            "global_step_20/data.pt",
            "latest_checkpointed_iteration.txt",
        ),
        1,
    ),
    "torch": (lambda folder: other_tool(folder, ".metadata", "__0_0.distcp"), 2),
    "names that are almost ours": (
        lambda folder: other_tool(folder, "global_step_04/x", "global_step_-1/x", "global_step_\u0664/x"),
        2,
    ),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("foreign", FOREIGN.items(), ids=lambda foreign: foreign[0])
def test_a_foreign_folder_is_one_message(tmp_path, foreign, verb, capsys):
    make, expected = foreign[1]
    (tmp_path / "folder").mkdir()
    path = make(tmp_path / "folder")
    code, output = look(verb, path, capsys)
    if foreign[0] == "verl" and verb == "prune":
        assert (code, "Give --max-to-keep" in output) == (2, True)
        return
    assert code == expected
    if expected == 2:
        assert len(output.splitlines()) == 1
        assert "Give a run directory" in output


@pytest.mark.parametrize("verb", VERBS)
def test_links_in_a_circle_are_one_message(tmp_path, verb, capsys):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    code, output = look(verb, tmp_path / "a", capsys)
    assert (code, len(output.splitlines())) == (2, 1)
    (tmp_path / "global_step_2").symlink_to("global_step_2")
    assert look(verb, tmp_path, capsys)[0] == 2


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("what", ["the run", "a checkpoint", "a manifest", "a file"])
def test_an_unreadable_path_is_one_message(saved, verb, what, capsys):
    with tempfile.TemporaryDirectory() as folder:  # a folder that other users may enter
        run_dir = shutil.copytree(saved, Path(folder, "run"))
        newest = step_dir(run_dir, 4)
        look(verb, run_dir, capsys)  # imports its modules while it may read them
        Path(folder).chmod(0o755)
        closed = {
            "the run": run_dir,
            "a checkpoint": newest,
            "a manifest": newest / MANIFEST,
            "a file": newest / CONFIG,
        }
        closed[what].chmod(0)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            code, output = look(verb, run_dir, capsys)
        finally:
            os.seteuid(user)
            closed[what].chmod(0o755)
    if what != "the run" and (verb == "prune" or (what == "a file" and verb != "verify")):
        assert code == 0
        return
    assert code == (2 if what == "the run" else 1)
    assert "Permission denied" in output
    assert ("intact" in output) == (verb == "verify" and what != "the run")


def test_links_pipes_and_sockets_in_a_tree_do_not_hide_a_run(saved, tmp_path, capsys):
    tree = tmp_path / "tree"
    shutil.copytree(saved, tree / "project/run")
    (tree / "project/circle").symlink_to(tree)
    (tree / "project/up").symlink_to("..")
    (tree / "project/root").symlink_to("/")
    (tree / "project/dangling").symlink_to("nowhere")
    os.mkfifo(tree / "project/pipe")
    bind(tree / "project/socket")
    sparse(tree / "project/terabyte")
    (tree / "project/\x1b[31mred\x07").mkdir()
    (tree / "project" / os.fsdecode(b"\xff\xfe")).mkdir()
    deep = tree / "project"
    for _ in range(100):
        deep = deep / "d"
    deep.mkdir(parents=True)
    (tree / "other/\x1b[2J/global_step_3").mkdir(parents=True)
    (tree / "other" / os.fsdecode(b"\xff") / "global_step_3").mkdir(parents=True)
    for verb, count in (("list", " committed"), ("verify", ": intact"), ("inspect", "driver state")):
        code, output = look(verb, tree, capsys)
        assert code == 1  # because of the two runs with invalid names
        assert output.count("it was never committed") == 2
        assert output.replace("never committed", "").count(count) == (1 if verb == "inspect" else 2)
    code, output = look("prune", tree, capsys, "--max-to-keep", "1")
    assert code == 0
    assert output.count("no checkpoint is intact") == 2
    assert "would remove global_step_2" in output


@pytest.mark.parametrize("name", ["run.lock", "ranks.lock"])
@pytest.mark.parametrize(
    "make",
    [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path.name), lambda path: path.write_text("[" * 100_000)],
    ids=["pipe", "folder", "circle", "deep"],
)
def test_an_invalid_lock_file_does_not_crash_prune(saved, tmp_path, name, make, capsys):
    run_dir = shutil.copytree(saved, tmp_path / "run")
    (run_dir / name).unlink(missing_ok=True)
    make(run_dir / name)
    code, output = look("prune", run_dir, capsys, "--yes", "--max-to-keep", "1")
    assert code in (0, 1)
    assert (run_dir / "global_step_2").is_dir() == (code == 1)
    assert code == 0 or str(run_dir) in output
