"""Writes the files of runs without training: histories, events and samples as a run leaves them."""

import json
import math
import random
from pathlib import Path
from typing import Any

from rlhf.config import Config
from rlhf.config.resolved import to_yaml
from rlhf.storage.layout import EVENTS, HISTORY, RESOLVED, SAMPLES

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&amp;</pre>"


def run_folder(
    folder: Path,
    steps: int,
    *,
    rises: bool = True,
    events: list[dict[str, Any]] | None = None,
    samples: bool = False,
    **values: float,
) -> Path:
    """Write a run of `steps` steps with all usual metrics, whose reward rises or stays; `values` are fixed metrics."""
    folder.mkdir(parents=True)
    config = Config()
    config.trainer.experiment_name, config.trainer.total_training_steps = folder.name, max(steps, 1)
    config.data.train_files = HOSTILE
    (folder / RESOLVED).write_text(to_yaml(config))
    if steps:
        lines = (json.dumps(_record(step, steps, rises) | ({} if step == 0 else values)) for step in range(steps + 1))
        (folder / HISTORY).write_text("".join(f"{line}\n" for line in lines))
    if events is not None:
        (folder / EVENTS).write_text("".join(f"{json.dumps(event)}\n" for event in events))
    if samples:
        (folder / SAMPLES).mkdir()
        for step in (0, steps):
            made = [*(_sample(step, "validation", uid, 0) for uid in range(6))]
            made += [_sample(step, "rollout", uid, number) for uid in range(2) for number in range(4)]
            (folder / SAMPLES / f"step_{step}.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in made))
    return folder


def _record(step: int, steps: int, rises: bool) -> dict[str, Any]:
    noise = random.Random(step)
    level = 0.3 + 0.6 * (1 - math.exp(-3 * step / steps)) * rises
    record: dict[str, Any] = {"step": step}
    if step % max(1, steps // 8) == 0:
        record |= {"val/accuracy": level, "val-core/sums/acc/mean@1": level, "val-core/maths/acc/mean@1": level / 2}
    if step == 0:
        return record
    names = ("actor/kl", "actor/ref_kl", "actor/entropy", "actor/pg_loss", "actor/loss", "actor/grad_norm", "actor/lr")
    names += ("actor/pg_clipfrac", "response_length/clip_ratio", "reward/frac_zero_std", "perf/host_rss_gb")
    names += ("timing_s/gen", "timing_s/update_actor", "timing_s/reward", "sampling/staleness_mean")
    record |= {name: noise.random() * 0.2 + 0.01 for name in names}
    record |= {"reward/mean": level + noise.gauss(0, 0.05), "reward/min": 0.0, "reward/max": 1.0}
    record |= {"response_length/mean": 100 + noise.random() * 50, "response_length/max": 200 + noise.random() * 56}
    return record | {"timing_s/step": 0.7, "perf/tokens_per_second": 9000 + noise.random() * 2000}


def _sample(step: int, split: str, uid: int, number: int) -> dict[str, Any]:
    right = step > 0 and uid % 3 != 2
    return {
        "split": split,
        "uid": uid,
        "sample": number,
        "data_source": "sums",
        "prompt": f"Prompt {uid} {HOSTILE}",
        "response": f"Response {step} {HOSTILE}",
        "ground_truth": HOSTILE,
        "score": float(right),
        "advantage": None if split == "validation" else 0.5,
        "length": 7,
        "finish_reason": "stop",
    }
