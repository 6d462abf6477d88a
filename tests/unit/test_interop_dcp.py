"""Folders of torch.distributed.checkpoint: torch reads those that we write, and we read those of other programs."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from rlhf.checkpoint.__main__ import main
from rlhf.convert.dcp import dcp_writer, layout_dcp
from rlhf.convert.dcp.dcp_folder import as_dcp, write_dcp_folder
from rlhf.convert.layouts import open_source
from rlhf.errors import UserError
from rlhf.models.hf.source import Origin, TrainedSoFar
from rlhf.storage.disk_errors import DamagedCheckpoint
from tests.support.in_float64 import TOLERANCE, in_float64
from tests.support.interop_page import commands_of, python_of
from tests.support.memory_source import MemorySource
from tests.support.rounding import FLOAT32
from tests.support.sources import whole
from tests.support.tiny_models import causal_lm, tiny_config

TENSORS = {
    "model.embed_tokens.weight": torch.arange(50 * 6.0).view(50, 6),
    "model.norm.weight": torch.arange(7.0).bfloat16(),
    "counts": torch.arange(3),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
}
MOMENTS = {
    "model.embed_tokens.weight.exp_avg": torch.randn(50, 6),
    "model.embed_tokens.weight.exp_avg_sq": torch.rand(50, 6),
    "model.embed_tokens.weight.step": torch.tensor(4.0),
}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def written(tmp_path, monkeypatch) -> Path:
    """Write a folder of TENSORS and MOMENTS, with three rows per item and about two items per file."""
    monkeypatch.setattr(dcp_writer, "CHUNK_BYTES", 3 * 6 * 4)
    monkeypatch.setattr(dcp_writer, "SHARD_BYTES", 200)
    (tmp_path / "written").mkdir()
    written = write_dcp_folder(MemorySource(TENSORS, MOMENTS), tmp_path / "written")
    assert {file.path for file in written} == {path.name for path in (tmp_path / "written").iterdir()}
    assert len(written) > 5
    return tmp_path / "written"


def test_torch_loads_what_is_written(written, tmp_path):
    state: dict[str, Any] = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()}
    state["optimizer"] = {f"state.{name}": torch.empty_like(tensor) for name, tensor in MOMENTS.items()}
    dcp.load(state, checkpoint_id=written, no_dist=True)
    assert_equal({name: state[name] for name in TENSORS}, TENSORS)
    assert_equal({name.removeprefix("state."): tensor for name, tensor in state["optimizer"].items()}, MOMENTS)
    dcp_to_torch_save(written, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert_equal({name: saved[name] for name in TENSORS}, TENSORS)
    assert_equal(saved["optimizer"], {f"state.{name}": tensor for name, tensor in MOMENTS.items()})


def test_what_is_written_is_read_again(written):
    source = open_source(Origin(written))
    assert source.layout == "dcp"
    assert_equal(whole(source), TENSORS | MOMENTS)
    assert source.contents.tensors.keys() == TENSORS.keys()
    assert source.contents.progress.optimizer_steps == 4
    assert torch.equal(source.read("model.embed_tokens.weight", 17, 100), torch.arange(17.0, 100.0))


def test_a_written_folder_has_the_requested_dtype_and_the_model_files(tmp_path):
    causal_lm("qwen2", tmp_path / "model")
    source = MemorySource(TENSORS, MOMENTS, model_files=tmp_path / "model")
    (tmp_path / "written").mkdir()
    reported: list[int] = []
    write_dcp_folder(source, tmp_path / "written", dtype="bfloat16", moments=False, progress=reported.append)
    converted = as_dcp(source, "bfloat16", moments=False).contents.tensors
    assert sum(reported) == sum(info.nbytes for info in converted.values())
    again = open_source(Origin(tmp_path / "written"))
    assert_equal(whole(again), {n: t.bfloat16() if t.is_floating_point() else t for n, t in TENSORS.items()})
    assert again.contents.model_files == tmp_path / "written"
    assert (tmp_path / "written" / "tokenizer.json").read_bytes() == (
        tmp_path / "model" / "tokenizer.json"
    ).read_bytes()
    assert len(again.contents.absent) == 1


def trained(architecture: str, folder: Path) -> tuple[Any, torch.optim.Optimizer, dict[str, Tensor]]:
    """A model after a step of AdamW, its optimizer, and both as tensors by name."""
    model = causal_lm(architecture, folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.arange(12).view(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return model, optimizer, found


def test_folders_saved_by_accelerate_are_read(tmp_path):
    """With SHARDED_STATE_DICT, accelerate saves FSDP's model and optimizer in two folders, each a named state dict."""
    model, optimizer, expected = trained("qwen2", tmp_path / "checkpoint-7")
    weights, state = get_state_dict(model, optimizer)
    checkpoint = tmp_path / "checkpoint-7"
    dcp.save({"model": weights}, checkpoint_id=checkpoint / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": state}, checkpoint_id=checkpoint / "optimizer_0", no_dist=True)
    (checkpoint / "trainer_state.json").write_text('{"global_step": 7}')
    torch.save({"last_epoch": 7, "base_lrs": [0.01]}, checkpoint / "scheduler.pt")
    for path in (checkpoint, checkpoint / "pytorch_model_fsdp_0"):
        source = open_source(Origin(path), "dcp")
        assert_equal(whole(source), expected)  # the tied weight once
        assert source.contents.progress == TrainedSoFar(7, 1, {"last_epoch": 7, "base_lrs": [0.01]})
        assert source.contents.model_files == checkpoint
    shutil.rmtree(checkpoint / "optimizer_0")
    bare = open_source(Origin(checkpoint), "dcp").contents
    assert not bare.moments
    assert len(bare.absent) == 1


def test_an_optimizer_beside_the_model(tmp_path):
    """Both are in one folder, as in torch's recipes, which merge two flat state dicts."""
    model, optimizer, expected = trained("qwen2", tmp_path / "model")
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    groups = {"param_groups.model.norm.weight.lr": torch.tensor(0.5)}  # a learning rate that is a tensor
    dcp.save({**weights, **state, **groups}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert_equal(whole(open_source(Origin(tmp_path / "saved", tmp_path / "model"), "dcp")), expected)


def test_a_trainer_folder_of_prime_rl(tmp_path):
    """prime-rl's AppState saves model, optimizer, schedule and progress under one key."""
    model, optimizer, expected = trained("llama", tmp_path / "model")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    schedule.step()
    weights, state = get_state_dict(model, optimizer)
    progress = {"step": 20, "total_tokens": 512, "total_samples": 4}
    app = {"model": weights, "optimizers": state, "scheduler": schedule.state_dict(), "progress": progress}
    folder = tmp_path / "checkpoints" / "step_20" / "trainer"
    dcp.save({"app": app}, checkpoint_id=folder, no_dist=True)
    source = open_source(Origin(folder, tmp_path / "model"))
    assert (source.layout, source.contents.absent) == ("dcp", [])
    assert_equal(whole(source), expected)
    done = source.contents.progress
    assert (done.step, done.optimizer_steps) == (20, 1)
    assert done.schedule == {"last_epoch": 1, "base_lrs": [0.01], "_last_lr": [0.01]}


def to_torchtitan(name: str, tensor: Tensor, heads: dict[str, int]) -> tuple[str, Tensor]:
    """Convert transformers' name and rows to those of torchtitan 0.2, like torchtitan's adapter."""
    top = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    renamed = name.replace("model.layers.", "layers.")
    for old, new in (top | parts).items():
        renamed = renamed.replace(f"{old}.weight", f"{new}.weight")
    for part, number in heads.items():
        if part in name and tensor.ndim:
            rows, columns = tensor.shape
            tensor = tensor.view(number, 2, rows // number // 2, columns).transpose(1, 2).reshape(rows, columns)
    return renamed, tensor


def save_as_torchtitan(folder: Path, model: Any, optimizer: torch.optim.Optimizer, newer: bool) -> None:
    """Write torchtitan's folders of steps 9 and 30."""
    llama = model.config.model_type == "llama"
    _, flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    heads = {"q_proj": 4, "k_proj": 2} if llama else {}

    def titan(name: str, tensor: Any) -> tuple[str, Any]:
        name, tensor = to_torchtitan(name, tensor, heads if isinstance(tensor, Tensor) else {})
        if newer:
            name = name.replace("output.weight", "lm_head.weight")
            for part in "qkv":
                name = name.replace(f"attention.w{part}", f"attention.qkv_linear.w{part}")
        return name, tensor

    state: dict[str, Any] = dict(titan(name, tensor) for name, tensor in model.state_dict().items())
    state["optimizer"] = dict(titan(name, value) for name, value in flat.items())
    state["train_state"] = {"step": torch.tensor(30, dtype=torch.int32)}
    state["lr_scheduler"] = {"last_epoch": 29}
    state["dataloader"] = {"dp_rank_0": b"x"}
    if llama and not newer:
        state["freqs_cis"] = torch.ones(3, dtype=torch.complex64)
    for step in (9, 30):
        dcp.save(state, checkpoint_id=folder / f"step-{step}", no_dist=True)


@pytest.mark.parametrize("newer", [False, True], ids=["0.1", "0.3"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_torchtitans_folders(tmp_path, architecture, newer):
    model, optimizer, expected = trained(architecture, tmp_path / "model")
    save_as_torchtitan(tmp_path / "run", model, optimizer, newer)
    source = open_source(Origin(tmp_path / "run", model_files=tmp_path / "model"))
    assert_equal(whole(source), expected)
    progress = source.contents.progress
    assert (progress.step, progress.optimizer_steps, progress.schedule) == (30, 1, {"last_epoch": 29})
    name = "model.layers.1.self_attn.k_proj.weight"
    size = expected[name].numel()
    for start, stop in [(0, 1), (13, 90), (size - 1, size), (5, 5)]:
        assert torch.equal(source.read(name, start, stop), expected[name].reshape(-1)[start:stop])

    assert layout_dcp.open_source(Origin(tmp_path / "run", tmp_path / "model", tag="step-9")).contents.tensors
    with pytest.raises(UserError, match=r"--tag=step-8 is not in .*There are step-9, step-30\. Did you mean step-9"):
        open_source(Origin(tmp_path / "run", tag="step-8"))
    with pytest.raises(UserError, match=r"does not store the number of heads.*--hf_model_path"):
        open_source(Origin(tmp_path / "run"))


@in_float64()
def test_rows_in_torchtitans_order_turn_pairs_of_neighbours():
    """Attention scores agree between Meta's rotation of torchtitan's rows and transformers' rotation of its
    own rows."""
    config = tiny_config("llama", head_dim=8)
    torch.manual_seed(1)
    weight, hidden = torch.randn(4 * 8, 16), torch.randn(5, 16)
    ours = (hidden @ weight.T).view(1, 5, 4, 8).transpose(1, 2)
    rotary, base = LlamaRotaryEmbedding(config), config.rope_parameters["rope_theta"]
    frequencies = 1 / base ** (torch.arange(0, 8, 2) / 8)
    # transformers always computes this power and quotient in float32; the rest of the comparison is in float64.
    torch.testing.assert_close(rotary.inv_freq, frequencies, rtol=2 * FLOAT32, atol=0, check_dtype=False)
    rotary.inv_freq = frequencies
    cos, sin = rotary(ours, torch.arange(5)[None])
    turned, _ = apply_rotary_pos_emb(ours, ours, cos, sin)
    _, rows = to_torchtitan("q_proj", weight, {"q_proj": 4})
    theirs = torch.view_as_complex((hidden @ rows.T).view(5, 4, 4, 2))
    angles = torch.outer(torch.arange(5.0), frequencies)
    meta = torch.view_as_real(theirs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(2).transpose(0, 1)
    torch.testing.assert_close((turned @ turned.mT)[0], meta @ meta.mT, rtol=TOLERANCE, atol=TOLERANCE)


def test_torchtitans_models_that_are_not_known(tmp_path):
    causal_lm("llama", tmp_path / "llama")
    causal_lm("gemma", tmp_path / "gemma")
    state = {"tok_embeddings.weight": torch.ones(4, 4), "layers.0.moe.experts.w1": torch.ones(2, 4, 4)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(UserError, match=r"checkpoint of 'gemma' \(config.json\); llama and qwen3 are supported"):
        open_source(Origin(tmp_path / "dcp", tmp_path / "gemma"))
    with pytest.raises(UserError, match=r"has layers.0.moe.experts.w1, which is not part of torchtitan's dense llama"):
        open_source(Origin(tmp_path / "dcp", tmp_path / "llama"))
    state = {"tok_embeddings.weight": torch.ones(4, 4), "layers.0.attention.wq.weight": torch.ones(6, 4)}
    dcp.save(state, checkpoint_id=tmp_path / "odd", no_dist=True)
    with pytest.raises(UserError, match=r"has 6 rows, but .* has 4 rows per head"):
        open_source(Origin(tmp_path / "odd", tmp_path / "llama"))


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "_orig_mod."])
def test_prefixes_of_wrapped_models_are_removed(tmp_path, prefix):
    tensors = {"model.embed_tokens.weight": torch.ones(3, 2), "lm_head.weight": torch.zeros(3, 2)}
    dcp.save({prefix + n: t for n, t in tensors.items()}, checkpoint_id=tmp_path, no_dist=True)
    assert_equal(whole(open_source(Origin(tmp_path))), tensors)


def test_safetensors_that_ranks_save(tmp_path):
    """One rank saves the tensors. Then its file is truncated, and then renamed: another rank's file is missing."""
    tensors = {name: tensor for name, tensor in TENSORS.items() if tensor.ndim and tensor.numel()}
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    assert_equal(whole(open_source(Origin(tmp_path))), tensors)
    state = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert_equal(state, tensors)
    [file] = tmp_path.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-20])
    with pytest.raises(DamagedCheckpoint, match=f"{file.name} is truncated"):
        open_source(Origin(tmp_path))
    file.write_bytes(content)
    file.rename(tmp_path / file.name.replace("shard-00001", "shard-00002"))
    with pytest.raises(UserError, match=r"lacks the files shard-00001-\*\.safetensors of one rank"):
        open_source(Origin(tmp_path))


def test_broken_folders(written):
    file = next(written.glob("*.distcp"))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(DamagedCheckpoint, match=f"{file.name}"):
        whole(open_source(Origin(written)))
    file.unlink()
    with pytest.raises(UserError, match=rf"lacks {file.name}, which .metadata lists"):
        open_source(Origin(written))
    (written / ".metadata").unlink()
    assert not layout_dcp.recognises(Origin(written))
    with pytest.raises(UserError, match=r"has no .metadata\. Give the folder of a finished DCP save"):
        open_source(Origin(written), "dcp")


def test_a_folder_without_model_tensors_is_an_error(tmp_path):
    dcp.save({"optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(UserError, match=r"has no tensors of a model: optimizer.state.0.exp_avg"):
        open_source(Origin(tmp_path))


def test_a_megatron_folder_is_not_recognised_as_dcp(written):
    (written / "metadata.json").write_text("{}")
    assert not layout_dcp.recognises(Origin(written))


def test_the_pages_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = "From and to torch DCP and torchtitan"
    model, optimizer, expected = trained("llama", Path("my_model"))
    save_as_torchtitan(Path("outputs/checkpoint"), model, optimizer, newer=True)
    for command in commands_of(section):
        assert main(command) == 0
    weights = model.state_dict()
    assert_equal(AutoModelForCausalLM.from_pretrained("merged").state_dict(), weights)
    for imported in ("start/global_step_30", "my_dcp_30"):
        assert_equal(whole(open_source(Origin(Path(imported)))), expected)
    assert_equal(AutoModelForCausalLM.from_pretrained("my_model_30").state_dict(), weights)
    before = AutoModelForCausalLM.from_pretrained("my_model")
    assert_equal(whole(open_source(Origin(Path("my_dcp")))), before.state_dict())
    exec(python_of(section), {"model": before})
    assert_equal(before.state_dict(), weights)
