import json
import logging
import math
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.config import GuardsConfig
from rlhf.errors import UserError
from rlhf.learning.guards import Guards
from tests.support.refusals import user_error

FINE = {"loss": 0.5, "kl": 0.01, "ref_kl": 0.02, "grad_norm": 1.0}


def judge(guards: Guards, step: int, reward: float = 0.5, who: str = "actor", **figures: float) -> str:
    guards.begin(step, reward)
    guards.allows(who, **figures)
    return guards.settle(step)


@pytest.mark.parametrize("figure", FINE)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_metrics_that_are_not_finite_are_rejected_without_any_bound(figure: str, value: float) -> None:
    guards = Guards(GuardsConfig())
    guards.begin(1, 0.5)
    assert guards.allows("actor", **FINE)
    assert not guards.allows("critic", **FINE | {figure: value})
    assert guards.rejected is not None
    assert (guards.rejected.step, guards.rejected.who, guards.rejected.metric) == (1, "critic", figure)
    assert not guards.allows("actor", **FINE)
    assert guards.settle(1) == "skip"
    assert guards.metrics() == {"guards/skips": 1, "guards/rollbacks": 0, "guards/refused": 1}
    assert judge(guards, 2, **FINE) == "train"
    assert guards.metrics() == {"guards/skips": 1, "guards/rollbacks": 0, "guards/refused": 0}


@pytest.mark.parametrize(
    ("bound", "figure", "within", "beyond"),
    [
        ("max_loss", "loss", (2.0, -2.0), (2.1, -2.1)),
        ("max_kl", "kl", (2.0, -3.0), (2.1,)),
        ("max_kl", "ref_kl", (2.0, -3.0), (2.1,)),
    ],
)
def test_bounds(bound: str, figure: str, within: tuple[float, ...], beyond: tuple[float, ...]) -> None:
    for value in within:
        assert judge(Guards(GuardsConfig(**{bound: 2.0})), 1, **{figure: value}) == "train"
    for value in beyond:
        guards = Guards(GuardsConfig(**{bound: 2.0}))
        assert judge(guards, 1, **{figure: value}) == "skip"
        assert str(guards.rejected) == f"step 1: actor {figure} {value} is beyond guards.{bound}=2"
        assert judge(Guards(GuardsConfig()), 1, **{figure: value}) == "train"


def test_a_reward_drop_is_measured_against_accepted_batches_only() -> None:
    guards = Guards(GuardsConfig(max_reward_drop=0.25, max_events=9))
    assert judge(guards, 1, reward=-100.0) == "train"  # no average before the first
    guards = Guards(GuardsConfig(max_reward_drop=0.25, max_events=9))
    assert judge(guards, 1, reward=0.0) == "train"
    assert judge(guards, 2, reward=1.0) == "train"  # a rise is no drop; the average is 0.1 now
    assert judge(guards, 3, reward=-0.14) == "train"  # 0.24 below; now 0.076
    assert judge(guards, 4, reward=-0.18) == "skip"
    assert guards.rejected is not None
    assert guards.rejected.value == pytest.approx(0.256)
    assert judge(guards, 5, reward=-0.17) == "train"  # had the refused batch counted, the bound would lie lower
    guards.begin(6, math.nan)
    assert not guards.allows("actor", **FINE)
    assert guards.settle(6) == "skip"
    assert judge(guards, 7, reward=0.0) == "train"


def test_skips_in_a_row_end_the_run_with_evidence() -> None:
    guards = Guards(GuardsConfig(max_kl=1.0, max_events=2))
    assert judge(guards, 1, kl=2.0) == "skip"
    assert judge(guards, 2) == "train"
    assert judge(guards, 3, kl=3.0) == "skip"
    assert judge(guards, 4, who="critic", loss=math.nan) == "skip"
    with pytest.raises(UserError) as ending:
        judge(guards, 5, kl=5.0)
    text = str(ending.value)
    assert "3 batches in a row, more than guards.max_events=2" in text
    assert "step 1:" not in text
    for line in ("step 3: actor kl 3 is beyond guards.max_kl=1", "step 4: critic loss nan is not finite", "step 5: "):
        assert line in text
    assert "Lower actor.optim.lr and critic.optim.lr; " in text
    assert "raise guards.max_kl;" in text


def test_a_run_whose_batches_were_all_rejected_ends_with_an_error() -> None:
    guards = Guards(GuardsConfig())
    assert judge(guards, 1, loss=math.nan) == "skip"
    again = Guards(GuardsConfig())
    again.load_state_dict(json.loads(json.dumps(guards.state_dict())))
    again.begin(2, math.nan)
    with pytest.raises(UserError, match=r"(?s)rejected every batch of the run.*step 1: actor loss nan.*step 2: reward"):
        again.settle(2, last=True)
    # Before exceeding a bound, a batch was trained on. One trained batch is enough for a run to end normally.
    for figures in ({"kl": 3.0}, {}):
        guards = Guards(GuardsConfig(max_kl=1.0))
        judge(guards, 1, **figures)
        guards.begin(2, 0.5)
        guards.allows("actor", loss=math.nan)
        assert guards.settle(2, last=True) == "skip"


