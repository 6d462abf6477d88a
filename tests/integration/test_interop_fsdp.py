"""Checkpoints of FSDP1 and FSDP2 in verl's layout, saved by torch: we read what torch gathers from the same model."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rlhf.checkpoint.__main__ import main
from rlhf.convert.layouts import open_source
from rlhf.errors import UserError
from rlhf.models.hf.source import Origin, TensorSource
from rlhf.storage.disk_errors import DamagedCheckpoint
from tests.support.adapted import Q, save_adapted_by_verl
from tests.support.checkpoints import run_ranks
from tests.support.fsdp_saves import RATE, STEPS, WITH_BUFFERS, save_all, truth_of
from tests.support.interop_page import commands_of
from tests.support.refusals import facts, says
from tests.support.tiny_models import causal_lm, save, tiny_config

RANKS = 4
SIZES = {"intermediate_size": 26}  # not divisible by the ranks, so their parts differ in size
CASES = (
    "llama/fsdp1",
    "llama/fsdp1_sharded_tensors",
    "llama/fsdp1_orig_params",
    "llama/fsdp2",
    "llama/fsdp2_by_columns",
    "qwen2/fsdp1/2",
    "qwen2/fsdp2/2",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Folder of the checkpoints of all cases."""
    root = tmp_path_factory.mktemp("fsdp")
    for architecture in ("llama", "qwen2"):
        causal_lm(architecture, root / "models" / architecture, **SIZES)
    run_ranks(RANKS, save_all, root / "models", root, CASES, deadline_s=120, join=root / "join")
    return root


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """A checkpoint of FSDP2 that a test may change."""
    return Path(shutil.copytree(saved / "llama" / "fsdp2", tmp_path / "copy"))


def whole(source: TensorSource, name: str) -> torch.Tensor:
    info = source.contents.tensors.get(name) or source.contents.moments[name]
    return source.read(name, 0, info.numel).view(info.shape)


@pytest.mark.parametrize("case", CASES)
def test_weights_and_moments_are_those_that_torch_gathers(case, saved):
    tensors, moments = truth_of(saved / case)
    if "orig_params" in case:  # on a CPU, torch 2.13 gathers both moments of this case into the same memory
        _, moments = truth_of(saved / "llama" / "fsdp1")
    if not case.startswith("llama"):
        del tensors["lm_head.weight"]  # tied
    source = open_source(Origin(saved / case))
    assert source.layout == "fsdp"
    assert source.contents.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert torch.equal(whole(source, name), expected), name
    expected_moments = {f"{name}.{key}": value for name, state in moments.items() for key, value in state.items()}
    assert source.contents.moments.keys() == expected_moments.keys()
    assert len(moments) == len(tensors) - (2 if case in WITH_BUFFERS else 0)
    for name, expected in expected_moments.items():
        assert torch.equal(whole(source, name), expected.view(whole(source, name).shape)), name
    progress = source.contents.progress
    assert progress.optimizer_steps == STEPS
    assert progress.schedule is not None
    assert progress.schedule["last_epoch"] == STEPS
    assert progress.schedule["base_lrs"] == [RATE]
    assert source.contents.model_files == saved / case / "huggingface"
    assert not [line for line in source.contents.absent if "moments" in line or "schedule" in line]


@pytest.mark.parametrize("case", CASES[:5])
def test_every_range_is_the_same(case, saved):
    source = open_source(Origin(saved / case))
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight.exp_avg"):
        flat = whole(source, name).view(-1)
        for start in range(0, len(flat), 7):
            for stop in (start, start + 1, start + 5, start + 40, len(flat)):
                stop = min(stop, len(flat))
                assert torch.equal(source.read(name, start, stop), flat[start:stop]), (name, start, stop)


def test_a_step_folder_has_its_roles(saved, tmp_path):
    step = tmp_path / "global_step_30"
    shutil.copytree(saved / "llama" / "fsdp2", step / "actor")
    shutil.copytree(saved / "qwen2" / "fsdp1" / "2", step / "critic")
    actor, critic = open_source(Origin(step)), open_source(Origin(step, role="critic"))
    assert "lm_head.weight" in actor.contents.tensors
    assert "lm_head.weight" not in critic.contents.tensors
    assert actor.contents.progress.step == critic.contents.progress.step == 30
    assert open_source(Origin(step / "critic", role="critic")).contents.progress.step == 30
    with pytest.raises(UserError, match=facts("role ref", "actor, critic", "--role")):
        open_source(Origin(step, role="ref"), "fsdp")


