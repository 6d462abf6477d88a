"""Imports of checkpoints that other tools' own code saved: weights and moments arrive bit for bit, and a run continues
from the import."""

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForTokenClassification, PreTrainedModel

from rlhf.checkpoint.__main__ import main
from rlhf.convert.layouts import open_source
from rlhf.errors import EXIT_DONE
from rlhf.models.hf.source import Origin
from tests.support import deepspeed_saves, fsdp_saves
from tests.support.checkpoints import equal_bits, run_ranks
from tests.support.engines import NEEDS_DEEPSPEED
from tests.support.launching import ranks, records, saved_steps, small
from tests.support.tiny_models import causal_lm, tiny_config, tiny_tokenizer

SHORT = ("data.max_prompt_length=40", "data.max_response_length=10")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Folder of the models from which all checkpoints start."""
    folder = tmp_path_factory.mktemp("models")
    for architecture in ("llama", "qwen2"):
        causal_lm(architecture, folder / architecture)
    return folder


def imported(source: Path, target: Path, *options: object) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Import `source` to `target`. Return the weights and moments of the new checkpoint."""
    assert main(["import", str(source), str(target), *map(str, options)]) == EXIT_DONE
    with closing(open_source(Origin(target), "native")) as checkpoint:
        contents = checkpoint.contents
        whole = {
            name: checkpoint.read(name, 0, info.numel).view(info.shape)
            for name, info in (contents.tensors | contents.moments).items()
        }
    return {name: whole[name] for name in contents.tensors}, {name: whole[name] for name in contents.moments}


