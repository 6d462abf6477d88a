"""Places a run on as many machines of a Ray cluster as have room: `launcher.min_nodes` to `trainer.nnodes`."""

import time
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

_PLACE_S = 2.0
_FREE_S = 10.0
"""Seconds until the machines of a stopped attempt are free."""


def placeable(resources: Mapping[str, float], workers: int, wait_s: float = _PLACE_S) -> bool:
    """Return whether Ray can place so many workers within `wait_s` seconds. Reserves their room for a moment."""
    from ray.util import placement_group, remove_placement_group

    group = placement_group([dict(resources)] * workers, strategy="SPREAD")
    try:
        return bool(group.wait(wait_s))
    finally:
        remove_placement_group(group)


def _fitting(resources: Mapping[str, float], least: int, most: int) -> int:
    """Return the largest number of workers that Ray can place, from `least` to `most`; `least` if even it is too many.

    Ray then waits for the machines of `least`, and ends the run if they do not come.
    """
    if most <= least or placeable(resources, most, _FREE_S):
        return most
    return least + bisect_left(range(least + 1, most), True, key=lambda workers: not placeable(resources, workers))


def elastic_trainer(**settings: Any) -> Any:
    """Return Ray's trainer with `settings`, but other decisions on the number of workers.

    Ray's own policy kills running ranks when a machine returns, so their work since the last save is lost. It also
    counts machines that other programs use, and waits for them until the run ends.
    """
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback
    from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, NoopDecision
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    least = settings["scaling_config"].min_workers

    class FreeMachines(WorkerGroupCallback):
        def before_worker_group_start(self, worker_group_context: Any) -> None:
            # The policy decides before Ray stops the earlier attempt, whose machines are not free then. Ray calls this
            # after the stop, and reads the number of its frozen dataclass afterwards.
            context = worker_group_context
            workers = _fitting(context.resources_per_worker, least, context.num_workers)
            object.__setattr__(context, "num_workers", workers)

    class NoResize(ElasticScalingPolicy):
        def make_decision_for_running_worker_group(self, *state: Any, **more_state: Any) -> Any:
            self._maybe_send_resource_request()
            return NoopDecision()

        def _get_reserved_resources(self) -> Any:
            if time.monotonic() - self._latest_reserved_resources_query_time >= self.GET_RESERVED_RESOURCES_INTERVAL_S:
                # Ray would count a lost machine, and not one that is back, for up to 20 s.
                self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=True)
            return super()._get_reserved_resources()

    class ElasticTrainer(DataParallelTrainer):
        def _initialize_and_run_controller(self, **parts: Any) -> Any:
            parts["scaling_policy"] = NoResize(self.scaling_config)
            parts["callbacks"] = [*parts["callbacks"], FreeMachines()]
            return super()._initialize_and_run_controller(**parts)

    return ElasticTrainer(**settings)