def test_without_its_config_the_files_tell_the_number_of_ranks(copy):
    (copy / "fsdp_config.json").unlink()
    assert len(open_source(Origin(copy)).contents.moments) == 63
    shutil.copy(copy / "model_world_size_4_rank_0.pt", copy / "model_world_size_2_rank_0.pt")
    with pytest.raises(UserError, match=facts("2 and 4 ranks", "fsdp_config.json")):
        open_source(Origin(copy))
    (copy / "fsdp_config.json").write_text(json.dumps({"world_size": 4}))
    with pytest.raises(UserError, match=facts("4 ranks", "model_world_size_2_rank_0.pt by another save", "Remove it")):
        open_source(Origin(copy))
    (copy / "fsdp_config.json").write_text(json.dumps({"world_size": 8}))
    with pytest.raises(UserError, match=facts("world_size 8", "2 and 4")):
        open_source(Origin(copy))
    (copy / "fsdp_config.json").write_text("[]")
    with pytest.raises(DamagedCheckpoint, match="world_size"):
        open_source(Origin(copy))


@pytest.mark.parametrize("stray", ["optim_world_size_4_rank_4.pt", "extra_state_world_size_8_rank_3.pt"])
def test_a_file_of_another_number_of_ranks_is_named(copy, stray):
    shutil.copy(copy / "optim_world_size_4_rank_0.pt", copy / stray)
    with pytest.raises(UserError, match=facts("4 ranks", f"{stray} by another save", "Remove it")):
        open_source(Origin(copy))


def test_a_critic_is_a_value_model(tmp_path):
    torch.manual_seed(4)
    config = tiny_config("llama", num_labels=1)
    model = AutoModelForTokenClassification.from_config(config).float()
    folder = tmp_path / "global_step_7" / "critic"
    save(model, folder / "huggingface")
    (folder / "huggingface" / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "model_world_size_1_rank_0.pt")
    target = tmp_path / "merged"
    command = ["merge", "--local_dir", str(tmp_path / "global_step_7"), "--role", "critic", "--target_dir", str(target)]
    assert main(command) == 0
    found = AutoModelForTokenClassification.from_pretrained(target).state_dict()
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_the_documented_commands_work(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved / "llama" / "fsdp1", "verl_run/global_step_2/actor")
    save_adapted_by_verl(saved / "models" / "llama", Path("verl_lora/global_step_2/actor"))
    shutil.copytree("verl_run/global_step_2/actor/huggingface", "verl_lora/global_step_2/actor/huggingface")
    for command in commands_of("From and to verl"):
        assert main(command) == 0
    tensors, moments = truth_of(saved / "llama" / "fsdp1")
    merged = AutoModelForCausalLM.from_pretrained("merged").state_dict()
    assert all(torch.equal(merged[name], tensor) for name, tensor in tensors.items())
    adapted = AutoModelForCausalLM.from_pretrained("merged_lora").state_dict()
    base = load_file(saved / "models" / "llama" / "model.safetensors")
    assert not torch.equal(adapted[f"{Q}.weight"], base[f"{Q}.weight"])
    assert Path("adapter/adapter_model.safetensors").is_file()
    start = open_source(Origin(Path("start/global_step_2")))
    for name, state in moments.items():
        assert torch.equal(whole(start, f"{name}.exp_avg"), state["exp_avg"].view(tensors[name].shape)), name


def test_a_missing_file_is_named(copy):
    (copy / "optim_world_size_4_rank_2.pt").unlink()
    (copy / "extra_state_world_size_4_rank_0.pt").unlink()
    source = open_source(Origin(copy))
    assert not source.contents.moments
    assert any("moments" in line and "optim_world_size_4_rank_2.pt" in line for line in source.contents.absent)
    assert any(line.startswith("the learning rate schedule") for line in source.contents.absent)
    (copy / "model_world_size_4_rank_1.pt").unlink()
    with pytest.raises(UserError, match=facts("4 ranks", "model_world_size_4_rank_1.pt")):
        open_source(Origin(copy))


def test_rank_files_of_different_saves_are_damage(saved, tmp_path):
    copy = Path(shutil.copytree(saved / "llama" / "fsdp2_by_columns", tmp_path / "copy"))

    def use(source: Path) -> None:
        shutil.copy(source, copy / "model_world_size_4_rank_2.pt")

    use(saved / "qwen2" / "fsdp2" / "2" / "model_world_size_4_rank_2.pt")
    with pytest.raises(DamagedCheckpoint, match=facts("only one of the files of ranks 0 and 2")):
        open_source(Origin(copy))
    use(saved / "llama" / "fsdp1_orig_params" / "model_world_size_4_rank_2.pt")
    with pytest.raises(DamagedCheckpoint, match="is sharded differently"):
        open_source(Origin(copy))
    use(copy / "model_world_size_4_rank_1.pt")
    with pytest.raises(DamagedCheckpoint, match=facts("rank_2.pt", "rank 1")):
        open_source(Origin(copy))
    use(copy / "optim_world_size_4_rank_1.pt")
    with pytest.raises(DamagedCheckpoint, match="only one of the files of ranks 0 and"):
        open_source(Origin(copy))


