"""Layout `native`: our own checkpoints as tensors, whichever ranks wrote them and wherever their parts are."""

import shutil
from pathlib import Path

import pytest
import torch

from rlhf.checkpoint.commit.removal import discard
from rlhf.checkpoint.export import layout_native, native_tensors
from rlhf.checkpoint.export.native_model_files import NativeModelFiles
from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import step_dir
from tests.support.checkpoints import (
    TINY_POLICY,
    PlainReference,
    PlainRole,
    equal_bits,
    even_range,
    flip_bit,
    make_checkpointer,
    make_config,
    save_steps,
)
from tests.support.sources import opened, whole
from tests.support.thread_ranks import make_coordinator, run_thread_ranks

SIZE = 1000


def full(seed: int) -> torch.Tensor:
    return even_range(SIZE, 0, 1, seed)[0]


@pytest.fixture
def run_dir(tmp_path) -> Path:
    config = make_config(tmp_path)
    save_steps(config, PlainRole(SIZE), 2, 4)
    return config.run_dir


def save_of(rank: int, folder: Path, world_size: int, domains: bool = False) -> None:
    """Save one rank's part of an actor, a critic and a reference."""
    config = make_config(folder / str(rank) if domains else folder)
    config.checkpoint.contents = ["model", "optimizer", "extra"]
    roles = {"actor": PlainRole(SIZE, rank, world_size), "critic": PlainRole(SIZE, rank, world_size, seed=5)}
    reference = PlainReference(SIZE, rank, world_size)
    coordinator = make_coordinator()
    if domains:
        coordinator.domains = list(range(world_size))
    make_checkpointer(config, roles, 3, coordinator, reference=reference).save(3)


def test_parts_of_three_ranks_are_read_as_whole_tensors(tmp_path):
    run_thread_ranks(3, save_of, tmp_path, 3)
    for role, seed in (("actor", 0), ("critic", 5), ("ref", 0)):
        for chunk in (None, 7):
            with opened(make_config(tmp_path).run_dir, role=role) as source:
                moments = {} if role == "ref" else {"weight.exp_avg": full(seed + 1000)}
                assert equal_bits(whole(source, chunk), {"weight": full(seed)} | moments)
                assert source.contents.progress.step == 3
                assert (source.contents.model_files / "tokenizer.json").is_file()
    with (
        pytest.raises(UserError, match=r"has no role critics; it has actor, critic, ref\. Set --role"),
        opened(make_config(tmp_path).run_dir, role="critics"),
    ):
        pass


def test_small_tensors_are_read_together(tmp_path, monkeypatch):
    class Many(PlainRole):
        def model_shards(self):
            weight = super().model_shards()["weight"]
            return {f"weight.{number}": weight for number in range(10)}

    save_steps(make_config(tmp_path), Many(SIZE), 1)
    with opened(make_config(tmp_path).run_dir) as source:
        before = source.files.bytes_read
        found = whole(source)
        together = source.files.bytes_read - before
    monkeypatch.setattr(native_tensors, "MOST_AHEAD", 1)
    with opened(make_config(tmp_path).run_dir) as source:
        before = source.files.bytes_read
        assert equal_bits(whole(source), found)
        assert source.files.bytes_read - before > 5 * together


def test_the_newest_whole_checkpoint_of_a_run(run_dir, caplog):
    with opened(run_dir) as source:
        assert source.path == step_dir(run_dir, 4)
    with opened(step_dir(run_dir, 2)) as source:
        assert source.path == step_dir(run_dir, 2)
    (step_dir(run_dir, 4) / "actor/model/rank_00000.safetensors").unlink()
    with opened(run_dir) as source:
        assert source.path == step_dir(run_dir, 2)
    assert "actor/model/rank_00000.safetensors: missing" in caplog.text
    with (
        pytest.raises(DamagedCheckpoint, match=r"is not complete: actor/model/rank_00000\.safetensors: missing"),
        opened(step_dir(run_dir, 4)),
    ):
        pass


