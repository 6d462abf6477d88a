"""Builds a collector over the bundled policy, and computes its batches the plain way, one prompt at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.checkpoint.state.driver_state import DriverState
from rlhf.config import (
    DataConfig,
    FilterGroupsConfig,
    OverlongBufferConfig,
    RewardConfig,
    RolloutConfig,
)
from rlhf.config.derived import staleness_bound
from rlhf.data import DrawnPrompt, PromptSet, PromptStream
from rlhf.data.items import Row
from rlhf.data.tokens import LengthLimit
from rlhf.experience.collector import Collector
from rlhf.experience.generation import Generation
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.experience.prompt_share import PromptShare
from rlhf.ranks import dims
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.reward import Reward, RewardItem, Score
from rlhf.reward.failures import FailurePolicy
from rlhf.reward.weighted import Term
from rlhf.rollout import Request, Sample, SamplingParams
from rlhf.rollout.embedded import build_embedded_engine
from tests.support.launching import TINY_POLICY, question

BATCH, N, LONGEST, SEED, WEIGHT = 8, 4, 5, 5, 2.0
CPU = torch.device("cpu")
UNFILTERED, FILTERED = FilterGroupsConfig(), FilterGroupsConfig(enable=True)
OVERLONG = OverlongBufferConfig(enable=True, len=3, penalty_factor=0.6)
DEFAULTS: dict[str, Any] = {
    "filter_groups": FILTERED,
    "overlong": OverlongBufferConfig(),
    "greedy": False,
    "drawn": 7,
    "answers": True,
    "engine": None,
    "reward": None,
    "journal": None,
    "async_steps": 0,
    "max_staleness": None,
    "longest": LONGEST,
    "rows": 32,
    "batch": BATCH,
    "n": N,
    "sampling": {},
}


class Sums:
    """Scores 1 for the right sum plus 0.5 for an odd first digit, or 0 without a reference answer.

    A response that is not a number counts as failed, and one that ends in 9 as timed out.
    """

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        return [self.judge(item.response, item.ground_truth) for item in items]

    def judge(self, text: str, truth: str) -> Score:
        if not truth:
            return Score(0.0)
        failed = not text.isdigit()
        score = float(text == truth) + 0.5 * (not failed and int(text[0]) % 2)
        return Score(score, timed_out=text.endswith("9"), failed=failed)

    def close(self) -> None:
        """Do nothing."""


def tiny() -> tuple[Any, Any]:
    """Return the bundled policy and its tokenizer."""
    return _tiny(torch.get_default_dtype())


@cache
def _tiny(of_buffers: torch.dtype) -> tuple[Any, Any]:
    """Load the policy; its buffers have torch's default type, which `in_float64` changes."""
    model = AutoModelForCausalLM.from_pretrained(TINY_POLICY, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(TINY_POLICY)


class DriftingPolicy:
    """An actor whose weights are a function of its steps."""

    def __init__(self, driver: DriverState) -> None:
        self._driver = driver

    def full_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tiny()[0].named_parameters():
            yield name, (tensor.detach() * (1 - 0.02 * self._driver.step)).to(dtype)


def build(driver: DriverState, coordinator: Coordinator, **settings: Any) -> Collector:
    """Build a run's collector with the `settings` of a scenario. `engine` may be a `BackgroundEngine`."""
    chosen = DEFAULTS | settings
    model, tokenizer = tiny()
    rows = []
    for i in range(300):
        a, b = 10 + i % 83, 10 + (11 * i) % 79
        messages = [{"role": "user", "content": question(a, b)}]
        rows.append(Row(i, f"row {i}", messages, "sums", str(a + b) if chosen["answers"] else "", {}))
    data = DataConfig(train_batch_size=chosen["batch"], gen_batch_size=chosen["drawn"])
    reward = RewardConfig(overlong_buffer=chosen["overlong"])
    prompts = PromptSet.in_memory(rows, tokenizer, LengthLimit(128, "error", "data.train_files"))
    stream = PromptStream(prompts, seed=3, shuffle=True)
    background = chosen["engine"]
    engine = background or build_embedded_engine(model, tokenizer, RolloutConfig(max_num_seqs=chosen["rows"]))
    generation = Generation(
        PolicySampler(engine, DriftingPolicy(driver), SEED, background=background is not None),  # type: ignore[arg-type]
        SamplingParams(temperature=1.4, max_tokens=chosen["longest"], **chosen["sampling"]),
        chosen["n"],
        chosen["greedy"],
        chosen["reward"] or Reward([Term("sums", WEIGHT, Sums(), FailurePolicy("sums", reward))]),
        chosen["overlong"],
        tokenizer,
        coordinator,
        chosen["batch"],
        chosen["journal"],
    )
    return Collector(
        data,
        chosen["filter_groups"],
        reward,
        chosen["async_steps"],
        staleness_bound(chosen["async_steps"], chosen["max_staleness"]),
        PromptShare(stream, chosen["batch"], dims.data()),
        generation,
        CPU,
        ends_with=driver.ends_with,
    )


def new_driver() -> DriverState:
    return DriverState("run", total_steps=99, steps_per_epoch=1.0)


def plain_way(steps: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the expected batch and metrics of every step, over all ranks."""
    driver = new_driver()
    parts = build(driver, Coordinator(GlooTransport()), **settings)
    chosen = DEFAULTS | settings
    filters, drawn = chosen["filter_groups"], chosen["drawn"] if chosen["filter_groups"].enable else BATCH
    bound = staleness_bound(chosen["async_steps"], chosen["max_staleness"])
    waiting: list[dict[str, Any]] = []
    records = []
    for step in range(1, steps + 1):
        rounds, seen, without, carried = 0, [], [], len(waiting)
        while len(waiting) < BATCH and rounds < filters.max_num_gen_batches:
            rounds += 1
            for each in parts.prompts.next(drawn):
                group = plain_group(parts, chosen, each, driver.step, step)
                seen.append(group)
                useful = len(set(group[filters.metric])) > 1 or not filters.enable
                (waiting if useful else without).append(group)
        trained, left = waiting[:BATCH], waiting[BATCH:]
        missing = BATCH - len(trained)
        # At the next step the policy will have done one more step.
        waiting = [group for group in left if driver.step + 1 - group["version"] <= bound]
        trained = sorted(trained + without[len(without) - missing :], key=lambda group: group["uid"])
        every = [score for group in trained for score in group["seq_reward"]]
        metrics = {
            "reward/mean": sum(every) / len(every),
            "reward/sums": sum(v for group in trained for v in group["acc"]) / len(every),
            "reward/timeouts": sum(group["timeouts"] for group in seen),
            "reward/failures": sum(group["failures"] for group in seen),
            "data/epoch": 0,
        }
        if chosen["overlong"].enable:
            metrics["reward/overlong"] = sum(v for group in trained for v in group["penalties"]) / len(every)
        if filters.enable:
            ages = [driver.step - group["version"] for group in trained]
            metrics |= {
                "sampling/gen_batches": rounds,
                "sampling/groups_generated": len(seen),
                "sampling/groups_dropped": len(without),
                "sampling/groups_carried": len(waiting),
                "sampling/groups_expired": len(left) - len(waiting),
                "sampling/carried_share": min(carried, BATCH) / BATCH,
                "sampling/groups_filled": missing,
                "sampling/staleness_max": max(ages),
                "sampling/staleness_mean": sum(ages) / BATCH,
            }
            if seen:
                scores = [score for group in seen for score in group["seq_reward"]]
                metrics["sampling/reward_mean"] = sum(scores) / len(scores)
        tokens = sum(len(group["prompt"]) + len(ids) for group in trained for ids in group["responses"])
        records.append({"groups": trained, "metrics": metrics, "tokens": tokens})
        driver.finish_step(tokens, len(every), 0.0, 0.0)
    return records


def plain_group(
    parts: Collector, chosen: dict[str, Any], drawn: DrawnPrompt, version: int, step: int
) -> dict[str, Any]:
    """Sample and score one prompt alone."""

    def sampled(params: SamplingParams, n: int) -> list[Sample]:
        requests = [Request(drawn.uid, drawn.prompt.token_ids, params, number) for number in range(n)]
        return parts.generation.sampler.generate(requests, version=version, step=step)

    def score(sample: Sample) -> Score:
        text = parts.generation.tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=True)
        return Sums().judge(text, drawn.prompt.ground_truth)

    def penalty(sample: Sample) -> float:
        if not chosen["overlong"].enable:
            return 0.0
        # Lengths up to 5 - 3 have no punishment; a length of 5 costs 0.6.
        return -0.2 * max(0, len(sample) - 2)

    samples = sampled(parts.generation.params, chosen["n"])
    scores = [score(sample) for sample in samples]
    greedy = sampled(replace(parts.generation.params, temperature=0.0), 1) if chosen["greedy"] else []
    counted = scores + [score(sample) for sample in greedy]
    return {
        "uid": drawn.uid,
        "version": version,
        "prompt": drawn.prompt.token_ids,
        "responses": [sample.token_ids.tolist() for sample in samples],
        "log_probs": [sample.log_probs.tolist() for sample in samples],
        "acc": [s.score for s in scores],
        "penalties": [penalty(sample) for sample in samples],
        "seq_reward": [WEIGHT * scored.score + penalty(s) for scored, s in zip(scores, samples, strict=True)],
        "baseline": WEIGHT * score(greedy[0]).score + penalty(greedy[0]) if greedy else None,
        "timeouts": sum(s.timed_out for s in counted),
        "failures": sum(s.failed for s in counted),
    }


def tensors_of_ranks(collector: Collector, coordinator: Coordinator) -> list[dict[str, Tensor]]:
    """Return copies of all ranks' tensors for a checkpoint. Collective."""
    own = {name: tensor.contiguous() for name, tensor in collector.tensors().items()}
    return [load(part) for part in coordinator.all_gather(save(own))]
