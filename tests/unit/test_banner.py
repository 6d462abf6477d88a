"""Banner of a run: shows facts that are known before heavy imports."""

import json
from pathlib import Path

import pytest

from rlhf.config import Config
from rlhf.config.library import Library
from rlhf.launch.banner import banner
from rlhf.models.parameter_count import count_parameters, short_number
from rlhf.storage.layout import POINTER
from tests.support.launching import TINY_POLICY, write_sums
from tests.support.refusals import says


@pytest.fixture
def config(tmp_path, monkeypatch) -> Config:
    monkeypatch.chdir(tmp_path)
    config = Config()
    config.model.path = str(TINY_POLICY)
    config.trainer.default_local_dir = str(tmp_path / "runs")
    config.data.train_files = str(write_sums(tmp_path / "sums.jsonl", 200))
    return config


def rows(config: Config) -> dict[str, str]:
    _, *lines = banner(config, []).splitlines()
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


def test_a_new_run(config):
    config.trainer.nproc, config.trainer.total_epochs = 2, 3
    assert banner(config, ["a", "b"]).splitlines()[0].endswith("recipe a, b: grpo, seed 1")
    shown = rows(config)
    assert shown["model"] == f"{TINY_POLICY} (271K parameters)"
    assert shown["prompts"] == "sums.jsonl (200 in the file)"
    assert shown["steps"] == "3 epochs, at most 9"
    config.data.custom_cls.path, config.data.custom_cls.name = "rows.py", "Rows"
    assert rows(config)["steps"] == "3 epochs", "the class may make more rows than the file has"
    assert "2 ranks" in shown["device"]
    assert shown["run"] == "runs/rlhf/default (new)"
    assert shown["log"] == "runs/rlhf/default/run.log"


def test_a_run_whose_checkpoints_are_gone_is_not_new(config):
    config.run_dir.mkdir(parents=True)
    (config.run_dir / POINTER).write_text("7\n")
    says(rows(config)["run"], "runs/rlhf/default (", "no checkpoint", POINTER)
    config.checkpoint.remote = "file:///copies"  # the start looks there first
    assert rows(config)["run"] == "runs/rlhf/default (new)"


def test_the_ranks_are_those_of_all_machines(config, monkeypatch):
    config.trainer.device, config.trainer.nproc = "cpu", 8
    for name, value in (("RANK", "0"), ("LOCAL_WORLD_SIZE", "8"), ("WORLD_SIZE", "16")):
        monkeypatch.setenv(name, value)
    assert rows(config)["device"].startswith("cpu, 16 ranks, ")


def test_the_banner_shows_a_reference_in_bfloat16(config):
    config.actor.use_kl_loss, config.actor.kl_loss_coef = True, 0.1
    config.ref.fsdp_config.model_dtype = "bfloat16"
    assert rows(config)["model"].endswith(", reference kept in bfloat16")


def test_the_banner_shows_idle_ranks(config, monkeypatch):
    config.actor.ppo_mini_batch_size, config.rollout.n, config.trainer.nproc = 4, 8, 32
    assert "idle" not in rows(config)
    config.trainer.nproc = 40
    assert rows(config)["idle"] == "8 of 40 ranks in each mini-batch, which has 32 samples"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "33")
    assert rows(config)["idle"] == "1 of 33 ranks in each mini-batch, which has 32 samples"


def test_the_banner_shows_the_step_of_a_resumed_or_finished_run(config):
    t = config.trainer
    (config.run_dir / "global_step_40").mkdir(parents=True)
    t.total_training_steps = 1200
    assert rows(config)["run"] == "runs/rlhf/default (resumed at step 40)"
    assert rows(config)["steps"] == "1,200"
    t.total_training_steps = 40
    assert rows(config)["run"] == "runs/rlhf/default (finished at step 40)"
    t.overwrite = True
    assert rows(config)["run"] == "runs/rlhf/default (new: the present content is deleted)"


def test_prompts_of_slow_sources_are_not_counted(config):
    config.data.train_files = ["a/b:train", "x.parquet", "c", "d", "e"]
    assert rows(config)["prompts"] == "a/b:train, x.parquet, c and 2 more"
    assert rows(config)["steps"] == "1 epoch"


def test_parameters_are_counted_from_headers_alone(tmp_path, monkeypatch):
    def write(folder: Path, shapes: dict[str, list[int]], name: str = "model.safetensors") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        header = json.dumps({key: {"shape": shape} for key, shape in shapes.items()} | {"__metadata__": {}}).encode()
        (folder / name).write_bytes(len(header).to_bytes(8, "little") + header)

    write(tmp_path / "parts", {"a": [3, 4]}, "model-00001-of-00002.safetensors")
    write(tmp_path / "parts", {"b": [5], "c": []}, "model-00002-of-00002.safetensors")
    assert count_parameters(str(tmp_path / "parts")) == 18
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub/models--org--name"
    write(repository / "snapshots/abc", {"a": [7]})
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    assert count_parameters("org/name") == 7
    assert count_parameters("org/name", "abc") == 7
    assert count_parameters("org/other") is None
    (tmp_path / "parts" / "model-00001-of-00002.safetensors").write_bytes(b"\xff" * 9)
    assert count_parameters(str(tmp_path / "parts")) is None
    counts = (271_104, 494_032_768, 999_885_952, 7_615_616_512)
    assert [short_number(n) for n in counts] == ["271K", "494M", "1B", "7.62B"]


def test_the_recipes_of_a_command():
    library = Library.find(None)
    assert library.recipes([]) == ["offline"]
    assert library.recipes(["a=1", "recipes=null"]) == []
    assert library.recipes(["recipes=[a,b]"]) == ["a", "b"]
    assert library.recipes(["recipes=a", "recipes=minimal"]) == ["minimal"]


def test_adapters_and_their_learning_rate(config):
    assert "lora" not in rows(config)
    config.model.lora.enabled = True
    expected = "rank 32 on all-linear, base weights frozen"
    assert (
        rows(config)["lora"] == f"{expected}; actor.optim.lr=1e-06 is the default for training all weights, try 1e-05"
    )
    config.actor.optim.lr, config.model.lora.target_modules = 2e-5, ["q_proj", "v_proj"]
    assert rows(config)["lora"] == expected.replace("all-linear", "q_proj, v_proj")
