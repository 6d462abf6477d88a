"""`rollout.async_steps` with two scripted servers, which answer in real time: versions, ages, journal, failures."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.batch import RolloutBatch
from rlhf.checkpoint.state.driver_state import DriverState
from rlhf.config import RolloutConfig, ServersConfig
from rlhf.experience.collector import Collector
from rlhf.experience.journal import Journal
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.rollout import Sample
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.rollout.sample_codec import from_arrays, to_arrays
from rlhf.rollout.servers.server_engine import build_server_engine
from rlhf.tracking.history import MACHINE_METRICS
from tests.support.checkpoints import equal_bits
from tests.support.launching import TINY_POLICY
from tests.support.numeric_ranks import run_ranks
from tests.support.plain_collect import BATCH, FILTERED, UNFILTERED, N, build, new_driver, tensors_of_ranks
from tests.support.scripted_vllm import DEADLINE_S, EOS, ScriptedVllm, log_prob_of, version_of

STEPS, LONGEST = 5, 40
# With fewer tokens, nearly all responses would be one end token each, and a step whose rewards all fail ends the run.
SHORTEST = 13
TRAINING_S = 0.05
"""Seconds in which servers generate while the ranks train."""


@dataclass
class Rank:
    driver: DriverState
    collector: Collector


@contextmanager
def servers(longest: int = LONGEST, token_s: float = 0.004) -> Iterator[list[ScriptedVllm]]:
    made = [ScriptedVllm(token_s, longest) for _ in range(2)]
    try:
        yield made
    finally:
        for server in made:
            server.close()


@contextmanager
def rank(urls: list[str], folder: Path, k: int, *, journal: Path | None = None, **settings: Any) -> Iterator[Rank]:
    """Start a rank of a run with servers at `urls`, and end it like a crash: nothing is saved."""
    config = RolloutConfig(
        name="vllm_server",
        max_num_seqs=64,
        servers=ServersConfig(urls=urls, answer_timeout_s=5.0, backoff_s=0.1, start_timeout_s=30.0),
    )
    files = PolicyFiles({"config.json": (TINY_POLICY / "config.json").read_bytes()}, folder / "model", [EOS], 256)
    coordinator, driver = Coordinator(GlooTransport()), new_driver()
    engine = build_server_engine(config, files, coordinator, torch.device("cpu"), logs=folder, run_id="run")
    stored = None if journal is None else Journal(journal, "trajectory", "rewards", coordinator)
    chosen = {"filter_groups": UNFILTERED, "longest": LONGEST, "async_steps": k} | settings
    try:
        yield Rank(driver, build(driver, coordinator, engine=engine, journal=stored, **chosen))
    finally:
        engine.close()


def walk(of: Rank, last: int, *, saves: bool = False) -> list[dict[str, Any]]:
    """Return what this rank got in each step up to `last`. `saves`: save after each step."""
    records = []
    for step in range(of.driver.step + 1, last + 1):
        collected = of.collector.collect(step)
        time.sleep(TRAINING_S)
        of.driver.finish_step(collected.tokens.total, len(collected.batch), 0.0, collected.epochs)
        if saves:
            saved(of)
        own = {name: v for name, v in collected.metrics.items() if not name.startswith(MACHINE_METRICS)}
        batch = {f.name: getattr(collected.batch, f.name) for f in fields(RolloutBatch)}
        arrays = to_arrays([sample for group in collected.groups for sample in group.samples])
        samples = {name: torch.from_numpy(array) for name, array in arrays.items()}
        records.append({"batch": batch, "metrics": own, "epochs": collected.epochs, "samples": samples})
    return records


def samples_in(record: dict[str, Any]) -> list[Sample]:
    return from_arrays({name: tensor.numpy() for name, tensor in record["samples"].items()})


def load(of: Rank, checkpoint: tuple[int, int, list[Any]]) -> None:
    of.driver.step, position, parts = checkpoint
    coordinator, prompts = of.collector.coordinator, of.collector.prompts
    of.collector.load_tensors([part for part in parts[coordinator.rank :: coordinator.world_size] if part])
    prompts.stream.load_state_dict(prompts.stream.state_dict() | {"consumed": position})


def saved(of: Rank) -> tuple[int, int, list[Any]]:
    parts = tensors_of_ranks(of.collector, of.collector.coordinator)
    return of.driver.step, of.collector.prompts.position, parts


def wait_for(both: list[ScriptedVllm], answers: int) -> None:
    """Wait until the servers have sent `answers` responses."""
    end = time.monotonic() + DEADLINE_S
    while sum(len(server.answers) for server in both) < answers:
        assert time.monotonic() < end
        time.sleep(0.01)


def check(parts: list[list[dict[str, Any]]], k: int, first: int = 1) -> list[int]:
    """Check each token's version, ages, full batches and that no prompt comes twice. Return the ages of all tokens."""
    seen: set[int] = set()
    ages = []
    for step, records in enumerate(zip(*parts, strict=True), start=first):
        samples = [sample for record in records for sample in samples_in(record)]
        uids = {sample.uid for sample in samples}
        assert (len(samples), len(uids)) == (BATCH * N, BATCH)
        assert not uids & seen
        seen |= uids
        for sample in samples:
            start = 0
            for version, end in sample.versions:
                assert {version_of(value) for value in sample.log_probs[start:end].tolist()} <= {version}
                ages += [step - 1 - version] * (end - start)
                start = end
        of_step = [step - 1 - version for s in samples for version, _ in s.versions]
        assert min(of_step) >= 0
        assert max(of_step) <= k
        assert records[0]["metrics"]["sampling/token_staleness_max"] == max(of_step)
        assert records[0]["metrics"]["sampling/prompts_expired"] == 0
    return ages


