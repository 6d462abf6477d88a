"""A finished run that is asked for `hf_model` writes it beside its checkpoints, not into a checkpoint."""

import json
import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.checkpoint.commit.output_folder import INCOMPLETE, REPLACED
from rlhf.checkpoint.export.finished_export import explain_no_export, export_finished
from rlhf.compose import compose_config
from rlhf.config import CheckpointConfig, Config
from rlhf.config.library import Library
from rlhf.errors import EXIT_DONE
from rlhf.events import subscribe
from rlhf.launch.supervisor import supervise
from rlhf.models.loading import ModelSource, ModelStart, load_model, load_model_config
from rlhf.storage.layout import step_dir
from rlhf.storage.shards import Shard, Shards
from tests.support.checkpoints import TINY_POLICY, PlainRole, begin_at, equal_bits, files_of, run_ranks, save_steps
from tests.support.launching import ranks
from tests.support.sections import prepare
from tests.support.small_disks import small_disk

STEPS = 80
ASKED = "checkpoint.contents=[model,hf_model]"
UNASKED = "checkpoint.contents=[model,optimizer]"


class TinyRole(PlainRole):
    """A role with the weights of the bundled policy, each changed a little."""

    def __init__(self, moved: float = 0.5) -> None:
        super().__init__()
        source = ModelSource("model.path", str(TINY_POLICY))
        model = load_model(ModelStart(source, TINY_POLICY, load_model_config(source, TINY_POLICY)))
        self.weights = {name: p.detach() + moved * p.detach().std() / 3 for name, p in model.named_parameters()}

    def model_shards(self) -> Shards:
        return {name: Shard(tuple(t.shape), (0,), t.reshape(-1)) for name, t in self.weights.items()}

    def hf_files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in TINY_POLICY.iterdir() if path.suffix != ".safetensors"}


def command(folder: Path, *more: str) -> list[str]:
    settings = (f"trainer.default_local_dir={folder}", f"model.path={TINY_POLICY}", "trainer.device=cpu")
    return [*settings, "trainer.warm_start=false", "checkpoint.async_save=false", *more]


def config_of(folder: Path, *more: str) -> Config:
    return compose_config(command(folder, *more), Library.find(None))


def finished(folder: Path, *more: str, role: PlainRole | None = None) -> Config:
    """Return a run that has saved its last step, without an export unless `more` asks for it."""
    config = config_of(folder, UNASKED, *more)
    save_steps(config, role or TinyRole(), STEPS)
    prepare(config)
    return config


def again(folder: Path, *more: str) -> int:
    """Run the command again, and return its exit code."""
    return supervise(config_of(folder, *more), lambda: None)


@pytest.fixture
def log(caplog) -> Iterator[pytest.LogCaptureFixture]:
    """The log of `rlhf`, captured at that logger because `configure_logging` removes the handlers of the root."""
    logger = logging.getLogger("rlhf")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "rlhf")
    yield caplog
    logger.removeHandler(caplog.handler)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files_of(folder)}


def test_finished_run_writes_the_requested_export_once(tmp_path, log):
    role = TinyRole()
    config = finished(tmp_path, role=role)
    checkpoint = step_dir(config.run_dir, STEPS)
    before = contents(checkpoint)
    folder = config.run_dir / "huggingface" / "actor"
    assert again(tmp_path, ASKED) == EXIT_DONE
    assert f"The model for other tools, as of global_step_{STEPS}, was written to {folder.parent}." in log.text
    assert "changed setting has no effect" not in log.text
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert equal_bits({name: p.detach() for name, p in model.named_parameters()}, role.weights)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(TINY_POLICY).chat_template
    assert contents(checkpoint) == before
    # The second command finds the export.
    inode = (folder / "model.safetensors").stat().st_ino
    assert again(tmp_path, ASKED) == EXIT_DONE
    assert log.messages.count(f"The model for other tools is in {folder.parent}.") == 1
    assert (folder / "model.safetensors").stat().st_ino == inode
    # An export in another type replaces the first export.
    asking = replace(config.checkpoint, contents=["model", "hf_model"], hf_dtype="bfloat16")
    export_finished(config.run_dir, asking, STEPS)
    rounded = {name: tensor.bfloat16() for name, tensor in role.weights.items()}
    assert equal_bits(load_file(folder / "model.safetensors"), rounded)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    # An export without a usable checkpoint.json is replaced. A read of this FIFO would wait for ever.
    (folder.parent / "checkpoint.json").unlink()
    os.mkfifo(folder.parent / "checkpoint.json")
    export_finished(config.run_dir, asking, STEPS)
    assert (folder.parent / "checkpoint.json").is_file()