@pytest.mark.parametrize("name", ["actor/model/rank_00000.safetensors", "actor/optimizer/rank_00000.safetensors"])
def test_damage_is_refused_with_the_files_name(run_dir, name):
    flip_bit(step_dir(run_dir, 4) / name, 30_000)
    with (
        opened(run_dir) as source,
        pytest.raises(DamagedCheckpoint, match=f"global_step_4 is damaged: {name}: content"),
    ):
        whole(source)


def test_parts_of_several_disks(tmp_path):
    run_thread_ranks(2, save_of, tmp_path, 2, True)
    first, second = (step_dir(make_config(tmp_path / str(rank)).run_dir, 3) for rank in (0, 1))
    wanted = {"weight": full(0), "weight.exp_avg": full(1000)}
    for path, parts in ((first, [second]), (second, [first]), (first.parent, [second.parent])):
        with opened(path, parts=tuple(parts)) as source:
            assert equal_bits(whole(source), wanted)
    with (
        pytest.raises(DamagedCheckpoint, match=r"rank_00001.*If each node had its own disk, give the folders"),
        opened(first),
    ):
        pass
    shutil.copytree(second, first, dirs_exist_ok=True)  # as a user merges the parts by hand
    with opened(first) as source:
        assert equal_bits(whole(source), wanted)
    save_steps(make_config(tmp_path / "other"), PlainRole(SIZE), 3)
    other = step_dir(make_config(tmp_path / "other").run_dir, 3)
    with pytest.raises(UserError, match="is a part of another checkpoint"), opened(first, parts=(other,)):
        pass


def test_the_model_files_of_the_start(tmp_path):
    config = make_config(tmp_path)
    base = shutil.copytree(TINY_POLICY, tmp_path / "base")
    config.model.path = str(base)
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages }}")
    config.model.chat_template = str(template)
    save_steps(config, PlainRole(SIZE), 1)
    with opened(config.run_dir) as source:
        files = source.contents.model_files
        assert (files / "chat_template.jinja").read_text() == "{{ messages }}"
        assert (files / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
        assert not (files / "model.safetensors").exists()
    assert not files.exists()
    flip_bit(base / "model.safetensors", 80_000)
    with pytest.raises(UserError, match=r"model\.path=.*is no longer what .* --hf_model_path"), opened(config.run_dir):
        pass
    with opened(config.run_dir, model_files=TINY_POLICY) as source:
        assert source.contents.model_files == TINY_POLICY
    shutil.rmtree(base)
    with (
        pytest.raises(UserError, match=r"was trained from model\.path=.*cannot be loaded.*--hf_model_path"),
        opened(config.run_dir),
    ):
        pass


def test_parts_that_were_not_saved_are_listed_as_absent(tmp_path):
    config = make_config(tmp_path)
    config.checkpoint.contents = ["hf_model"]
    save_steps(config, PlainRole(SIZE), 1)
    with opened(config.run_dir) as source:
        assert equal_bits(whole(source), {"weight": full(0)})
        assert [line.partition(":")[0] for line in source.contents.absent] == [
            "the optimizer's moments",
            "the learning rate schedule",
        ]
        assert (source.contents.model_files / "config.json").read_bytes() == b"{}"
    config = make_config(tmp_path / "without")
    config.checkpoint.contents = ["optimizer"]
    save_steps(config, PlainRole(SIZE), 1)
    with (
        pytest.raises(UserError, match=r"has no weights of actor: checkpoint\.contents was optimizer"),
        opened(config.run_dir),
    ):
        pass


def test_a_checkpoint_that_is_pruned_meanwhile_is_no_damage(run_dir, monkeypatch):
    path = step_dir(run_dir, 4)
    removed = rf"{path} was removed while it was read, by its run .* or by prune\. Run the same command again"
    with opened(path) as source:
        discard(path)
        with pytest.raises(DamagedCheckpoint, match=removed):
            source.read("weight", 0, 1)
    path = step_dir(run_dir, 2)
    removed = removed.replace("step_4", "step_2")

    def slowly(*arguments):
        discard(path)
        return NativeModelFiles(*arguments)

    monkeypatch.setattr(layout_native, "NativeModelFiles", slowly)
    with pytest.raises(DamagedCheckpoint, match=removed), opened(path):
        pass