def test_buffers_of_the_ranks_have_to_be_equal(saved, tmp_path):
    copy = Path(shutil.copytree(saved / "llama" / "fsdp2_by_columns", tmp_path / "copy"))
    path = copy / "model_world_size_4_rank_1.pt"
    content = torch.load(path, weights_only=False)
    torch.save(content | {"calibration": content["calibration"].flip(0)}, path)
    source = open_source(Origin(copy))
    with pytest.raises(DamagedCheckpoint, match=facts("calibration differs", "rank_0.pt", "rank_1.pt")):
        whole(source, "calibration")


def test_a_rank_s_file_that_is_cut_off(copy):
    path = copy / "model_world_size_4_rank_1.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DamagedCheckpoint, match=facts("rank_1.pt", "not an intact")):
        open_source(Origin(copy))
    torch.save([1, 2], path)
    with pytest.raises(DamagedCheckpoint, match=facts("rank_1.pt", "a list")):
        open_source(Origin(copy))


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_a_file_that_wants_to_run_code_is_refused_by_the_command(copy, tmp_path, capsys):
    torch.save({"model.norm.weight": Evil(tmp_path / "ran")}, copy / "model_world_size_4_rank_1.pt")
    assert main(["merge", "--local_dir", str(copy), "--target_dir", str(tmp_path / "merged")]) == 2
    output = capsys.readouterr().err
    says(output, "model_world_size_4_rank_1.pt", "posix.system")
    assert output.count("\n") == 1
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "merged").exists()


def test_an_optimizer_that_does_not_fit_is_left_out(copy, saved):
    for rank in range(4):
        name = f"optim_world_size_4_rank_{rank}.pt"
        shutil.copy(saved / "qwen2" / "fsdp2" / "2" / name, copy / name)
    source = open_source(Origin(copy))
    assert not source.contents.moments
    assert any("26 parameters" in line and "21" in line for line in source.contents.absent)
    for rank in range(4):
        torch.save(
            {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [{"params": [0]}]},
            copy / f"optim_world_size_4_rank_{rank}.pt",
        )
    assert any("is not Adam" in line for line in open_source(Origin(copy)).contents.absent)


@pytest.mark.parametrize("case", ["llama/fsdp1", "llama/fsdp2"])
def test_swapped_rank_files_are_damage(case, saved, tmp_path):
    """Otherwise the moments of a rank would be assigned to other weights."""
    copy = Path(shutil.copytree(saved / case, tmp_path / "copy"))
    for number, other in ((1, 2), (2, 1)):
        name = "model_world_size_4_rank_{}.pt"
        shutil.copy(saved / case / name.format(other), copy / name.format(number))
    with pytest.raises(DamagedCheckpoint, match=facts("rank_1.pt", "rank 2")):
        open_source(Origin(copy))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "step",
            torch.tensor(7.0),
            r"_rank_1\.pt is from another save than .*_rank_0\.pt: 7 updates of parameter 0 instead of 2",
        ),
        ("step", 2, r"the files optim_\* do not have FSDP's structure"),
        ("step", torch.ones(0), r"the files optim_\* do not have FSDP's structure"),
        ("exp_avg", None, r"the files optim_\* do not have FSDP's structure"),
        ("exp_avg_sq", "x", r"the files optim_\* do not have FSDP's structure"),
    ],
)
def test_inconsistent_moments_of_ranks_are_damage(key, value, message, saved, tmp_path):
    copy = Path(shutil.copytree(saved / "llama" / "fsdp1", tmp_path / "copy"))
    path = copy / "optim_world_size_4_rank_1.pt"
    content = torch.load(path, weights_only=False)
    content["state"][0][key] = value
    torch.save(content, path)
    with pytest.raises(DamagedCheckpoint, match=message):
        open_source(Origin(copy))


def test_a_flipped_bit_is_refused_by_the_commands(saved, tmp_path, capsys):
    """The bit is in the last element of a shard."""
    copy = Path(shutil.copytree(saved / "llama" / "fsdp1", tmp_path / "copy"))
    path = copy / "model_world_size_4_rank_3.pt"
    shard = torch.load(path, weights_only=False)["model.layers.1.mlp.up_proj.weight"].to_local()
    content, values = path.read_bytes(), shard.numpy().tobytes()
    assert content.count(values) == 1
    path.write_bytes(content.replace(values, values[:-1] + bytes([values[-1] ^ 1])))
    capsys.readouterr()  # torch's warning of an unpickled mesh, once per process
    for verb in (["merge", "--local_dir", str(copy), "--target_dir"], ["import", str(copy)]):
        assert main([*verb, str(tmp_path / "new" / "global_step_2")]) == 1
        output = capsys.readouterr().err
        says(output, "rank_3.pt", "is damaged")
        assert output.count("\n") == 1
        assert not list((tmp_path / "new").iterdir())