def of_parameters(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{name}.{key}": value.float() for name, entry in state.items() for key, value in entry.items()}


def train_on(target: Path, model: Path, folder: Path, sums: Path, nproc: int = 1, *more: str) -> str:
    """Train two real steps from the checkpoint `target`, and return the output."""
    step = int(target.name.rpartition("_")[2])
    command = [
        *small(folder, "from_there", sums, f"model.path={model}", *SHORT, *more),
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={target}",
        f"trainer.total_training_steps={step + 2}",
        "trainer.save_freq=1",
    ]
    end = ranks(folder / "log", command, nproc=nproc)
    assert end.code == EXIT_DONE, end.output
    run_dir = folder / "rlhf" / "from_there"
    assert saved_steps(run_dir) == [step + 2, step + 1]
    assert [record["step"] for record in records(run_dir)] == [step + 1, step + 2]
    return end.output


def save_plainly(folder: Path, model: PreTrainedModel) -> torch.optim.Optimizer:
    """Train two steps and save in verl's layout for one rank. Return the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(2):
        ids = torch.arange(12).view(2, 6)
        model(input_ids=ids).logits.square().mean().backward()
        optimizer.step()
        schedule.step()
    folder.mkdir(parents=True)
    torch.save(model.state_dict(), folder / "model_world_size_1_rank_0.pt")
    torch.save(optimizer.state_dict(), folder / "optim_world_size_1_rank_0.pt")
    torch.save({"lr_scheduler": schedule.state_dict()}, folder / "extra_state_world_size_1_rank_0.pt")
    model.config.save_pretrained(folder / "huggingface")
    tiny_tokenizer().save_pretrained(folder / "huggingface")
    return optimizer


Ppo = tuple[Path, dict[str, PreTrainedModel], dict[str, torch.optim.Optimizer]]


@pytest.fixture(scope="module")
def ppo(tmp_path_factory) -> Ppo:
    """The import of a verl checkpoint with a critic, and the models and optimizers that were saved."""
    folder = tmp_path_factory.mktemp("ppo")
    torch.manual_seed(2)
    critic = AutoModelForTokenClassification.from_config(tiny_config("llama", num_labels=1, classifier_dropout=0.0))
    models = {"actor": causal_lm("llama", folder / "model").train(), "critic": critic.float().train()}
    theirs, target = folder / "verl" / "global_step_2", folder / "global_step_2"
    optimizers = {role: save_plainly(theirs / role, model) for role, model in models.items()}
    imported(theirs, target)
    return target, models, optimizers


def test_a_verl_checkpoint_with_a_critic_is_imported(ppo):
    target, models, optimizers = ppo
    for role, model in models.items():
        named = dict(model.named_parameters())
        with closing(open_source(Origin(target, role=role), "native")) as checkpoint:
            assert checkpoint.contents.tensors.keys() == named.keys()
            for name, parameter in named.items():
                names = [name, f"{name}.exp_avg", f"{name}.exp_avg_sq"]
                whole = [checkpoint.read(each, 0, parameter.numel()) for each in names]
                state = optimizers[role].state[parameter]
                expected = [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]]
                assert equal_bits(whole, [tensor.reshape(-1) for tensor in expected]), name


@pytest.mark.slow
def test_a_run_starts_from_an_imported_checkpoint_with_a_critic(ppo, tmp_path, sums):
    target, _, _ = ppo
    folder = target / "actor" / "huggingface"
    output = train_on(target, folder, tmp_path, sums, 1, "algorithm=ppo", f"critic.path={target}/critic/huggingface")
    assert "with actor's weights, actor's moments, actor's schedule, critic's weights, critic's moments" in output


def test_verl_checkpoints_of_fsdp1_and_fsdp2_are_imported(models, tmp_path, sums):
    """A folder with FSDP2's files in `global_step_N/actor`, and a folder with FSDP1's files and a tied embedding."""
    cases = ("llama/fsdp2", "qwen2/fsdp1")
    run_ranks(2, fsdp_saves.save_all, models, tmp_path, cases, False, deadline_s=120, join=tmp_path / "join")
    for number, case in enumerate(cases):
        theirs = tmp_path / f"verl_{number}" / "global_step_2"
        theirs.mkdir(parents=True)
        (tmp_path / case).rename(theirs / "actor")
        tensors, state = fsdp_saves.truth_of(theirs / "actor")
        if case.startswith("qwen2"):
            del tensors["lm_head.weight"]
        weights, moments = imported(theirs, tmp_path / case / "global_step_2")
        assert equal_bits(weights, tensors)
        assert equal_bits(moments, of_parameters(state))
    target = tmp_path / "llama/fsdp2" / "global_step_2"
    output = train_on(target, target / "actor" / "huggingface", tmp_path, sums)
    assert f"was imported from {tmp_path}/verl_0/global_step_2 (fsdp). A new run begins there, after step 2" in output


@NEEDS_DEEPSPEED
@pytest.mark.slow
def test_deepspeed_checkpoints_are_imported(tmp_path, sums):
    """Stage 2 on two ranks with two parameter groups, and stage 3 with frozen parameters."""
    kinds = ["zero2-grouped", "zero3-bfloat16-frozen"]
    run_ranks(2, deepspeed_saves.save_all, str(tmp_path), kinds, deadline_s=300, join=tmp_path / "join")
    for kind in kinds:
        architecture, model = deepspeed_saves.SAVES[kind].architecture, tmp_path / kind / "model"
        causal_lm(architecture, model, **deepspeed_saves.SETTINGS[architecture])
        with closing(open_source(Origin(tmp_path / kind), "deepspeed")) as source:
            infos = source.contents.tensors | source.contents.moments
            theirs = {name: source.read(name, 0, info.numel).view(info.shape) for name, info in infos.items()}
        target = tmp_path / kind / "out" / "global_step_2"
        weights, moments = imported(tmp_path / kind, target, "--hf_model_path", model)
        for name, tensor in weights.items():
            assert equal_bits(tensor, theirs[name].float()), name
        for name, tensor in moments.items():
            expected = theirs[name].float() if name in theirs else torch.zeros_like(tensor)
            assert equal_bits(tensor, expected), name
        assert any(name not in theirs for name in moments) == ("frozen" in kind)
        output = train_on(target, model, tmp_path / kind, sums, 2, "backend=deepspeed", "backend.zero_stage=2")
        assert "with actor's weights, actor's moments, actor's schedule" in output


def trained_once(folder: Path) -> tuple[PreTrainedModel, torch.optim.Optimizer]:
    """Return the model of `folder` after one training step, and its optimizer."""
    model = causal_lm("qwen2", folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.arange(12).view(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 7}))
    return model, optimizer


def check_imported(theirs: Path, target: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    weights, moments = imported(theirs, target)
    named = dict(model.named_parameters())
    assert equal_bits(weights, {name: parameter.detach() for name, parameter in named.items()})
    assert equal_bits(moments, of_parameters({name: optimizer.state[p] for name, p in named.items()}))


def test_checkpoints_of_transformers_trainer_are_imported(tmp_path):
    theirs = tmp_path / "checkpoint-7"
    model, optimizer = trained_once(theirs)
    model.save_pretrained(theirs)
    torch.save(optimizer.state_dict(), theirs / "optimizer.pt")
    check_imported(theirs, tmp_path / "global_step_7", model, optimizer)


def test_dcp_checkpoints_of_accelerate_are_imported(tmp_path):
    theirs = tmp_path / "checkpoint-7"
    model, optimizer = trained_once(theirs)
    tensors, state = get_state_dict(model, optimizer)
    dcp.save({"model": tensors}, checkpoint_id=theirs / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": state}, checkpoint_id=theirs / "optimizer_0", no_dist=True)
    (theirs / "model.safetensors").unlink()
    check_imported(theirs, tmp_path / "global_step_7", model, optimizer)
