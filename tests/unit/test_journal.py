"""Rollout journal: which samples and rewards it returns after a restart, and which it drops."""

import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf.assemble.trajectory_hash import trajectory_hash
from rlhf.config import (
    ActorConfig,
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
)
from rlhf.config.compare import trajectory
from rlhf.config.user_functions import hash_of_files
from rlhf.experience.groups import Group
from rlhf.experience.journal import FOLDER, FORMAT, Journal, combined, digests
from rlhf.experience.journal_records import frame, samples_payload, to_payload
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.reward import RewardResult
from rlhf.rollout import Sample
from tests.support.launching import flip_a_byte

UIDS = [4, 5]
FILES = {"model.path": "a", "prompts": "b"}


def samples_of(uid: int) -> list[Sample]:
    return [Sample.of(uid, i, [7, uid], [-0.5, -uid / 3], "stop") for i in range(2)]


def results_of(uid: int) -> list[RewardResult]:
    return [RewardResult(uid / 7 + i, {"sums": float(i)}) for i in range(2)]


SAMPLES, RESULTS = {uid: samples_of(uid) for uid in UIDS}, {uid: results_of(uid) for uid in UIDS}


class Runs:
    """Makes journals as the ranks of a run would have them."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder
        self.config = Config()

    def journal(self, *, run_id: str = "run", files: dict[str, str] = FILES, rank: int = 0, ranks: int = 1) -> Journal:
        coordinator = Coordinator(GlooTransport())
        coordinator.rank, coordinator.world_size = rank, ranks
        trajectory_id = trajectory_hash(
            trajectory(self.config), self.config.checkpoint, self.config.model.lora, run_id, files
        )
        return Journal(self.run_dir, trajectory_id, hash_of_files(self.config.reward.functions), coordinator)

    def at(self, step: int, after: str | None = None, **settings: Any) -> Journal:
        journal = self.journal(**settings)
        journal.begin(step, step - 1, after)
        return journal

    def file(self, step: int, rank: int = 0) -> Path:
        return self.run_dir / FOLDER / f"step_{step}.rank_{rank:05d}"

    def names(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / FOLDER).iterdir())


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def fill(journal: Journal) -> None:
    journal.add_samples(SAMPLES)
    journal.add_results(RESULTS)


def knows_all(journal: Journal) -> bool:
    return (journal.samples(UIDS), journal.results(UIDS)) == (list(SAMPLES.values()), list(RESULTS.values()))


def test_added_samples_are_returned_after_a_restart_only(runs):
    journal = runs.at(3)
    assert journal.samples(UIDS) is None
    assert journal.written == 0
    fill(journal)
    assert journal.written == runs.file(3).stat().st_size > 0
    again = runs.at(3)
    assert knows_all(again)
    assert again.written == 0
    assert again.samples([5]) == [SAMPLES[5]]
    assert again.results([5]) == [RESULTS[5]]
    assert again.samples([4, 5, 6]) is None
    assert again.results([4, 5, 6]) is None
    assert runs.at(4).samples(UIDS) is None
    # A rank without prompts always finds all of its samples: none.
    assert (runs.at(4).samples([]), runs.at(4).results([])) == ([], [])


def test_samples_without_rewards_are_known_without_rewards(runs):
    runs.at(3).add_samples(SAMPLES)
    again = runs.at(3)
    assert again.samples(UIDS) == list(SAMPLES.values())
    assert again.results(UIDS) is None
    again.add_results(RESULTS)
    assert knows_all(runs.at(3))


def test_rewards_belong_to_the_samples_before_them(runs):
    fill(runs.at(3))
    runs.at(3).add_samples({4: samples_of(4)})
    assert runs.at(3).results([4]) is None
    assert runs.at(3).results([5]) == [RESULTS[5]]


OTHERS: dict[str, Callable[[Runs], Journal]] = {
    "run": lambda runs: runs.at(3, run_id="other"),
    "model files": lambda runs: runs.at(3, files=FILES | {"model.path": "c"}),
    "version": lambda runs: runs.journal(),
    "sampling": lambda runs: changed(runs, rollout=RolloutConfig(temperature=0.9)),
    "seed": lambda runs: changed(runs, trainer=TrainerConfig(seed=2)),
    "updates": lambda runs: changed(runs, actor=ActorConfig(ppo_epochs=2)),
    "what is loaded": lambda runs: changed(runs, checkpoint=CheckpointConfig(load_contents=["model"])),
}


def changed(runs: Runs, **sections: Any) -> Journal:
    runs.config = Config(**sections)
    return runs.at(3)


@pytest.mark.parametrize("what", OTHERS)
def test_samples_of_another_trajectory_and_later_steps_are_dropped(runs, what):
    for step in (2, 3, 4):
        fill(runs.at(step))
    other = OTHERS[what](runs)
    if what == "version":
        other.begin(3, 1, None)
    assert other.samples(UIDS) is None
    assert runs.names() == [runs.file(2).name]


@pytest.mark.parametrize("other", ["another folder", "the same folder"])
def test_samples_of_other_initial_adapters_are_dropped(runs, tmp_path, other):
    """`model.lora.path` matters only at the start, which a run repeats if it was killed before its first save."""
    for name, content in (("first", b"a"), ("second", b"b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(content)
    runs.config.model.lora.path = str(tmp_path / "first")
    fill(runs.at(1))
    assert runs.at(1).samples(UIDS) is not None
    if other == "another folder":
        runs.config.model.lora.path = str(tmp_path / "second")
    else:
        (tmp_path / "first" / "adapter_model.safetensors").write_bytes(b"b")
    assert runs.at(1).samples(UIDS) is None


def test_harmless_settings_change_nothing(runs):
    fill(runs.at(3))
    trainer = TrainerConfig(default_local_dir="elsewhere", nproc=2, save_freq=7, threads_per_rank=1)
    assert knows_all(changed(runs, trainer=trainer, checkpoint=CheckpointConfig(max_to_keep=9, journal=True)))


@pytest.mark.parametrize(
    ("written", "read", "known"),
    [
        ("x", "x", True),
        ("x", "y", False),
        # The process has just resumed from a checkpoint of the process that trained on x.
        ("x", None, True),
        (None, None, True),
        # The samples were generated from a checkpoint from which this process did not resume.
        (None, "x", False),
    ],
)
def test_samples_are_kept_only_after_the_same_previous_batch(runs, written, read, known):
    fill(runs.at(3, after=written))
    assert knows_all(runs.at(3, after=read)) == known
    assert runs.file(3).exists() == known


def test_a_file_of_another_format_is_dropped(runs):
    fill(runs.at(3))
    header = {"format": FORMAT - 1, "run": "of a version that knew of no batches before"}
    samples = frame(samples_payload(0, 4, SAMPLES[4]))
    runs.file(3).write_bytes(frame(to_payload(header)) + samples)
    assert runs.at(3).samples(UIDS) is None
    assert not runs.file(3).exists()


def test_the_journal_encodes_one_prompt_at_a_time(runs):
    """The journal encodes one prompt's samples at a time, so its memory stays small beside the samples."""
    length, prompts = 10_000, 40
    samples = {uid: [Sample.of(uid, 0, [uid] * length, [-0.5] * length, "stop")] for uid in range(prompts)}
    journal = runs.at(3)
    tracemalloc.start()
    try:
        journal.add_samples(samples)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    of_prompt = 8 * length
    assert journal.written > prompts * of_prompt
    assert peak < 10 * of_prompt
    assert runs.at(3).samples(list(samples)) == list(samples.values())