def test_samples_that_continue_over_weight_syncs_have_the_masks_of_all_their_tokens(tmp_path):
    with servers() as both:
        for server in both:
            server.sampling_mask = True
        masked = {"top_k": 3, "sampling_mask": True}
        with rank([server.url for server in both], tmp_path, 2, sampling=masked) as one:
            records = walk(one, STEPS)
    check([records], 2)
    assert any(len(sample.versions) > 1 for record in records for sample in samples_in(record))
    for record in records:
        for sample, mask in zip(samples_in(record), record["batch"]["sampling_mask"], strict=True):
            assert sample.sampling_mask is not None
            kept = sample.sampling_mask.rows(mask.shape[1])
            assert torch.equal(mask[: len(sample)], torch.from_numpy(kept))
            assert (kept == sample.token_ids[:, None]).any(axis=1).all()


@pytest.mark.parametrize("k", [1, 2, 4])
def test_each_token_has_its_version_and_none_is_too_old(k, tmp_path):
    with servers(token_s=0.03) as both, rank([server.url for server in both], tmp_path, k) as one:
        records = walk(one, STEPS)
        assert all(server.tokens for server in both)
        assert any("abort" in server.answers for server in both)
    ages = check([records], k)
    assert max(ages) >= 1
    spans = [len(sample.versions) for record in records for sample in samples_in(record)]
    assert max(spans) >= 2, "no response went on under newer weights"


def test_servers_generate_while_the_ranks_train(tmp_path):
    with servers() as both, rank([server.url for server in both], tmp_path, 1) as one:
        one.collector.collect(1)
        one.driver.step = 1
        # One of the two batches in flight is complete. The servers have not answered all samples of the other.
        assert sum(len(server.answers) for server in both) < 2 * BATCH * N
        wait_for(both, 2 * BATCH * N)
        # The batch of the next step is complete, so it has no token from the newer weights.
        [second] = walk(one, 2)
        assert {version for sample in samples_in(second) for version, _ in sample.versions} == {0}


def on_ranks(
    urls: list[str], folder: Path, journal: Path, last: int, k: int, *, saves: bool, **settings: Any
) -> list[dict[str, Any]]:
    with rank(urls, folder, k, journal=journal, **settings) as one:
        return walk(one, last, saves=saves)


SETTINGS: dict[str, dict[str, Any]] = {
    "every prompt": {},
    "greedy baseline": {"greedy": True},
    "dynamic sampling": {"filter_groups": FILTERED, "drawn": 6},
}


def settings_of(name: str, k: int) -> dict[str, Any]:
    found = dict(SETTINGS[name])
    if "filter_groups" in found:
        found["filter_groups"] = type(FILTERED)(enable=True, on_limit="fill")
    return found


