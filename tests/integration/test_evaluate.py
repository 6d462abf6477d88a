"""python -m rlhf.evaluate gives the bits of the run's own evaluations, also after kills; several targets; mistakes."""

import json
import shutil
from pathlib import Path

import pytest

from rlhf.api import check_inputs
from rlhf.compose import composition
from rlhf.config.library import Library
from rlhf.config.resolved import stored_tree, to_yaml
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from rlhf.evaluate.__main__ import main
from tests.support.compare_runs import history
from tests.support.forked_start import train_forked
from tests.support.interrupter import at
from tests.support.launching import TINY_POLICY, small, write_sums
from tests.support.refusals import says
from tests.support.undisturbed import once, session_folder

EVALUATE = "rlhf.evaluate.__main__"
SAMPLED = ("rollout.val_kwargs.n=4", "rollout.val_kwargs.temperature=1.0")
SHORT = (*SAMPLED, "trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.test_freq=1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run on two ranks and a run that trains adapters. Both evaluate steps 0 to 2, each with its own file of the same
    problems."""
    folder = session_folder(tmp_path_factory) / "evaluated"
    folder.mkdir(exist_ok=True)
    for name, more in {
        "whole": ["trainer.nproc=2", "trainer.overwrite=true"],
        "lora": ["model.lora.enabled=true"],
    }.items():
        held_out = write_sums(folder / ("held_out.jsonl" if name == "whole" else f"{name}.jsonl"), 12)
        command = [*small(folder, name, held_out), f"data.val_files={held_out}", *SHORT, *more, "actor.optim.lr=5e-3"]
        end = once(folder, name, lambda command=command: train_forked(command))  # type: ignore[misc]
        assert end.code == EXIT_DONE, end.output
    return folder / "rlhf"


def result_of(folder: Path, step: int) -> dict[str, float]:
    """Return the metrics of the only result of `step`, without times."""
    found = [json.loads(path.read_text())["result"] for path in folder.rglob("evaluation.json")]
    (metrics,) = [result["metrics"] for result in found if result["step"] == step]
    return {name: value for name, value in metrics.items() if not name.startswith("timing_s/")}


def of_run(run_dir: Path, step: int) -> dict[str, float]:
    record = next(record for record in history(run_dir) if record["step"] == step)
    return {name: value for name, value in record.items() if name.startswith("val")}


def test_a_run_and_its_base_model_have_the_bits_of_the_training(tmp_path, runs, capsys):
    """Evaluate on two ranks: the run after a kill of the supervisor, and the base model after a crash of a rank."""
    run = shutil.copytree(runs / "whole", tmp_path / "whole")
    place = f"trainer.default_local_dir={tmp_path}"
    killed = train_forked([str(run), place], at("evaluation.before", 1, "SIGKILL", to="supervisor"), module=EVALUATE)
    assert killed.code == -9
    assert not list(tmp_path.rglob("evaluation.json"))
    end = train_forked([str(run), place], module=EVALUATE)
    assert end.code == EXIT_DONE, end.output
    assert result_of(tmp_path, 2) == of_run(run, 2) != of_run(run, 0)
    assert not list((tmp_path / "evaluations").rglob("global_step_*"))

    crash = at("evaluation.after", 1, "raise", rank=1, once=tmp_path / "crashed")
    both = [str(TINY_POLICY), str(run), place]
    end = train_forked(both, crash, module=EVALUATE)
    assert end.code == EXIT_DONE, end.output
    assert "Restart 1 of" in end.output
    assert result_of(tmp_path, 0) == of_run(run, 0)

    assert main([*both, "--json"]) == EXIT_DONE
    document = json.loads(capsys.readouterr().out)
    assert [result["step"] for result in document["results"]] == [0, 2]
    assert main(both) == EXIT_DONE
    table = capsys.readouterr().out
    assert max(map(len, table.splitlines())) <= 80
    blocks = [[line.split() for line in block.splitlines()] for block in table.split("\n\n")]
    head = [word for block in blocks for word in block[0][1:]]
    assert head == ["step", "accuracy", "reward", "mean@4", "pass@2", "pass@4", "maj@2", "maj@4"]
    assert [row[1] for row in blocks[0][1:]] == ["0", "2"]
    for block in blocks:
        for name, row in zip(both[:2], block[1:], strict=True):
            start, _, end = row[0].rpartition("…")
            assert name.startswith(start)
            assert name.endswith(end)

    assert main([str(run), place, "rollout.val_kwargs.n=8"]) == EXIT_USER_ERROR
    says(
        capsys.readouterr().err, "rollout.val_kwargs.n: 4 before, 8 now", "trainer.experiment_name", "trainer.overwrite"
    )
    held_out = runs.parent / "held_out.jsonl"
    text = held_out.read_text()
    held_out.write_text(text.replace("answer", "answer ", 1))
    try:
        assert main([str(run), place]) == EXIT_USER_ERROR
    finally:
        held_out.write_text(text)
    says(capsys.readouterr().err, "data.val_files", str(held_out), "other content")


def test_adapters_have_the_bits_of_the_training_beside_a_run_with_another_file(tmp_path, runs):
    targets = [str(runs / "lora" / "global_step_1"), str(runs / "whole" / "global_step_2")]
    end = train_forked([*targets, f"trainer.default_local_dir={tmp_path}"], module=EVALUATE)
    assert end.code == EXIT_DONE, end.output
    assert result_of(tmp_path, 1) == of_run(runs / "lora", 1)
    assert result_of(tmp_path, 2) == of_run(runs / "whole", 2)


def test_pairs_of_preferences_are_rejected_before_ranks_start(tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "1 + 1 =", "chosen": "2", "rejected": "3"}\n')
    end = train_forked(
        [str(TINY_POLICY), f"data.val_files={pairs}", f"trainer.default_local_dir={tmp_path}"], module=EVALUATE
    )
    assert end.code == EXIT_USER_ERROR
    says(end.output, str(pairs), "answer")
    assert "starting the ranks" not in end.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([str(TINY_POLICY)], ["data.val_files"]),
        (["none/of/these", "data.val_files=x"], ["none/of/these", "run directory"]),
        (["s3://bucket/run"], ["s3://bucket/run", "Download"]),
        ([str(TINY_POLICY.parent)], [str(TINY_POLICY.parent), "config.json"]),
        ([str(TINY_POLICY), "recipes=offline", "rollout.val_kwargs.n=2"], ["val_kwargs.temperature=0", "val_kwargs.n"]),
        ([str(TINY_POLICY), "recipes=offline", "model.path=x"], ["model.path=x", "target"]),
        ([str(TINY_POLICY), "trainer.val_only=true"], ["val_only", "python -m rlhf.evaluate"]),
        ([str(TINY_POLICY), "--jsn"], ["--jsn", "--json"]),
        ([f"model.path={TINY_POLICY}"], [f"Write python -m rlhf.evaluate {TINY_POLICY}."]),
        ([f"target={TINY_POLICY}"], [f"Write python -m rlhf.evaluate {TINY_POLICY}."]),
        ([str(TINY_POLICY), "recipes=offline", "rollout.n=4"], ["rollout.n=4", "set rollout.val_kwargs.n=4."]),
        (
            [str(TINY_POLICY), "recipes=offline", "rollout.temperature=0.5"],
            ["rollout.temperature=0.5", "set rollout.val_kwargs.temperature=0.5."],
        ),
    ],
)
def test_mistakes(arguments, expected, capsys):
    assert main(arguments) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    says(error, *expected)
    assert "error: target=" not in error or "target=" in arguments[0]


def test_heads_that_vllm_cannot_split_are_an_error_before_the_start():
    """The check before a training has the same rule. The bundled policy has fewer than 77 attention heads."""
    config = composition(["recipes=offline"], Library.find(None)).resolved()
    config.rollout.name, config.rollout.tensor_model_parallel_size = "vllm", 77
    with pytest.raises(UserError) as raised:
        check_inputs(config, trains=False)
    says(str(raised.value), "rollout.tensor_model_parallel_size=77", "attention heads", str(config.model.path))


def test_an_adapter_folder_without_its_base_is_rejected(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main([str(tmp_path), "recipes=offline"]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, str(tmp_path), "base model", f"model.lora.path={tmp_path}")


def test_torchrun_evaluates_one_target(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main([str(TINY_POLICY), str(TINY_POLICY.parent / "tiny_policy" / "."), "Qwen/Other"]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, "torchrun", "one target")


def test_entries_and_recipes_override_only_their_settings_of_a_stored_run():
    library = Library.find(None)
    run = composition(["recipes=offline", "rollout.n=4", "actor.optim.lr=3e-3"], library).resolved()

    def on_stored(*overrides: str):
        stored = stored_tree(to_yaml(run), None, without=())
        return composition(list(overrides), library, stored=stored).resolved()

    assert on_stored() == run
    changed = on_stored("reward=exact_match", "rollout.val_kwargs.top_k=3")
    assert (changed.reward.functions, changed.rollout.val_kwargs.top_k) == (["exact_match"], 3)
    assert (changed.rollout.n, changed.data, changed.actor) == (4, run.data, run.actor)
    recipe = on_stored("recipes=gsm8k_qwen_0.5b", "rollout.n=2")
    assert (recipe.model.path, recipe.rollout.n) == ("Qwen/Qwen2.5-0.5B-Instruct", 2)
    assert recipe.reward.functions == ["math_verify"]
    assert recipe.trainer.seed == run.trainer.seed