def test_digests_distinguish_batches_to_the_last_bit():
    def group(uid: int = 1, **changes: Any) -> Group:
        facts: dict[str, Any] = {
            "samples": samples_of(1),
            "results": results_of(1),
            "penalties": [0.0, 0.0],
            "baseline": None,
        }
        return Group(uid, [3], **(facts | changes))  # type: ignore[arg-type]

    def hashed(*groups: Group) -> str:
        return combined([digests(groups)])

    other_sample = [Sample.of(1, 0, [7, 1], [-0.5, -1 / 3 + 1e-7], "stop"), *samples_of(1)[1:]]
    shifted = [Sample.of(1, 0, [7], [-0.5], "stop"), Sample.of(1, 1, [1, 7, 1], [-1 / 3, -0.5, -1 / 3], "stop")]
    tool = Sample.of(1, 0, [7, 1], [-0.5, -1 / 3], "stop", 0, ((1, 2),))
    different = [
        group(),
        group(2),
        group(samples=[tool, *samples_of(1)[1:]]),
        group(samples=[replace(tool, observations=((0, 1),)), *samples_of(1)[1:]]),
        group(samples=other_sample),
        group(samples=shifted),
        group(results=results_of(2)),
        group(penalties=[0.0, -0.1]),
        group(baseline=0.0),
    ]
    assert len({hashed(one) for one in different}) == len(different)
    # Numbers that are only logged, and the ranks on which groups lie, make no difference.
    logged = [RewardResult(r.score, r.terms, {"seconds": 0.1}, timeouts=1) for r in results_of(1)]
    assert hashed(group(results=logged)) == hashed(group())
    assert combined([digests([group(2)]), digests([group(1)])]) == hashed(group(1), group(2))


