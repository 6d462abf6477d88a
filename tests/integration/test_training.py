"""python -m rlhf.train from the command line: what a finished run leaves, and how mistakes and crashes in the ranks
end."""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR
from rlhf.storage.layout import POINTER
from tests.support.compare_runs import history
from tests.support.forked_start import train_forked
from tests.support.launching import STEPS, Ended, question, ranks, records, saved_steps, small, train
from tests.support.rounding import sum_bound
from tests.support.undisturbed import EXPORT, Undisturbed

POISON = 9
"""The row, in the order of the file, on which the poisoned function raises. With eight prompts per step, it is in
step 2."""

REWARD = f"""
import time

def poisoned(data_source, solution_str, ground_truth, extra_info):
    if extra_info["row"] == {POISON}:
        raise ValueError("no grade for this one")
    return float(solution_str.strip() == ground_truth)

def detailed(data_source, solution_str, ground_truth, extra_info):
    if extra_info["row"] == 0:
        time.sleep(60)
    right = float(solution_str.strip() == ground_truth)
    return {{"score": right, "row": extra_info["row"], "length": len(solution_str)}}
"""


@pytest.fixture(scope="session")
def verl_rows() -> list[dict]:
    """Rows with verl's columns."""
    return [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": question(20 + i, 31 + i)}],
            "reward_model": {"style": "rule", "ground_truth": str(51 + 2 * i)},
            "extra_info": {"row": i},
        }
        for i in range(16)
    ]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, verl_rows: list[dict]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("user")
    (folder / "rewards.py").write_text(REWARD)
    (folder / "verl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in verl_rows))
    for part in (0, 1):
        pq.write_table(pa.Table.from_pylist(verl_rows[8 * part : 8 * part + 8]), folder / f"part_{part}.parquet")
    return folder


@pytest.fixture(scope="module")
def ends(launches: ThreadPoolExecutor, undisturbed: Undisturbed, folder: Path, sums: Path) -> dict[str, Future[Ended]]:
    """Starts from the command line that may run in parallel, each in a run directory with its name."""

    def start(name: str, *overrides: str, data: Path = sums) -> Future[Ended]:
        return launches.submit(train_forked, small(folder, name, data, *overrides))

    again = [*small(undisturbed.folder, "undisturbed_1", sums), EXPORT]
    return {
        "again": launches.submit(lambda: undisturbed.run_dir(1) and train(again)),
        "raises": start(
            "raises",
            f"reward.functions=[{folder}/rewards.py:poisoned]",
            "data.shuffle=false",
            "trainer.save_freq=1",
            data=folder / "verl.jsonl",
        ),
        "parquet": start(
            "parquet",
            f"reward.functions=[{folder}/rewards.py:detailed]",
            "reward.timeout_s=5",
            f"data.val_files={folder}/verl.jsonl",
            "data.val_max_samples=4",
            "reward.num_workers=4",
            "trainer.total_training_steps=null",
            "trainer.total_epochs=1",
            "actor.optim.lr_warmup_steps=0",
            data=folder / "part_*.parquet",
        ),
        "too_long": start("too_long", "data.max_prompt_length=5", "data.overlong_prompts=error", "trainer.nproc=2"),
    }


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_finished_run_leaves_checkpoints_history_and_report(undisturbed, nproc):
    run_dir = undisturbed.run_dir(nproc)
    assert saved_steps(run_dir) == [7, 6, 3]
    assert (run_dir / POINTER).read_text().strip() == "7"
    assert [record["step"] for record in records(run_dir)] == list(range(1, STEPS + 1))
    report = json.loads((run_dir / "report" / "report.json").read_text())
    assert str(run_dir / "global_step_7") in json.dumps(report)
    assert "</html>" in (run_dir / "report" / "report.html").read_text()
    output = undisturbed.end(nproc).output
    assert f"step {STEPS}/{STEPS}" in output
    assert str(run_dir / "global_step_7") in output
    assert not [path for path in run_dir.iterdir() if path.name.startswith((".tmp-", ".trash-"))]


@pytest.mark.parametrize("nproc", [1, 2])
def test_each_phase_of_a_step_has_its_seconds(undisturbed, nproc):
    for record in records(undisturbed.run_dir(nproc)):
        parts = {name: record[f"timing_s/{name}"] for name in ("gen", "share", "ref", "adv", "update_actor")}
        assert min(parts.values()) >= 0
        assert sum(parts.values()) <= record["timing_s/step"]


def test_the_number_of_ranks_does_not_change_the_samples(undisturbed):
    one, two = (history(undisturbed.run_dir(nproc))[0] for nproc in (1, 2))
    for name in ("reward/mean", "reward/std", "tokens/total", "response_length/mean", "response_length/max"):
        assert one[name] == two[name], name
    # Metrics are sums over a step's tokens. The terms of the loss are advantages: at most 1.5 in groups of four.
    bound = sum_bound(one["tokens/total"])
    for name in ("actor/entropy", "actor/grad_norm"):
        assert one[name] == pytest.approx(two[name], rel=bound, abs=0), name
    assert one["actor/loss"] == pytest.approx(two["actor/loss"], rel=0, abs=1.5 * bound)
    # The KL is about half the mean square of log-ratios. They have rounding errors; the mean |log-ratio| <= sqrt(2 KL).
    apart = bound * (2 * one["actor/kl_loss"]) ** 0.5
    assert one["actor/kl_loss"] == pytest.approx(two["actor/kl_loss"], rel=0, abs=apart)


def test_the_exported_model_opens_as_a_hugging_face_model(undisturbed):
    folder = undisturbed.run_dir(2) / "global_step_7" / "actor" / "huggingface"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question(12, 30)}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    response = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(response, skip_special_tokens=True).strip().isdigit()