def test_checkpoint_that_has_the_export_is_named(tmp_path, log):
    config = finished(tmp_path, ASKED)
    export_finished(config.run_dir, config.checkpoint, STEPS)
    assert f"The model for other tools is in {step_dir(config.run_dir, STEPS)}/actor/huggingface." in log.text
    assert not (config.run_dir / "huggingface").exists()
    config.checkpoint.hf_dtype = "float16"
    export_finished(config.run_dir, config.checkpoint, STEPS)
    assert (config.run_dir / "huggingface" / "actor" / "model.safetensors").exists()


def test_export_of_an_earlier_end_is_replaced_and_a_fork_sets_it_aside(tmp_path):
    config, role = finished(tmp_path), TinyRole(0.7)
    asking = replace(config.checkpoint, contents=["model", "hf_model"])
    export_finished(config.run_dir, asking, STEPS)
    save_steps(config, role, STEPS + 1)
    export_finished(config.run_dir, asking, STEPS + 1)
    assert equal_bits(load_file(config.run_dir / "huggingface/actor/model.safetensors"), role.weights)
    begin_at(config, step_dir(config.run_dir, STEPS), ["model"])
    config.trainer.total_training_steps = STEPS + 5
    prepare(config)
    assert (config.run_dir / "huggingface.superseded-1/actor/model.safetensors").exists()
    assert not (config.run_dir / "huggingface").exists()


def killed_at(rank: int, run_dir: Path, settings: CheckpointConfig, event: str) -> None:
    """Export in this process, which is killed at `event`."""
    subscribe(lambda happened: os.kill(os.getpid(), signal.SIGKILL) if happened == event else None)
    export_finished(run_dir, settings, STEPS)


@pytest.mark.parametrize("event", ["target.synced", "target.replaced"])
def test_killed_export_leaves_no_partial_folder_and_is_repeated(tmp_path, event):
    config = finished(tmp_path)
    target, settings = config.run_dir / "huggingface", replace(config.checkpoint, contents=["model", "hf_model"])
    export_finished(config.run_dir, settings, STEPS)
    whole, other = contents(target), replace(settings, hf_dtype="bfloat16")
    died = run_ranks(1, killed_at, config.run_dir, other, event, deadline_s=60, join=tmp_path / "join")
    assert died == ["died"]
    left = {path.name for path in config.run_dir.iterdir() if path.name.startswith((INCOMPLETE, REPLACED))}
    assert left
    assert (contents(target) == whole) == (event == "target.synced")
    assert contents(target).keys() == whole.keys()
    prepare(config)  # any later start removes the leftovers
    assert not {path.name for path in config.run_dir.iterdir()} & left
    export_finished(config.run_dir, other, STEPS)
    assert load_file(target / "actor/model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_finished_run_on_a_disk_that_is_read_only_says_how_to_export_it(tmp_path, log):
    with small_disk(tmp_path / "disk", 16) as disk:
        config = finished(disk)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert again(disk, ASKED) == EXIT_DONE
        assert "Nothing is written" in log.text
        assert f"python -m rlhf.checkpoint export {config.run_dir} TARGET" in log.text
        assert again(disk, UNASKED) == EXIT_DONE
        assert log.text.count("TARGET") == 1


def test_no_export_hint_is_logged_if_the_export_exists(tmp_path, log):
    config = finished(tmp_path, ASKED)
    explain_no_export(config.run_dir, config.checkpoint, STEPS)
    assert f"The model for other tools is in {step_dir(config.run_dir, STEPS)}/actor/huggingface." in log.text
    assert "TARGET" not in log.text
    explain_no_export(config.run_dir, replace(config.checkpoint, hf_dtype="bfloat16"), STEPS)
    assert "TARGET" in log.text


def test_missing_parts_on_other_disks_are_logged_with_the_merge_command(tmp_path, log):
    config = finished(tmp_path)
    (step_dir(config.run_dir, STEPS) / "actor/model/rank_00000.safetensors").unlink()
    export_finished(config.run_dir, replace(config.checkpoint, contents=["hf_model"]), STEPS)
    assert "actor/model/rank_00000.safetensors and other files are on other nodes' disks" in log.text
    assert "python -m rlhf.checkpoint merge --local_dir PARTS... --target_dir TARGET" in log.text
    assert not (config.run_dir / "huggingface").exists()


@pytest.mark.slow
def test_finished_run_is_exported_under_torchrun(tmp_path):
    config = finished(tmp_path)
    end = ranks(tmp_path / "log", command(tmp_path, ASKED), nproc=2)
    assert end.code == EXIT_DONE, end.output
    assert end.output.count("was written to") == 1
    assert (config.run_dir / "huggingface" / "actor" / "model.safetensors").exists()
