"""Whole runs on a GPU: a 0.5B model uses the planned memory within a tenth, and a killed run keeps its bits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.errors import EXIT_DONE
from rlhf.planning.check import plan_of
from rlhf.planning.memory_plan import CUDA_BASE
from tests.support.compare_runs import differences
from tests.support.gpus import NEEDS_GPU
from tests.support.interrupter import at
from tests.support.launching import question, records, train
from tests.support.measured_memory import measured
from tests.support.tiny_models import causal_lm

pytestmark = NEEDS_GPU
QWEN2_HALF_B = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
}
"""Qwen2.5-0.5B's."""
SMALL = QWEN2_HALF_B | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"vocab_size": 512}


def written(folder: Path, sizes: dict[str, object]) -> list[str]:
    """Write a random policy and word problems in GSM8K's columns. Return the settings of a run of three steps."""
    model = folder / "model"
    if not model.exists():
        causal_lm("qwen2", model, **sizes)
    rows = [
        {"question": f"Tom has some apples. {question(11 + i, 80 - i)}", "answer": f"He counts. #### {91}"}
        for i in range(48)
    ]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "recipes=gsm8k_qwen_0.5b",
        f"model.path={model}",
        f"data.train_files={folder / 'gsm8k.jsonl'}",
        "data.val_files=null",
        f"trainer.default_local_dir={folder}",
        "trainer.nproc=1",
        "trainer.total_training_steps=3",
        "trainer.val_before_train=false",
        "data.train_batch_size=16",
        "data.max_prompt_length=128",
        "data.max_response_length=128",
        "rollout=embedded",
        "rollout.n=4",
        "rollout.ignore_eos=true",
        "actor.ppo_mini_batch_size=8",
        "actor.use_kl_loss=true",
    ]


def test_half_a_billion_parameters_take_what_the_plan_says(tmp_path: Path) -> None:
    overrides = [*written(tmp_path, QWEN2_HALF_B), "trainer.device=cuda", "trainer.save_freq=0"]
    found = plan_of(compose_config(overrides, Library.find(None)))
    assert found is not None
    highest = measured(tmp_path, overrides, "cuda")
    shown = records(tmp_path / "rlhf" / "gsm8k_qwen_0.5b")
    assert [record["step"] for record in shown] == [1, 2, 3]
    assert all(record["actor/grad_norm"] >= 0 for record in shown)
    most = max(highest.values())
    planned = found[1].peak.total - CUDA_BASE  # torch does not count the CUDA context
    assert abs(planned - most) < 0.1 * most, (found[1].peak, highest)


@pytest.fixture(scope="module")
def deterministic(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The settings of a small run on a GPU in deterministic mode, after one undisturbed run."""
    return undisturbed(tmp_path_factory.mktemp("runs"), "cuda")


def undisturbed(folder: Path, device: str) -> list[str]:
    overrides = [
        *written(folder, SMALL),
        f"trainer.device={device}",
        "trainer.deterministic=true",
        "trainer.save_freq=1",
        "trainer.restart_backoff_s=0.1",
    ]
    end = train([*overrides, "trainer.experiment_name=whole"])
    assert end.code == EXIT_DONE, end.output
    return overrides


def killed_as_whole(overrides: list[str], name: str, event: str) -> list[str]:
    """Kill a run at `event` of its second step and resume it. Return its differences from the undisturbed run."""
    folder = Path(next(text for text in overrides if "default_local_dir" in text).partition("=")[2])
    environment = at(event, 2, "SIGKILL", once=folder / f"{name}.hit")
    end = train([*overrides, f"trainer.experiment_name={name}"], environment)
    assert end.code == EXIT_DONE, end.output
    assert (folder / f"{name}.hit").exists()
    return differences(folder / "rlhf" / "whole", folder / "rlhf" / name)


@pytest.mark.parametrize("event", ["update.before", "rollout.before"])
def test_a_killed_run_is_the_same_bit_for_bit(deterministic: list[str], event: str) -> None:
    assert killed_as_whole(deterministic, event.partition(".")[0], event) == []


def test_a_checkpoint_has_the_state_of_every_device(deterministic: list[str]) -> None:
    folder = Path(next(text for text in deterministic if "default_local_dir" in text).partition("=")[2])
    [file] = (folder / "rlhf" / "whole" / "global_step_3" / "rng").iterdir()
    with safe_open(file, "pt") as stored:
        states = {name for name in stored.keys() if name.startswith("torch.cuda")}  # noqa: SIM118
    assert states == {f"torch.cuda.{i}" for i in range(torch.cuda.device_count())}
