"""On how many machines launcher=ray starts an attempt: a stand-in for Ray's controller calls our parts in its order."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.launch.ray.elastic import elastic_trainer

FREES_S = 5.0
"""Seconds until machines of a stopped attempt are free."""


class Machines:
    """A cluster of machines with room for one worker each."""

    def __init__(self) -> None:
        self.total = self.others = self.ours = self.leaving = 0

    def placement_group(self, bundles: list[Any], strategy: str) -> Any:
        return SimpleNamespace(wait=lambda seconds: self.has_room(len(bundles), seconds))

    def has_room(self, workers: int, seconds: float) -> bool:
        if seconds >= FREES_S:
            self.leaving = 0
        return workers <= self.total - self.others - self.ours - self.leaving


@dataclass(frozen=True)
class Context:
    """What Ray starts."""

    num_workers: int
    resources_per_worker: dict[str, float]


@dataclass
class Resize:
    """A decision of Ray's policy."""

    num_workers: int
    resources_per_worker: dict[str, float]


class Policy:
    """Ray's own policy, which also counts machines that other programs use."""

    cluster: Machines

    def __init__(self, scaling_config: Any) -> None:
        self.scaling_config = scaling_config

    def make_decision_for_non_running_worker_group(self) -> Resize:
        return Resize(min(self.cluster.total, self.scaling_config.max_workers), {"CPU": 1.0})


class Controller:
    """Ray's trainer and controller: it decides, stops the earlier attempt, and starts the next one."""

    def __init__(self, scaling_config: Any) -> None:
        self.scaling_config = scaling_config
        self._initialize_and_run_controller(scaling_policy=None, callbacks=[])

    def _initialize_and_run_controller(self, scaling_policy: Any, callbacks: list[Any]) -> None:
        self._policy, self._callbacks = scaling_policy, callbacks

    def start(self, cluster: Machines) -> int:
        """Return the number of workers for which Ray waits."""
        decision = self._policy.make_decision_for_non_running_worker_group()
        cluster.ours, cluster.leaving = 0, cluster.ours
        context = Context(decision.num_workers, decision.resources_per_worker)
        for callback in self._callbacks:
            callback.before_worker_group_start(context)
        cluster.ours, cluster.leaving = context.num_workers, 0
        return context.num_workers


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Machines:
    machines = Machines()
    execution = "ray.train.v2._internal.execution"
    modules: dict[str, dict[str, Any]] = {
        "ray.util": {"placement_group": machines.placement_group, "remove_placement_group": lambda group: None},
        f"{execution}.callback": {"WorkerGroupCallback": object},
        f"{execution}.scaling_policy": {"ElasticScalingPolicy": Policy, "NoopDecision": type("Noop", (), {})},
        "ray.train.v2.api.data_parallel_trainer": {"DataParallelTrainer": Controller},
    }
    for name, parts in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**parts))
    monkeypatch.setattr(Policy, "cluster", machines, raising=False)
    return machines


@pytest.mark.parametrize(
    ("attempts", "started"),
    [
        ([(3, 0), (3, 0)], [3, 3]),
        ([(3, 1), (3, 1), (3, 1)], [2, 2, 2]),
        ([(3, 1), (3, 0)], [2, 3]),
        ([(3, 1), (2, 1)], [2, 1]),  # one of the two machines was lost
        ([(5, 0), (5, 3), (5, 2), (7, 3)], [4, 2, 3, 4]),
        ([(2, 2)], [1]),  # Ray waits for the smallest number
    ],
)
def test_every_attempt_starts_on_the_machines_that_other_programs_leave(cluster, attempts, started):
    trainer = elastic_trainer(scaling_config=SimpleNamespace(min_workers=1, max_workers=4))
    for (cluster.total, cluster.others), number in zip(attempts, started, strict=True):
        assert trainer.start(cluster) == number
