"""Checkpoints: what each `checkpoint.contents` saves, an asynchronous save, and runs that are killed."""

import itertools
import json
import shutil
import subprocess
import time
from pathlib import Path

from benchmarks.gpu_parts.listener import listening
from benchmarks.gpu_parts.place import QWEN_1_5B, Figures, Place

CONTENTS = ("model", "optimizer", "extra", "hf_model")
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 1024, "tie_word_embeddings": True}
WITHOUT_BITS = ("timing_s/", "perf/", "wall_time", "time")
GIB = 1 << 30


def contents(place: Place) -> Figures:
    """Save each subset of `checkpoint.contents`; check saved parts, each GPU's generator and the reference's EMA."""
    import torch
    from safetensors import safe_open

    found: Figures = {}
    model = place.model("small", SMALL)
    subsets = [chosen for n in range(1, 5) for chosen in itertools.combinations(CONTENTS, n)]
    for chosen in subsets[:: 7 if place.rehearsal else 1]:
        name = "+".join(chosen)
        more = [f"checkpoint.contents=[{','.join(chosen)}]", "trainer.save_freq=1", "trainer.total_training_steps=2"]
        more += ["actor.use_kl_loss=true", "ref.update_freq=2", "ref.alpha=0.5", "data.train_batch_size=8"]
        more += ["actor.ppo_mini_batch_size=8", "data.max_response_length=16"]
        if not {"model", "hf_model"} & set(chosen):
            more.append("trainer.resume_mode=disable")
        place.train(place.overrides(model, name, *more))
        saved = place.folder / "rlhf" / name / "global_step_2"
        parts = sorted(part.name for part in (saved / "actor").iterdir()) if (saved / "actor").exists() else []
        expected = sorted("huggingface" if part == "hf_model" else part for part in chosen)
        if parts != expected:
            place.problems.append(f"contents [{name}]: actor has {parts}, not {expected}")
        has_ref = (saved / "ref").exists()
        if has_ref != bool({"model", "hf_model"} & set(chosen)):
            place.problems.append(
                f"contents [{name}]: the reference's EMA weights are {'' if has_ref else 'not '}saved"
            )
        devices = set()
        for file in saved.glob("rng/*"):
            with safe_open(file, "pt") as stored:
                devices |= {key for key in stored.keys() if key.startswith("torch.cuda")}  # noqa: SIM118
        wanted = {f"torch.cuda.{i}" for i in range(torch.cuda.device_count())} if "extra" in chosen else set()
        if devices != wanted:
            text = f"generator states of {sorted(devices)}, not of {sorted(wanted)}"
            place.problems.append(f"contents [{name}]: {text}")
        found[name] = sorted(part.name for part in saved.iterdir())
    return found


def save(place: Place) -> Figures:
    """Save a random 1.5B policy asynchronously; measure the training wait, host memory and a raw copy."""
    more = ("trainer.save_freq=1", "checkpoint.max_to_keep=1", "trainer.total_training_steps=4")
    records = place.train(place.overrides(place.model("1.5b", QWEN_1_5B), "save", *more))
    saves = [record for record in records if record.get("perf/save_seconds")]
    last = saves[-1]
    checkpoint = max((place.folder / "rlhf" / "save").glob("global_step_*"), key=lambda path: path.stat().st_mtime)
    started = time.perf_counter()
    shutil.copytree(checkpoint, place.folder / "copy")
    subprocess.run(["sync"], check=True)
    copy_s = time.perf_counter() - started
    shutil.rmtree(place.folder / "copy")
    return {
        "seconds that training waited": [record.get("timing_s/save_checkpoint") for record in records[1:]],
        "seconds of a save": last["perf/save_seconds"],
        "GiB of a save": last["perf/save_bytes"] / GIB,
        "seconds of cp and sync": copy_s,
        "host GiB of the rank": last["perf/host_rss_gb"],
    }


def kills(place: Place) -> Figures:
    """Kill deterministic runs in a generation and in a save; check for equal bits and for GPU memory still in use."""
    model = place.model("small", SMALL)
    more = ["trainer.deterministic=true", "trainer.save_freq=1", "trainer.restart_backoff_s=0.1"]
    more += ["data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "data.max_response_length=16"]
    before = _used(place)
    whole = place.train(place.overrides(model, "whole", *more))
    figures: Figures = {}
    for event in ("rollout.before", "commit.file_write"):
        name = event.replace(".", "_")
        folder = place.folder / name
        folder.mkdir()
        killed = place.train(place.overrides(model, name, *more), listening(folder, event))
        if not (folder / f"killed-{event}").exists():
            place.problems.append(f"{event}: the run was not killed")
        different = [_bits(a) for a in whole] != [_bits(b) for b in killed]
        files = _different_files(place.folder / "rlhf" / "whole", place.folder / "rlhf" / name)
        if different or files:
            place.problems.append(f"{event}: the metrics differ: {different}; files that differ: {files}")
        figures[event] = "equal" if not different and not files else "different"
    left = _used(place) - before
    figures["MiB of the GPU still in use"] = left
    place.goal(left < 64, f"{left:.0f} MiB of the GPU are still in use after all runs have ended")
    return figures


def _bits(record: Figures) -> Figures:
    return {name: value for name, value in record.items() if not name.startswith(WITHOUT_BITS)}


def _different_files(one: Path, other: Path) -> list[str]:
    """Return the tensor files of the last checkpoint whose bytes differ."""
    last = max(one.glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2])).name
    files = [path.relative_to(one) for path in sorted((one / last).rglob("*.safetensors"))]
    if not files:
        raise RuntimeError(f"{one / last} has no tensor files: {json.dumps([p.name for p in (one / last).iterdir()])}")
    return [str(path) for path in files if (one / path).read_bytes() != (other / path).read_bytes()]


def _used(place: Place) -> float:
    """Return the used memory of the first GPU in MiB; 0 on a CPU."""
    if place.device == "cpu":
        return 0.0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0])
