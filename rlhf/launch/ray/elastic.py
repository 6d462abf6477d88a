"""Places a run on as many machines of a Ray cluster as have room: `launcher.min_nodes` to `trainer.nnodes`."""

import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

_PLACE_S = 2.0


def placeable(resources: Mapping[str, float], workers: int) -> bool:
    """Return whether Ray can place so many workers now. Reserves their room for a moment."""
    from ray.util import placement_group, remove_placement_group

    group = placement_group([dict(resources)] * workers, strategy="SPREAD")
    try:
        return bool(group.wait(_PLACE_S))
    finally:
        remove_placement_group(group)


def elastic_trainer(**settings: Any) -> Any:
    """Return Ray's trainer with `settings`, but another policy for the number of workers.

    Ray's own policy kills running ranks when a machine returns, so their work since the last save is lost. It also
    counts machines that other programs use, and waits for them until the run ends.
    """
    from ray.train.v2._internal.execution.controller.state import RunningState
    from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, NoopDecision
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    class FreeMachines(ElasticScalingPolicy):
        has_group = False
        """Whether an earlier group still has its machines. Ray frees them after the decision."""

        def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
            self.has_group = self.has_group or isinstance(current_state, RunningState)

        def make_decision_for_non_running_worker_group(self) -> Any:
            decision = super().make_decision_for_non_running_worker_group()
            if isinstance(decision, NoopDecision):
                return decision
            if self.has_group:  # if the machines are not enough, the start fails, and the next decision counts them
                self.has_group = False
                return decision
            # If not even the smallest number fits, Ray waits for its machines, and then ends the run.
            numbers = range(self.scaling_config.min_workers + 1, decision.num_workers + 1)
            fitting = bisect_left(numbers, True, key=lambda n: not placeable(decision.resources_per_worker, n))
            return replace(decision, num_workers=self.scaling_config.min_workers + fitting)

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
            own = {**parts, "scaling_policy": FreeMachines(self.scaling_config)}
            return super()._initialize_and_run_controller(**own)

    return ElasticTrainer(**settings)
