"""Lists the checks of one node for a run's settings, and runs them."""

import os
from collections.abc import Iterator
from functools import partial

from rlhf.config import Config
from rlhf.config.known_settings import SETTINGS
from rlhf.diagnosis.check_result import Check, CheckResult, Outcome, ok, run_checks, warning
from rlhf.diagnosis.confinement_check import check_confinement, confinements
from rlhf.diagnosis.disk_checks import check_disk
from rlhf.diagnosis.gpu_checks import check_devices
from rlhf.diagnosis.memory_checks import check_host_memory, check_open_files, check_shared_memory
from rlhf.diagnosis.remote_check import check_remote
from rlhf.diagnosis.version_checks import check_versions, used_extras
from rlhf.planning.check import models_of, target_of
from rlhf.planning.device_defaults import server_gpus
from rlhf.planning.devices import count_gpus
from rlhf.planning.memory_plan import Plan, memory_plan
from rlhf.planning.plan_text import plan_line
from rlhf.ranks.world import LOCAL_WORLD_SIZE


def check_node(
    config: Config, node: str, deadline_s: float, *, share: float = 1.0, quick: bool = False
) -> list[CheckResult]:
    """Run the checks of this node, and return their results. Takes at most twice `deadline_s` seconds.

    Args:
        node: name of this node in the results.
        share: fraction of each checkpoint that this node's disk stores.
        quick: leave out checks that import torch, use a network or start processes, because a restart waits for them.
    """
    plans: list[Plan | None] = []
    results = run_checks({"plan": lambda: _check_plan(config, plans, quick=quick)}, node, deadline_s)
    plan = plans[0] if plans else None
    return results + run_checks(_checks(config, plan, share, quick=quick), node, deadline_s)


def _check_plan(config: Config, plans: list[Plan | None], *, quick: bool) -> Iterator[Outcome]:
    """Compute the memory plan, append it to `plans`, and check that the run fits."""
    models = models_of(config, from_config=not quick)
    plan = None if models is None else memory_plan(config, models, target_of(config))
    plans.append(plan)
    if plan is None:
        yield ok("the shapes of the models are unknown before they load")
    elif plan.fits:
        yield ok(plan_line(plan))
    else:
        yield warning(f"the run may not fit: {plan_line(plan)}. python -m rlhf.plan shows what makes it fit.")


def _checks(config: Config, plan: Plan | None, share: float, *, quick: bool) -> dict[str, Check]:
    t, local = config.trainer, int(os.environ.get(LOCAL_WORLD_SIZE, config.trainer.ranks))
    servers = server_gpus(lambda key: SETTINGS[key].value(config))
    gpus = count_gpus()
    own_gpu = gpus == 1 and LOCAL_WORLD_SIZE in os.environ
    size = None if plan is None else plan.checkpoint
    used = used_extras(t, config.backend, config.rollout, config.checkpoint)
    checks: dict[str, Check] = {
        "devices": partial(check_devices, t, servers, own_gpu=own_gpu, running=quick and servers > 0),
        "versions": partial(check_versions, used),
        "host memory": partial(check_host_memory, plan, local),
        "shared memory": partial(check_shared_memory, config, plan, gpus),
        "open files": check_open_files,
        "disk": partial(check_disk, config.run_dir, size, share, config.checkpoint.timeout_s),
    }
    if not quick:
        checks["remote"] = partial(check_remote, config.run_dir, t, config.checkpoint)
        checks["confinement"] = partial(check_confinement, confinements(config.reward, config.env))
    return checks
