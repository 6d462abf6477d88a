"""Exported files have the names that save_pretrained writes; for many architectures these differ from the model's."""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlhf.convert.layouts import open_source
from rlhf.models import weights
from rlhf.models.fused_experts import FileConversions, parts_in_files
from rlhf.models.hf.hf_plan import SAME_IN_FILES
from rlhf.models.hf.hf_writer import HfExport, write_exports
from rlhf.models.hf.source import Origin
from rlhf.models.loading import ModelSource, ModelStart, load_model, load_model_config
from rlhf.models.model_files import ModelFiles, read_headers
from rlhf.storage.file_parts import FilePart, parts_of
from rlhf.storage.layout import step_dir
from rlhf.storage.shards import Shard
from tests.support.checkpoints import PlainRole, begin_at, equal_bits, make_config, resume, save_steps
from tests.support.thread_ranks import make_coordinator
from tests.support.tiny_models import COMMON, EXPERTS, GQA, save, tiny_config

UNDER_NAMES_OF_THE_MODEL = {"hrm_text", "inkling2_loop_text", "inkling2_text", "lara_mini", "sarvam_moe"}
"""Types whose files have tensors that are not slices of one weight. We write these weights under the model's names."""
NEED_SETTINGS = 20
"""An upper bound of the number of types that need other packages or settings to build a model."""
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
}
RENAMED: dict[str, dict[str, Any]] = {
    "gpt_neox": COMMON,  # the head
    "exaone": GQA,  # everything
    "granitemoe": GQA | MOE,  # experts, stored in one tensor
    "mixtral": EXPERTS["mixtral"],  # experts, stored one by one
    "flex_olmo": GQA | MOE,
    "olmo_hybrid": GQA | LINEAR,  # convolutions, stored in three tensors
    "qwen3_5_moe_text": GQA | LINEAR | MOE,  # a prefix, which only some files have
}
"""Architectures whose files have other names than the model. Comments say which names differ."""


def small(kind: Any) -> Any:
    """Return the default configuration of a model type, with two layers."""
    config = kind()
    text = config.get_text_config()
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, 2)
    return config


def on_meta(kind: Any) -> PreTrainedModel | None:
    for make in (small, lambda kind: kind()):
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(make(kind))
        except Exception:  # a configuration without its sizes may raise anything
            continue
    return None


def ours_and_theirs(model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return names and shapes of a model's tensors in files, as we write them and as save_pretrained does."""
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    parts = parts_in_files({name: tensor.shape for name, tensor in state.items()}, FileConversions.of(model))
    ours = {part.name: part.shape for name, tensor in state.items() for part in parts_of(parts, name, tensor.shape)}
    return ours, {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, dict(state)).items()}


@pytest.mark.slow
def test_every_architecture_of_transformers_has_the_names_of_save_pretrained():
    missing, other = [], set()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        model = on_meta(kind)
        if model is None:
            missing.append(kind.model_type)
            continue
        ours, theirs = ours_and_theirs(model)
        if ours != theirs:
            other.add(kind.model_type)
    assert other <= UNDER_NAMES_OF_THE_MODEL
    assert len(missing) < NEED_SETTINGS, missing


@pytest.mark.parametrize("kind", sorted(SAME_IN_FILES))
def test_weights_that_are_copied_without_transformers_have_the_same_names(kind):
    model = on_meta(type(AutoConfig.for_model(kind)))
    assert model is not None
    assert parts_in_files({n: t.shape for n, t in model.state_dict().items()}, FileConversions.of(model)) == {}


@pytest.mark.parametrize("kind", RENAMED)
def test_a_folder_that_is_loaded_and_exported_is_the_same(kind, tmp_path):
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **RENAMED[kind] | {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1})
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path / "base")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    model, shards = loaded(tmp_path / "base")
    export = HfExport.of(
        shards, None, parts_in_files({n: s.shape for n, s in shards.items()}, FileConversions.of(model)), {}
    )
    assert write_exports(tmp_path, {"export": export}, make_coordinator()) is not None
    written = load_file(tmp_path / "export" / "model.safetensors")
    assert equal_bits(written, stored)
    config.save_pretrained(tmp_path / "export")
    again, found = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(found.values()), found
    assert equal_bits(dict(again.named_parameters()), {n: s.local.view(s.shape) for n, s in shards.items()})


def test_verbs_write_and_compare_the_names_of_the_base(tmp_path, command):
    base, native = tmp_path / "base", tmp_path / "global_step_3"
    save(AutoModelForCausalLM.from_config(tiny_config("gpt_neox")), base)
    stored = load_file(base / "model.safetensors")
    assert command("import", base, native)[0] == 0
    with closing(open_source(Origin(native))) as source:
        assert "lm_head.weight" in source.contents.tensors  # as in training
    for number, options in enumerate([(), ("--hf_model_path", base), ("--dtype", "float32")]):
        target = tmp_path / f"exported{number}"
        assert command("export", native, target, *options)[0] == 0
        assert equal_bits(load_file(target / "model.safetensors"), stored)
    assert command("test", "--local_dir", native, "--test_hf_dir", base)[0] == 0
    # The base now has the model's names, as an earlier release wrote them.
    save_file(AutoModelForCausalLM.from_pretrained(base).state_dict(), base / "model.safetensors", {"format": "pt"})
    assert command("merge", "--local_dir", base, "--target_dir", tmp_path / "merged")[0] == 0
    assert equal_bits(load_file(tmp_path / "merged" / "model.safetensors"), stored)


def test_a_run_resumes_from_files_with_the_names_of_the_model(tmp_path):
    class Renamed(PlainRole):
        def hf_parts(self):
            return {"weight": [FilePart("other", 0, self.shape)]}

    for written, loaded_with in ((PlainRole, Renamed), (Renamed, Renamed)):
        config, role = make_config(tmp_path / written.__name__), written()
        config.checkpoint.contents = ["hf_model"]
        save_steps(config, role, 1)
        begin_at(config, step_dir(config.run_dir, 1), ["hf_model"])
        begun = loaded_with(seed=5)
        assert resume(config, begun) == 1
        assert torch.equal(begun.weight, role.weight)


def loaded(folder: Path) -> tuple[PreTrainedModel, dict[str, Shard]]:
    """The model of a folder, as the trainer loads it, and its parameters."""
    source, cpu = ModelSource("model.path", str(folder)), torch.device("cpu")
    config = load_model_config(source, folder)
    files = ModelFiles(source, folder, None, read_headers(folder), "")
    pending = weights.load(
        files, config, partial(load_model, ModelStart(source, folder, config)), make_coordinator(), cpu
    )
    shards = {
        name: Shard(tuple(p.shape), (0,), torch.full((p.numel(),), torch.nan) if p.is_meta else p.detach().reshape(-1))
        for name, p in pending.model.named_parameters()
    }
    pending.fill(shards)
    return pending.model, shards