def test_starting_a_finished_run_reports_that_it_is_finished(ends, undisturbed):
    end = ends["again"].result()
    assert end.code == EXIT_DONE, end.output
    assert f"The run in {undisturbed.run_dir(1)} is finished at step {STEPS}" in end.output
    assert f"step {STEPS}/{STEPS}" not in end.output


def test_a_function_that_raises_ends_the_run_once_with_the_sample(ends, folder):
    end = ends["raises"].result()
    assert end.code == EXIT_USER_ERROR
    assert saved_steps(folder / "rlhf" / "raises") == [1]
    assert "Restart" not in end.output
    for once in ("ValueError: no grade for this one", "Traceback", "reward.functions=", "set reward.on_error=score"):
        assert end.output.count(once) == 1, once
    assert f"'row': {POISON}" in end.output


def test_parquet_with_verl_columns_a_function_with_details_and_one_that_hangs(ends, folder):
    end = ends["parquet"].result()
    assert end.code == EXIT_DONE, end.output
    initial, first, second = records(folder / "rlhf" / "parquet")
    # Row 0 hangs for each of its four samples. It is in one of the two steps of the epoch.
    assert sorted([first["reward/timeouts"], second["reward/timeouts"]]) == [0, 4]
    assert (first["reward/row"] + second["reward/row"]) > 0
    assert 1 <= first["reward/length"] <= 8
    assert initial["step"] == 0
    assert 0 <= initial["val/accuracy"] <= 0.75  # three of the four held-out rows can be scored
    assert end.output.count("took longer than reward.timeout_s=5 on 4 samples, which score") == 1


def test_a_user_error_in_the_ranks_is_reported_once_and_not_retried(ends, folder):
    end = ends["too_long"].result()
    assert end.code == EXIT_USER_ERROR
    assert end.output.count("data.max_prompt_length=5") == 1
    assert "Traceback" not in end.output
    assert "Restart" not in end.output
    assert saved_steps(folder / "rlhf" / "too_long") == []


def test_an_epoch_counts_dropped_prompts(tmp_path, sums):
    overrides = (
        "algorithm.filter_groups.enable=true",
        "data.gen_batch_size=10",
        "trainer.total_training_steps=null",
        "trainer.total_epochs=2",
        "trainer.test_freq=0",
        "trainer.save_freq=2",
    )
    end = ranks(tmp_path / "log", small(tmp_path, "epochs", sums, *overrides))
    assert end.code == EXIT_DONE, end.output
    run_dir = tmp_path / "rlhf" / "epochs"
    generated = [record["sampling/groups_generated"] for record in records(run_dir)]
    # Two passes over 30 prompts would be seven batches of 8 if no group had been dropped.
    assert len(generated) < 7
    assert sum(generated[:-1]) < 2 * 30 <= sum(generated)
    assert saved_steps(run_dir)[0] == len(generated)
    again = ranks(tmp_path / "log", small(tmp_path, "epochs", sums, *overrides))
    assert (again.code, len(records(run_dir))) == (EXIT_DONE, len(generated)), again.output