def test_a_nan_loss_message_names_the_custom_policy_loss() -> None:
    own = "actor.policy_loss.loss_mode=mine.py:loss"
    for metrics, named in (({"loss": math.nan}, True), ({"kl": 5.0}, False)):
        guards = Guards(GuardsConfig(action="stop", max_kl=1.0), own_loss=own)
        assert (own in user_error(partial(judge, guards, 1, **metrics))) is named


def test_stop_ends_the_run_at_the_first_event() -> None:
    guards = Guards(GuardsConfig(action="stop"))
    with pytest.raises(UserError, match=r"(?s)guards.action=stop.*step 1: actor loss nan is not finite"):
        judge(guards, 1, loss=math.nan)


def test_each_event_is_one_warning_on_one_rank(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        judge(Guards(GuardsConfig()), 7, loss=math.nan)
        judge(Guards(GuardsConfig(), quiet=True), 7, loss=math.nan)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "step 7: actor loss nan is not finite" in record.message
    assert "1 in a row, guards.max_events=5" in record.message


def test_guards_remember_a_rollback_after_restoring_their_state() -> None:
    guards = Guards(GuardsConfig(action="rollback", max_reward_drop=0.5))
    assert judge(guards, 1, reward=0.5) == "train"
    checkpoint = json.dumps(guards.state_dict())
    assert judge(guards, 2, reward=1.0) == "train"
    assert judge(guards, 3, loss=math.nan) == "rollback"
    memory = guards.remember(position=48)
    guards.load_state_dict(json.loads(checkpoint))
    assert guards.skip_for(3) is None
    guards.recall(memory)
    assert (guards.skip_for(2), guards.skip_for(3)) == (None, 48)
    assert guards.state_dict()["reward_average"] == 0.5

    # Step 2 runs again: it must not end the row of rejected batches, and its record must not count the later rollback.
    assert judge(guards, 2, reward=1.0) == "train"
    assert guards.metrics()["guards/rollbacks"] == 0
    assert len(guards.state_dict()["row"]) == 1
    assert judge(guards, 3, grad_norm=math.inf) == "rollback"
    guards.recall(guards.remember(position=64))
    assert guards.skip_for(3) == 64
    assert judge(guards, 3) == "train"
    assert guards.metrics() == {"guards/skips": 0, "guards/rollbacks": 2, "guards/refused": 0}
    assert len(guards.state_dict()["row"]) == 2
    assert judge(guards, 4) == "train"
    assert guards.state_dict()["row"] == []
    assert guards.skip_for(3) == 64


def test_the_state_is_whole_and_json() -> None:
    guards = Guards(GuardsConfig(action="rollback", max_kl=1.0))
    judge(guards, 1, loss=math.nan)
    guards.recall(guards.remember(16))
    judge(guards, 1, reward=0.25)
    judge(guards, 2, kl=7.0)
    state = json.loads(json.dumps(guards.state_dict(), allow_nan=False))
    assert state == guards.state_dict()  # in spite of the NaN
    other = Guards(GuardsConfig(action="rollback", max_kl=1.0))
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert other.skip_for(1) == 16


# A simulated run. `Run` is a process' memory, which a crash loses; `Disk` is the state that remains.

STEPS, SAVE_FREQ, BATCH = 12, 4, 8


class Crash(Exception):
    pass


@dataclass
class Disk:
    checkpoint: str
    records: list[dict] = field(default_factory=list)
    moments: int = 0


def dice(*words: object) -> float:
    return int.from_bytes(blake2b(repr(words).encode(), digest_size=4).digest()) / 2**32


@dataclass
class Run:
    """Training whose weights are a digest of all batches that it trained on. Batches are rejected by chance."""

    config: GuardsConfig
    seed: int
    rejection_rate: float
    disk: Disk
    crashes: frozenset[int] = frozenset()
    preemptions: frozenset[int] = frozenset()

    def moment(self) -> None:
        """Count a point, and crash there if planned. The count spans all attempts, so each crash happens once."""
        self.disk.moments += 1
        assert self.disk.moments < 10_000, "an endless rollback"
        if self.disk.moments in self.crashes:
            raise Crash

    def save(self) -> None:
        state = {
            "step": self.step,
            "weights": self.weights,
            "consumed": self.consumed,
            "guards": self.guards.state_dict(),
        }
        self.disk.checkpoint = json.dumps(state)

    def restore(self) -> None:
        state = json.loads(self.disk.checkpoint)
        self.step, self.weights, self.consumed = state["step"], state["weights"], state["consumed"]
        self.guards.load_state_dict(state["guards"])
        self.disk.records = [record for record in self.disk.records if record["step"] <= self.step]

    def train(self) -> None:
        self.guards = Guards(self.config, quiet=True)
        self.restore()
        while self.step < STEPS:
            step = self.step + 1
            self.consumed = max(self.consumed, self.guards.skip_for(step) or 0)
            first, self.consumed = self.consumed, self.consumed + BATCH
            self.moment()
            batch = (self.seed, self.weights, step, first)
            self.guards.begin(step, reward := dice("reward", *batch))
            for mini in range(2):
                rejects = dice("refused", mini, *batch) < self.rejection_rate
                if self.guards.allows("actor", loss=math.nan if rejects else 1.0):
                    self.weights = dice("update", mini, *batch)
                self.moment()
            if self.guards.settle(step) == "rollback":
                memory = self.guards.remember(self.consumed)
                self.moment()
                self.restore()
                self.guards.recall(memory)
                self.moment()
                continue
            self.step = step
            self.disk.records.append({"step": step, "weights": self.weights, "reward": reward} | self.guards.metrics())
            self.moment()
            if step % SAVE_FREQ == 0 or self.disk.moments in self.preemptions:
                self.save()
            self.moment()


def finished(
    config: GuardsConfig, seed: int, rate: float, crashes: set[int] = frozenset(), preemptions: set[int] = frozenset()
) -> tuple[Disk, str]:
    """Run to the end; return the disk, and the message that ended the run ("" if it finished)."""
    start = {"step": 0, "weights": 0.0, "consumed": 0, "guards": Guards(config).state_dict()}
    disk = Disk(json.dumps(start))
    while True:
        try:
            Run(config, seed, rate, disk, frozenset(crashes), frozenset(preemptions)).train()
            return disk, ""
        except Crash:
            continue
        except UserError as error:
            return disk, str(error)


@settings(max_examples=300, deadline=None)
@given(
    action=st.sampled_from(["skip", "rollback"]),
    drop=st.sampled_from([None, 0.3]),
    max_events=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    rate=st.sampled_from([0.0, 0.1, 0.25]),
    crashes=st.sets(st.integers(1, 200), max_size=6),
    preemptions=st.sets(st.integers(1, 200), max_size=30),
)
def test_crashes_do_not_change_the_run(
    action: str,
    drop: float | None,
    max_events: int,
    seed: int,
    rate: float,
    crashes: set[int],
    preemptions: set[int],
) -> None:
    config = GuardsConfig(action=action, max_reward_drop=drop, max_events=max_events)
    calm, ending = finished(config, seed, rate)
    # Saves at preemptions change where the run resumes and to which step it rolls back, but not its result.
    stormy, stormy_ending = finished(config, seed, rate, crashes, preemptions)
    assert (stormy_ending, stormy.records) == (ending, calm.records)
    if not ending:
        assert stormy.checkpoint == calm.checkpoint


def test_the_simulation_has_failing_runs_and_several_rollbacks() -> None:
    endings = [finished(GuardsConfig(action="rollback"), seed, 0.15) for seed in range(40)]
    assert any(ending for _, ending in endings)
    assert max(disk.records[-1]["guards/rollbacks"] for disk, ending in endings if not ending) >= 4


@dataclass
class Spiteful(Run):
    """Rejects every batch, except when one more rejection would end the run."""

    rollbacks: int = 0

    def train(self) -> None:
        self.guards = Guards(self.config, quiet=True)
        self.restore()
        while self.step < STEPS:
            step = self.step + 1
            self.guards.begin(step, 0.5)
            self.guards.allows(
                "actor", loss=1.0 if len(self.guards.state_dict()["row"]) == self.config.max_events else math.nan
            )
            if self.guards.settle(step) == "rollback":
                self.rollbacks += 1
                assert self.rollbacks <= STEPS * self.config.max_events, "an endless rollback"
                memory = self.guards.remember(0)
                self.restore()
                self.guards.recall(memory)
                self.moment()
                continue
            self.step = step
            if step % SAVE_FREQ == 0:
                self.save()


@pytest.mark.parametrize("max_events", [1, 3])
def test_rollbacks_are_bounded_even_if_repeated_steps_end_differently(max_events: int) -> None:
    config = GuardsConfig(action="rollback", max_events=max_events)
    disk = Disk(json.dumps({"step": 0, "weights": 0.0, "consumed": 0, "guards": Guards(config).state_dict()}))
    run = Spiteful(config, 0, 0.0, disk)
    run.train()
    assert run.rollbacks >= max_events


def test_rollbacks_are_bounded_when_every_batch_is_refused_and_crashes_take_the_memory() -> None:
    config = GuardsConfig(action="rollback", max_events=3)
    crashes = {4, 9, 20}
    disk, ending = finished(config, 0, 1.0, crashes)
    assert ending.startswith("The guards rejected 4 batches in a row")
    # Points of one attempt: four batches with three points each, and two for each of the three rollbacks.
    assert disk.moments <= (len(crashes) + 1) * (4 * 3 + 3 * 2)
