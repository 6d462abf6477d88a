"""Folders that DeepSpeed's own engine saves on real ranks, compared with DeepSpeed's `zero_to_fp32`, with the unsharded
weights in the folders, and with training without DeepSpeed."""

import contextlib
import importlib
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf.checkpoint.__main__ import main
from rlhf.convert.deepspeed import layout_deepspeed
from rlhf.convert.layouts import open_source
from rlhf.errors import UserError
from rlhf.models.hf.source import Contents, Origin, TensorSource
from rlhf.storage.disk_errors import DamagedCheckpoint
from tests.support.checkpoints import equal_bits, run_ranks
from tests.support.deepspeed_saves import FROZEN, SAVES, STEPS, Saved, save_all, train_plainly
from tests.support.engines import NEEDS_DEEPSPEED
from tests.support.interop_page import commands_of
from tests.support.refusals import facts
from tests.support.sources import whole
from tests.support.tiny_models import causal_lm

pytestmark = NEEDS_DEEPSPEED

QUICK = ["zero0", "zero1-bfloat16", "zero2-grouped", "zero3-bfloat16-frozen"]


@pytest.fixture(scope="module")
def saves(tmp_path_factory) -> Path:
    return save_on(2, tmp_path_factory.mktemp("deepspeed"), QUICK)


def save_on(world_size: int, folder: Path, kinds: list[str]) -> Path:
    run_ranks(world_size, save_all, str(folder), kinds, deadline_s=300, join=folder / "join")
    return folder


@pytest.fixture
def copied(saves, tmp_path) -> Path:
    """A copy of a save of stage 3, which tests damage."""
    return shutil.copytree(saves / "zero3-bfloat16-frozen", tmp_path / "copied")


@pytest.mark.parametrize("kind", QUICK)
def test_weights_and_moments(saves, kind):
    check(saves / kind)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_stage_and_precision(tmp_path, world_size):
    save_on(world_size, tmp_path, list(SAVES))
    for kind in SAVES:
        check(tmp_path / kind)


def check(folder: Path) -> None:
    source = open_source(Origin(folder))
    assert source.layout == "deepspeed"
    assert not source.contents.absent
    ours, kind = whole(source), folder.name
    check_against_training(ours, source, kind)
    if SAVES[kind].stage < 3:
        check_against_module(ours, folder)
    # zero_to_fp32 cannot read the saves of stage 0, nor of stage 1 in bfloat16.
    if kind not in ("zero0", "zero0-bfloat16", "zero1-bfloat16"):
        check_against_zero_to_fp32(ours, source, folder)


def check_against_zero_to_fp32(ours: dict[str, Tensor], source: TensorSource, folder: Path) -> None:
    """Check that weights equal those of DeepSpeed's own tool, except for `unfound`, which the tool does not find."""
    zero_to_fp32: Any = importlib.import_module("deepspeed.utils.zero_to_fp32")
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder))
    saved = SAVES[folder.name]
    unfound = set(FROZEN) if folder.name == "zero1-frozen" else set()
    assert source.contents.tensors.keys() == theirs.keys() - tied(saved) | unfound
    for name in source.contents.tensors.keys() - unfound:
        # Frozen weights keep their type.
        assert ours[name].dtype == (torch.bfloat16 if saved.bfloat16 and name in FROZEN else torch.float32)
        assert torch.equal(ours[name].float(), theirs[name].float()), name


def check_against_module(ours: dict[str, Tensor], folder: Path) -> None:
    """Check that weights equal the unsharded weights in the folder."""
    [file] = folder.glob("*/mp_rank_00_model_states.pt")
    module = torch.load(file, weights_only=False)["module"]
    assert module.keys() - tied(SAVES[folder.name]) == {name for name in ours if name.endswith(("weight", "bias"))}
    for name in module.keys() - tied(SAVES[folder.name]):
        assert torch.equal(ours[name].to(module[name].dtype), module[name]), name


def check_against_training(ours: dict[str, Tensor], source: TensorSource, kind: str) -> None:
    """Check that weights and moments equal those of training with torch alone."""
    theirs = train_plainly(SAVES[kind])
    assert ours.keys() == theirs.keys()
    names = [name for name in source.contents.tensors if not (SAVES[kind].frozen and name in FROZEN)]
    moments = {f"{name}.{key}" for name in names for key in ("exp_avg", "exp_avg_sq", "step")}
    assert source.contents.moments.keys() == moments
    # At stage 0 in bfloat16, DeepSpeed first takes a step without a gradient.
    rounding = 0.6 if kind == "zero0-bfloat16" else 0.1 if SAVES[kind].bfloat16 else 1e-4
    for name, tensor in ours.items():
        assert (tensor.float() - theirs[name]).norm() <= rounding * theirs[name].norm(), name


