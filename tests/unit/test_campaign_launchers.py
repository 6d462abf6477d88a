"""Under each launcher, the campaign kills processes that exist there."""

from pathlib import Path
from typing import Any

from tests.faults.campaign import plan_kills
from tests.faults.launchers import Local, Ray
from tests.faults.profiles import PROFILES


def test_a_plan_for_ray_hits_ranks_workers_a_node_and_the_command():
    nobody: Any = None
    plan = plan_kills(12, 1, 2, 40, PROFILES["grpo"])
    launcher = Ray(nobody, Path())
    kills = launcher.victims(plan)
    victims = {kill["victim"] for kill in kills}
    assert victims == {"0", "1", "worker_0", "worker_1", "node", "command"}
    assert [kill["window"] for kill in kills] == [kill["window"] for kill in plan]
    assert Local().victims(plan) == plan
    assert launcher.settings(2, []) == ["trainer.nproc=1", "trainer.nnodes=2", "backend.dp_replicate=2"]
    assert launcher.settings(2, ["backend=deepspeed"]) == ["trainer.nproc=1", "trainer.nnodes=2"]