@pytest.mark.parametrize("which", ["reward", "estimator", "loss"])
def test_functions_of_the_user_s_count_with_their_files(runs, tmp_path, which):
    file = tmp_path / "mine.py"
    file.write_text("def f(): ...\n")
    spec = f"{file}:f"
    runs.config.reward = RewardConfig(functions=["exact_match", spec] if which == "reward" else ["exact_match"])
    runs.config.algorithm = AlgorithmConfig(adv_estimator=spec if which == "estimator" else "grpo")
    runs.config.actor.policy_loss.loss_mode = spec if which == "loss" else "vanilla"
    fill(runs.at(3))
    assert knows_all(runs.at(3))
    file.write_text("def f(): return 1\n")
    again = runs.at(3)
    # Samples stay usable if a reward changes, because the reward affects weights only from the next step on.
    assert again.samples(UIDS) == (list(SAMPLES.values()) if which == "reward" else None)
    assert again.results(UIDS) is None


def test_rewards_of_an_episode_belong_to_its_turns(runs):
    """After a change of the number of ranks, or damage, an episode may have other turns than its journaled rewards."""
    turns = {(4, 0, 0, 0, "past"): samples_of(4)[0]}
    one = runs.at(3, rank=1, ranks=2)
    one.add_turns(turns)
    one.add_results({4: results_of(4)})
    assert runs.at(3).results([4]) == [results_of(4)]
    other = runs.at(3)
    other.add_turns({(4, 0, 0, 0, "other past"): samples_of(4)[1]})
    assert other.results([4]) is None
    assert runs.at(3).results([4]) is None
    again = runs.at(3, rank=0, ranks=2)
    again.open_episodes([4, 5])  # reads the file of rank 1, too
    assert again.turns([*turns]) == [*turns.values()]
    assert again.results([4]) is None
    again.add_results({4: results_of(4)})
    again.add_calls({((4, 0, 0, 1, "past"), "step"): {"replies": [], "state": None}})
    assert runs.at(3).results([4]) is None


@pytest.mark.parametrize("section", ["env", "model"])
def test_turns_of_another_chat_template_are_dropped(runs, tmp_path, section):
    """Templates render the messages between turns, which the fingerprint of the prompts lacks."""
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    if section == "env":
        runs.config.env.template = str(file)
    else:
        runs.config.model.chat_template = str(file)
    fill(runs.at(3))
    assert knows_all(runs.at(3))
    file.write_text("{{ messages }} ")
    assert runs.at(3).samples(UIDS) is None


