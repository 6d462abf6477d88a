"""Commands of docs/interop.md that start runs, convert and compare, exactly as on the page."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.checkpoint.__main__ import main
from rlhf.errors import EXIT_CRASHED, EXIT_DONE
from tests.support.checkpoints import equal_bits, make_backend, make_checkpointer, make_config, world_of_one
from tests.support.interop_page import commands_of, training_of
from tests.support.launching import ranks, records, small
from tests.support.tiny_models import causal_lm


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, arguments: list[str]) -> str:
    assert main(arguments) == EXIT_DONE
    return capsys.readouterr().out


def test_a_run_is_started_from_a_checkpoint_of_another_system(here, sums, capsys):
    heading = "Starting a run from a checkpoint of another system"
    verl, trl = here / "checkpoints/verl/grpo/global_step_100", here / "outputs/trl/checkpoint-500"
    model = causal_lm("qwen2", trl)
    (trl / "trainer_state.json").write_text(json.dumps({"global_step": 500}))
    (verl / "actor").mkdir(parents=True)
    shutil.copytree(trl, verl / "actor" / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(model.state_dict(), verl / "actor" / "model_world_size_1_rank_0.pt")
    of_verl, of_trl = commands_of(heading)
    printed = run(capsys, of_verl)
    assert "from a checkpoint of layout fsdp" in printed
    (training,) = training_of(heading)
    assert f"python -m rlhf.train {' '.join(training[:3]).replace('start/', f'{here}/start/')}\n" in printed
    assert json.loads(run(capsys, of_trl))["layout"] == "trainer"
    short = ("data.max_prompt_length=40", "data.max_response_length=10", "trainer.total_training_steps=101")
    begun = [argument.replace("start/", f"{here}/start/") for argument in training]
    end = ranks(here / "log", [*begun, *small(here, "begun", sums, *short)])
    assert end.code == EXIT_DONE, end.output
    assert [record["step"] for record in records(here / "rlhf" / "begun")] == [101]


def test_layouts_are_converted(here, capsys):
    causal_lm("llama", here / "my_model")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file("my_model/model.safetensors").items()}
    save_file(tensors, "my_model/model.safetensors", {"format": "pt"})
    for arguments in commands_of("Converting between layouts"):
        run(capsys, arguments)
    for folder in ("my_model_again", "my_model_back"):
        assert equal_bits(load_file(f"{folder}/model.safetensors"), tensors)


def test_checkpoints_are_compared(here, capsys):
    weights, settings = commands_of("Comparing two checkpoints")
    causal_lm("llama", here / "my_model")
    run(capsys, ["convert", "my_model", "start/global_step_0", "--to", "native"])
    assert run(capsys, weights) == "actor's weights: equal, 21 tensors\n"
    config = make_config(here)
    with world_of_one(here):
        make_checkpointer(config, make_backend(1), 60).save(60)
        make_checkpointer(config, make_backend(2), 80).save(80)
    (here / "checkpoints" / "rlhf").mkdir(parents=True)
    config.run_dir.rename(here / "checkpoints" / "rlhf" / "offline")
    assert main(settings) == EXIT_CRASHED
    output = capsys.readouterr().out
    assert "driver state: 1 value differs\n  step: 60 | 80\n" in output
    assert "actor's weights: 9 of 12 tensors differ" in output
    assert "and 6 more (--largest 0 shows all)" in output