@pytest.mark.parametrize(
    ("name", "world_size", "k", "saves"),
    [
        ("every prompt", 1, 2, False),
        ("every prompt", 1, 2, True),
        pytest.param("every prompt", 2, 2, True, marks=pytest.mark.slow),
        ("greedy baseline", 1, 1, True),
        ("dynamic sampling", 1, 2, True),
    ],
)
def test_a_replay_of_the_journal_has_the_bits_of_the_run(name, world_size, k, saves, tmp_path):
    """The run ends like a crash in the training of step 3. The replay's servers would give responses of other
    lengths, and the replay saves nothing."""
    journal, settings = tmp_path / "run", settings_of(name, k)
    with servers() as both:
        run = partial(on_ranks, [s.url for s in both], tmp_path / "logs", journal, 3, k, saves=saves, **settings)
        live = [run()] if world_size == 1 else run_ranks(world_size, run)
    with servers(longest=SHORTEST) as others:
        again = partial(on_ranks, [s.url for s in others], tmp_path / "logs", journal, 5, k, saves=False, **settings)
        replayed = [again()] if world_size == 1 else run_ranks(world_size, again)
    for before, after in zip(live, replayed, strict=True):
        assert equal_bits(before, after[:3])
    if name == "every prompt":
        check(replayed, k)


def test_without_the_journal_the_clock_decides(tmp_path):
    """Without a journal the two runs differ, so the test above could fail."""
    runs = []
    for longest in (LONGEST, SHORTEST):
        with servers(longest=longest) as both, rank([s.url for s in both], tmp_path, 2) as one:
            runs.append(walk(one, 3))
    assert not equal_bits(*runs)


def test_a_checkpoint_has_the_tokens_in_flight(tmp_path):
    with servers() as both:
        urls = [server.url for server in both]
        with rank(urls, tmp_path, 2) as one:
            before = walk(one, 3)
            checkpoint = saved(one)
            assert sum(len(s) for each in one.collector._source.begun for s in each.samples)
            in_flight = {s.uid: s for each in one.collector._source.begun for s in each.samples}
            assert saved(one)[2][0].keys() == checkpoint[2][0].keys()
        with rank(urls, tmp_path, 2) as one:
            load(one, checkpoint)
            after = walk(one, STEPS)
    check([before + after], 2)
    resumed = {s.uid: s for record in after for s in samples_in(record)}
    continued = [uid for uid in in_flight if uid in resumed and resumed[uid].version <= 2]
    assert continued, "the samples in flight were dropped"


def test_an_evaluation_has_the_newest_weights_and_loses_no_token(tmp_path):
    with servers() as both, rank([server.url for server in both], tmp_path, 2) as one:
        records, generation = [], one.collector.generation
        for step in range(1, STEPS + 1):
            records += walk(one, step)
            requests = generation.requests([each.drawn for each in one.collector._source.begun[:2]])
            for sample in generation.sampler.generate(requests, version=step, step=step):
                assert set(sample.log_probs.tolist()) == {log_prob_of(step)}
    ages = check([records], 2)
    assert max(ages) >= 1


def test_a_server_that_dies_in_flight_costs_its_tokens_only(tmp_path):
    with servers() as both, rank([server.url for server in both], tmp_path, 2) as one:
        records = walk(one, 2)
        both[0].die()
        records += walk(one, STEPS)
        assert one.collector.generation.sampler.metrics()["perf/servers_serving"] == 1
    check([records], 2)


def test_a_rollback_trains_on_nothing_that_was_in_flight(tmp_path):
    with servers() as both, rank([server.url for server in both], tmp_path, 2) as one:
        walk(one, 3)
        position = one.collector.position
        one.collector.invalidate_policy()
        one.collector.skip_to(position)
        [record] = walk(one, 4)
    assert min(sample.uid for sample in samples_in(record)) >= position
    assert record["metrics"]["sampling/token_staleness_max"] == 0


@pytest.mark.parametrize("last", [2, 3])
def test_nothing_is_begun_after_the_last_step(last, tmp_path):
    with servers() as both, rank([server.url for server in both], tmp_path, 1) as one:
        one.driver.total_steps = last
        walk(one, 1)
        wait_for(both, 2 * BATCH * N)
        walk(one, 2)
        assert one.collector.generation.sampler.runs is (last == 3)