def test_only_steps_that_a_published_checkpoint_has_are_dropped(runs):
    for step in range(1, 7):
        fill(runs.at(step))
    (runs.run_dir / "global_step_4").mkdir()
    (runs.run_dir / ".tmp-global_step_6-x").mkdir()
    assert knows_all(runs.at(5))
    assert runs.names() == [runs.file(5).name, runs.file(6).name]
    # The run is at step 5 again, because it could not use the later checkpoint. So it still needs these files.
    (runs.run_dir / "global_step_9").mkdir()
    assert knows_all(runs.at(5))
    runs.journal().drop_published(up_to=9)
    assert runs.names() == []


def damage(path: Path, what: str) -> None:
    if what == "flipped":
        flip_a_byte(path)
    elif what == "torn":
        path.write_bytes(path.read_bytes()[:-1])
    elif what == "header":
        path.write_bytes(b"\x00" + path.read_bytes()[1:])
    else:
        path.write_bytes(path.read_bytes()[:10])


@pytest.mark.parametrize("what", ["flipped", "torn", "header", "only a part of the header"])
def test_damaged_records_are_dropped_and_rewritten(runs, what, caplog):
    fill(runs.at(3))
    damage(runs.file(3), what)
    again = runs.at(3)
    assert caplog.text.count("damaged or torn") == 1
    assert not knows_all(again)
    fill(again)
    assert knows_all(runs.at(3))


def test_another_number_of_ranks_finds_every_sample(runs):
    for rank, uid in enumerate(UIDS):
        journal = runs.at(3, rank=rank, ranks=2)
        journal.add_samples({uid: SAMPLES[uid]})
        journal.add_results({uid: RESULTS[uid]})
    assert knows_all(runs.at(3))
    for rank in range(3):
        assert knows_all(runs.at(3, rank=rank, ranks=3))
    # Exactly one rank drops each file.
    (runs.run_dir / "global_step_3").mkdir()
    runs.at(4, rank=1, ranks=2)
    assert runs.names() == [runs.file(3, 0).name]
    shutil.copy(runs.file(3, 0), runs.file(3, 2))
    runs.at(4, rank=0, ranks=2)
    assert runs.names() == []


def test_damage_in_another_ranks_file_is_skipped_and_not_fixed(runs, caplog):
    fill(runs.at(3, rank=0, ranks=2))
    content = runs.file(3).read_bytes()[:-1]
    runs.file(3).write_bytes(content)
    other = runs.at(3, rank=1, ranks=2)
    assert other.samples(UIDS) == list(SAMPLES.values())
    assert other.results(UIDS) is None
    assert runs.file(3).read_bytes() == content
    assert "damaged or torn" in caplog.text


def test_a_journal_file_removed_by_its_rank_logs_nothing(runs, caplog):
    fill(runs.at(3, rank=0, ranks=2))
    other = runs.at(3, rank=1, ranks=2)
    runs.file(3).unlink()
    assert other.samples(UIDS) is None
    assert caplog.text == ""


def test_a_journal_that_cannot_be_written_is_a_warning(runs, caplog):
    (runs.run_dir / FOLDER).write_text("in the way")
    journal = runs.at(3)
    fill(journal)
    assert journal.written == 0
    assert caplog.text.count("can't be written") == 1
    (runs.run_dir / FOLDER).unlink()
    journal.begin(4, 3, None)
    fill(journal)
    assert knows_all(runs.at(4))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_journal_that_cannot_be_read_is_a_warning(runs, ranks, caplog):
    runs.file(3).mkdir(parents=True)
    journal = runs.at(3, rank=ranks - 1, ranks=ranks)
    assert journal.samples(UIDS) is None
    assert caplog.text.count("can't be") == 1
    fill(journal)
    # The rank writes nothing if something else, here a folder, is in the place of its own file.
    assert (journal.written > 0) == (ranks == 2)


def test_a_file_that_cannot_be_removed_is_a_warning(runs, caplog):
    runs.file(2).mkdir(parents=True)
    (runs.run_dir / "global_step_2").mkdir()
    fill(runs.at(3))
    assert knows_all(runs.at(3))
    assert "can't be removed" in caplog.text