def tied(saved: Saved) -> set[str]:
    """Return the names of tensors that are tied to another tensor."""
    return {"lm_head.weight"} if saved.architecture == "qwen2" else set()


def test_progress(saves):
    progress = open_source(Origin(saves / "zero2-grouped")).contents.progress
    assert (progress.step, progress.optimizer_steps) == (STEPS, STEPS)
    assert progress.schedule is not None
    assert progress.schedule["last_epoch"] == STEPS
    assert progress.schedule["base_lrs"] == [0.01, 0.01]


def test_stage_0_moments_without_names_are_left_out(saves, tmp_path):
    """With several groups or with some parameters only, moments without names are not assigned to any parameter."""
    [file] = saves.glob("zero2-grouped/*/mp_rank_00_model_states.pt")
    content = torch.load(file, weights_only=False)
    matrices = [t.float() for t in content["module"].values() if t.ndim > 1]
    moments = {n: {"step": 1, "exp_avg": t, "exp_avg_sq": t} for n, t in enumerate(matrices)}
    inner = {"state": moments, "param_groups": [{}]}
    content |= {"param_shapes": None, "optimizer": {"optimizer_state_dict": inner, "fp32_groups": [matrices]}}
    torch.save(content, tmp_path / file.name)
    contents = open_source(Origin(tmp_path)).contents
    assert not contents.moments
    assert contents.absent == [
        "The float32 weights and the moments: at stage 0 DeepSpeed saves them without names, and their order is "
        "unknown."
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("flat", [False, True])
def test_stage_0_in_another_order_than_the_models(saves, tmp_path, dtype, flat):
    """Two parameters of the same shape are swapped. Only a comparison with float32 copies of the weights detects it."""
    [file] = saves.glob("zero0/*/mp_rank_00_model_states.pt")
    content = torch.load(file, weights_only=False)
    weights = [tensor for name, tensor in content["module"].items() if not name.endswith("inv_freq")]
    content["module"] = {name: tensor.to(dtype) for name, tensor in content["module"].items()}

    def contents(order: list[int]) -> Contents:
        parts = [[weights[number].float() for number in order]]
        masters = {"fp32_groups_flat" if flat else "fp32_groups": [joined(parts[0])] if flat else parts}
        own = [joined(parts[0])] if flat else parts[0]
        moments = {number: {"step": 1, "exp_avg": t, "exp_avg_sq": t} for number, t in enumerate(own)}
        inner = {"state": moments, "param_groups": [{}]}
        optimizer = inner if dtype == torch.float32 else {"optimizer_state_dict": inner, **masters}
        torch.save(content | {"optimizer": optimizer}, tmp_path / file.name)
        return open_source(Origin(tmp_path)).contents

    order = list(range(len(weights)))
    assert bool(contents(order).moments) == (dtype == torch.bfloat16)
    first, second = (
        n
        for n, name in enumerate(content["module"])
        if name.endswith(("0.mlp.up_proj.weight", "0.mlp.gate_proj.weight"))
    )
    order[first], order[second] = second, first
    found = contents(order)
    assert not found.moments
    assert "without names" in found.absent[0]


def joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def test_a_schedule_that_the_trainer_keeps(copied):
    file = next(copied.glob("*/*pp_rank_0*model_states.pt"))
    torch.save(torch.load(file, weights_only=False) | {"lr_scheduler": None}, file)
    assert open_source(Origin(copied)).contents.progress.schedule is None
    torch.save({"last_epoch": 5}, copied / "scheduler.pt")
    assert open_source(Origin(copied)).contents.progress.schedule == {"last_epoch": 5}
    torch.save(torch.load(file, weights_only=False) | {"lr_scheduler": {"last_batch_iteration": 3}}, file)
    assert open_source(Origin(copied)).contents.progress.schedule == {"last_epoch": 3}


@pytest.mark.parametrize("kind", QUICK)
def test_any_range_is_that_of_the_whole(saves, kind):
    source = open_source(Origin(saves / kind))
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        size = source.contents.tensors[name].numel
        full = source.read(name, 0, size)
        for start, stop in [(0, 1), (size // 2 - 1, size // 2 + 1), (size - 1, size), (3, 3), (1, size - 1)]:
            part = source.read(name, start, stop)
            assert torch.equal(part, full[start:stop])
            assert part.is_contiguous()


def test_a_range_reads_no_more_than_it_has(saves):
    source = open_source(Origin(saves / "zero3-bfloat16-frozen"))
    before = bytes_read()
    source.read("model.embed_tokens.weight", 4090, 4100)
    assert bytes_read() - before < 2000


def bytes_read() -> int:
    """Return how many bytes this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_save_is_opened_by_folder_tag_or_latest(saves, tmp_path):
    folder = shutil.copytree(saves / "zero1-bfloat16", tmp_path / "run")
    shutil.copytree(folder / "global_step2", folder / "global_step4")
    for origin in (Origin(folder), Origin(folder / "global_step2"), Origin(folder, tag="global_step4")):
        assert layout_deepspeed.recognises(origin)
        assert layout_deepspeed.open_source(origin).contents.progress.step == STEPS
    with pytest.raises(UserError, match=facts("--tag=global_step5", "global_step2, global_step4")):
        open_source(Origin(folder, tag="global_step5"))
    (folder / "latest").write_text("global_step6")
    with pytest.raises(UserError, match=facts("latest", "global_step6", "--tag")):
        open_source(Origin(folder))
    (folder / "latest").unlink()
    with pytest.raises(UserError, match=facts("no file `latest`", "--tag")):
        open_source(Origin(folder))
    assert not layout_deepspeed.recognises(Origin(tmp_path))
    with pytest.raises(UserError, match="has no DeepSpeed save"):
        layout_deepspeed.open_source(Origin(tmp_path / "run" / ".."))


@pytest.mark.parametrize("what", ["optim", "model"])
def test_a_missing_rank_is_named(saves, copied, what):
    files = sorted(copied.glob(f"*/*{what}_states.pt"))
    files[1].unlink()
    with pytest.raises(UserError, match=facts("2 ranks", f"pp_rank_1_mp_rank_00_{what}_states.pt")):
        open_source(Origin(copied))
    shutil.copy(files[0], files[1])
    files[0].unlink()
    with pytest.raises(UserError, match=r"lacks .*pp_rank_0|no file .* of rank 0"):
        open_source(Origin(copied))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zero_pp_rank_7_mp_rank_00_optim_states.pt", "zero_pp_rank_7.* is from another save. Remove it"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", r"of two saves\. Remove the older one"),
        ("zero_pp_rank_2_mp_rank_00_model_states.pt", "zero_pp_rank_2.*model.* is from another save. Remove it"),
        ("mp_rank_01_model_states.pt", "split over tensor parallel ranks .mp_rank_01_model_states.pt."),
        ("layer_00-model_00-model_states.pt", "split over pipeline stages or experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "mixture of experts"),
    ],
)
def test_files_of_another_save_are_rejected(copied, name, message):
    save = copied / "global_step2"
    shutil.copy(next(save.glob("*pp_rank_0*optim_states.pt")), save / name)
    with pytest.raises(UserError, match=message):
        open_source(Origin(copied))


@pytest.mark.parametrize("kind", ["optim", "model"])
def test_a_file_of_a_rank_beside_those_of_stage_0_is_named(saves, tmp_path, kind):
    copy = shutil.copytree(saves / "zero0", tmp_path / "copy")
    stray = f"zero_pp_rank_{int(kind == 'model')}_mp_rank_00_{kind}_states.pt"
    shutil.copy(next(copy.glob("*/mp_rank_00_model_states.pt")), next(copy.glob("global_step*")) / stray)
    with pytest.raises(UserError, match=facts(f"{stray} is from another save", "Remove it")):
        open_source(Origin(copy))


def test_a_file_that_is_cut_off_is_named(copied):
    file = next(copied.glob("*/*pp_rank_0*optim_states.pt"))
    content = file.read_bytes()
    for size in (0, 1, len(content) // 2, len(content) - 100):
        file.write_bytes(content[:size])
        with pytest.raises(DamagedCheckpoint, match=f"{file.name} .*not an intact torch.save file"):
            open_source(Origin(copied))


def test_partitions_of_another_save(saves, copied):
    file = next(copied.glob("*/*pp_rank_0*optim_states.pt"))
    content = torch.load(file, weights_only=False)
    flats = content["optimizer_state_dict"]["fp32_flat_groups"]
    flats[0] = flats[0][:-1].clone()
    torch.save(content, file)
    with pytest.raises(DamagedCheckpoint, match=facts("flat partition 0", "not all of one save")):
        open_source(Origin(copied))
    shutil.copy(next(saves.glob("zero2-grouped/*/zero_pp_rank_0*optim_states.pt")), file)
    with pytest.raises(DamagedCheckpoint, match=r"lacks DeepSpeed's structure|not all of one save"):
        open_source(Origin(copied))


class Surprise:
    def __reduce__(self) -> Any:
        return print, ("surprise",)


def test_a_pickle_that_wants_to_run_code_is_refused(copied, capsys):
    file = next(copied.glob("*/*pp_rank_0*model_states.pt"))
    torch.save(torch.load(file, weights_only=False) | {"client": Surprise()}, file)
    with pytest.raises(UserError, match=f"{file.name} uses .*print"):
        open_source(Origin(copied))
    assert not capsys.readouterr().out


def test_files_of_other_programs_with_the_same_names_are_damage(copied):
    file = next(copied.glob("*/*pp_rank_0*model_states.pt"))
    torch.save({"model": torch.ones(3)}, file)
    with pytest.raises(DamagedCheckpoint, match="without DeepSpeed's entries"):
        open_source(Origin(copied))
    torch.save([torch.ones(3)], file)
    with pytest.raises(DamagedCheckpoint, match="it contains a list"):
        open_source(Origin(copied))


def test_a_save_without_a_required_entry_is_damage(copied):
    for pattern, part in [
        ("*/*pp_rank_1*model_states.pt", "frozen_param_fragments"),
        ("*/*pp_rank_0*optim_states.pt", ""),
    ]:
        [file] = copied.glob(pattern)
        content = torch.load(file, weights_only=False)
        content.pop(part, None)
        content.get("optimizer_state_dict", {}).pop("fp32_flat_groups", None)
        torch.save(content, file)
        with pytest.raises(DamagedCheckpoint, match=r"lacks DeepSpeed's structure|without ZeRO's float32"):
            open_source(Origin(copied))


def test_the_pages_commands(saves, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    causal_lm("qwen2", Path("my_model"))
    shutil.copytree(saves / "zero2-grouped", "output/states")
    for command in commands_of("From and to DeepSpeed"):
        assert main(command) == 0
    [file] = Path("output/states").glob("*/mp_rank_00_model_states.pt")
    merged = AutoModelForCausalLM.from_pretrained("merged").state_dict()
    for name, tensor in torch.load(file, weights_only=False)["module"].items():
        assert torch.equal(merged[name], tensor), name
    theirs, ours = (open_source(Origin(Path(path))) for path in ("output/states", "start/global_step_2"))
    assert ours.contents.moments == theirs.contents.moments
    assert equal_bits(whole(ours), whole(theirs))


@pytest.mark.parametrize("kind", ["zero1-bfloat16", "zero3-bfloat16-frozen"])
def test_ranks_of_different_steps(saves, tmp_path, kind):
    copied = shutil.copytree(saves / kind, tmp_path / "copied")
    file = next(copied.glob("*/*pp_rank_1*optim_states.pt"))
    content = torch.load(file, weights_only=False)
    inner = content["optimizer_state_dict"]
    state = (inner.get("base_optimizer_state") or inner["optimizer_state_dict"])["state"]
    state[0]["step"] = state[0]["step"] + 3
    torch.save(content, file)
    with pytest.raises(DamagedCheckpoint, match=facts("different steps", "2, ", "5")):
        open_source(Origin(copied))


def test_swapped_rank_files_are_damage(saves, tmp_path):
    copied = shutil.copytree(saves / "zero1-bfloat16", tmp_path / "copied")
    first, second = sorted(copied.glob("*/*optim_states.pt"))
    second.rename(copied / "aside")
    first.rename(second)
    (copied / "aside").rename(first)
    with pytest.raises(DamagedCheckpoint, match=facts("rank 0", "wrong parameters", "another rank or another save")):
        open_source(Origin(copied))
