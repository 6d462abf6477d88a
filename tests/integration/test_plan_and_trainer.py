"""The plan and the trainer agree on what a step does: the phases with passes of a model, and the samples of a rank.

Runs one step for a set of cases that covers each value of each setting, or for all combinations with --full-product.
"""

import json
from itertools import product
from pathlib import Path

import torch

from rlhf.assemble.run import build
from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.loop import train
from rlhf.planning.check import plan_of
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.ranks.progress_pipe import ProgressDisplay
from rlhf.ranks.status import StatusWriter
from tests.support.checkpoints import run_ranks
from tests.support.launching import write_sums
from tests.support.sections import prepare

BASE = [
    "recipes=null",
    "model=tiny",
    "trainer.total_training_steps=1",
    "trainer.save_freq=0",
    "trainer.val_before_train=false",
    "trainer.device=cpu",
    "checkpoint.async_save=false",
    "checkpoint.contents=[model]",
    "tracking.progress=plain",
    "data.train_batch_size=4",
    "data.max_prompt_length=40",
    "data.max_response_length=4",
    "rollout.n=2",
]
CHOICES = {
    "estimator": ["algorithm=grpo", "algorithm=ppo", "algorithm=remax"],
    "kl": [
        "actor.use_kl_loss=false algorithm.use_kl_in_reward=false",
        "actor.use_kl_loss=true algorithm.use_kl_in_reward=false",
        "actor.use_kl_loss=false algorithm.use_kl_in_reward=true",
    ],
    "rejection": [
        "",
        "algorithm.rollout_correction.rollout_rs=token_k1 algorithm.rollout_correction.rollout_rs_threshold=9",
    ],
    "mini batches": ["actor.ppo_mini_batch_size=4", "actor.ppo_mini_batch_size=2"],
    "epochs": ["actor.ppo_epochs=1", "actor.ppo_epochs=2"],
    "adapters": ["", "model.lora.enabled=true model.lora.rank=2"],
}
COVERING = [
    (0, 0, 0, 0, 0, 0),
    (0, 0, 1, 0, 0, 0),
    (1, 2, 0, 0, 0, 0),
    (2, 1, 0, 0, 1, 1),
    (0, 1, 0, 1, 0, 0),
]
"""Indices of the choices. The first four need no old log-probs, or need them for a single reason."""
PHASES = {
    "timing_s/ref": "reference",
    "timing_s/old_log_prob": "old log-probs",
    "timing_s/values": "values",
    "timing_s/update_critic": "critic update",
    "timing_s/update_actor": "actor update",
}


def test_a_step_has_the_phases_that_are_planned(request, tmp_path: Path):
    sizes = [range(len(values)) for values in CHOICES.values()]
    cases = list(product(*sizes)) if request.config.getoption("full_product") else COVERING
    (found,) = run_ranks(1, _planned_and_measured, cases, tmp_path, deadline_s=600, join=tmp_path / "join")
    assert len(found) == len(cases)
    assert {case: phases for case, phases in found.items() if phases[0] != phases[1]} == {}
    assert len({frozenset(planned) for planned, _ in found.values()}) >= 4, "the cases differ"


def _planned_and_measured(
    rank: int, cases: list[tuple[int, ...]], folder: Path
) -> dict[str, tuple[set[str], set[str]]]:
    """Return, for the settings of each case, the phases of the plan and of a step."""
    sums, found = write_sums(folder / "sums.jsonl"), {}
    for number, case in enumerate(cases):
        chosen = " ".join(values[index] for values, index in zip(CHOICES.values(), case, strict=True)).split()
        home = [f"data.train_files={sums}", f"trainer.default_local_dir={folder / str(number)}"]
        config = compose_config([*BASE, *chosen, *home], Library.find(None))
        plan = plan_of(config)
        assert plan is not None
        prepare(config)
        status = StatusWriter(config.run_dir, rank)
        components = build(config, torch.device("cpu"), Coordinator(GlooTransport()), status, ProgressDisplay())
        try:
            train(components)
        finally:
            components.run_log.close()
            components.reward.close()
            components.engine.close()
        record = json.loads((config.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
        measured = {phase for timing, phase in PHASES.items() if timing in record}
        found[" ".join(chosen)] = ({phase.name for phase in plan[1].phases} & set(PHASES.values()), measured)
    return found
