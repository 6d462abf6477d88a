"""Provides what all parts share: machine, model sizes, training runs, and reasons why a part failed or was skipped."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
QWEN_HALF_B = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
QWEN_1_5B = QWEN_HALF_B | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}
QWEN_7B = QWEN_HALF_B | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "tie_word_embeddings": False,
}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1024,
}
SAMPLE_S = 0.1


class Skipped(Exception):
    """A part cannot run here; the message gives the reason, such as a missing package."""


@dataclass
class Place:
    """Where a part runs. In a rehearsal, on a CPU, models are tiny, and the figures mean nothing."""

    folder: Path
    rehearsal: bool
    problems: list[str] = field(default_factory=list)
    """Goals that the part missed."""

    @property
    def device(self) -> str:
        return "cpu" if self.rehearsal else "cuda"

    def sizes(self, real: dict[str, Any]) -> dict[str, Any]:
        """Return the sizes of a model: `real`, or tiny ones in a rehearsal."""
        return real | TINY if self.rehearsal else real

    def goal(self, reached: bool, text: str) -> None:
        """Record the missed goal `text` unless it is `reached`. A rehearsal records no goals."""
        if not reached and not self.rehearsal:
            self.problems.append(text)

    def model(self, name: str, real: dict[str, Any]) -> Path:
        """Return a folder with a random Qwen2 of the sizes `real` in bfloat16 and the bundled tokenizer."""
        folder = self.folder / name
        if not folder.exists():
            import torch
            from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

            from rlhf.models.tiny import FOLDER

            tokenizer = AutoTokenizer.from_pretrained(FOLDER)
            config = Qwen2Config(
                **self.sizes(real), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
            )
            torch.manual_seed(1)
            with torch.device(self.device):
                model = Qwen2ForCausalLM(config).bfloat16()
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folder

    def overrides(self, model: Path, name: str, *more: str) -> list[str]:
        """Return the overrides of a run of three steps on word problems with GSM8K's columns and lengths."""
        rows = self.folder / "gsm8k.jsonl"
        if not rows.exists():
            story = " ".join(["Tom counts his apples and the apples of his friends."] * 6)
            problems = [{"question": f"{story} {i} + {i}?", "answer": f"He adds. #### {2 * i}"} for i in range(256)]
            rows.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
        short = ["data.max_prompt_length=192", "data.max_response_length=32", "data.train_batch_size=8"]
        short += ["actor.ppo_mini_batch_size=8", "rollout.n=2", "actor.ppo_max_token_len_per_gpu=2048"]
        return [
            *("recipes=gsm8k_qwen_0.5b", f"model.path={model}", f"data.train_files={rows}", "data.val_files=null"),
            *(f"trainer.default_local_dir={self.folder}", f"trainer.experiment_name={name}", "trainer.nproc=1"),
            *("trainer.total_training_steps=3", "trainer.save_freq=0", "trainer.val_before_train=false"),
            *("rollout=embedded", "rollout.ignore_eos=true", f"trainer.device={self.device}"),
            *(short if self.rehearsal else []),
            *more,
        ]

    def train(self, overrides: Sequence[str], environ: Mapping[str, str] | None = None) -> list[Figures]:
        """Run `python -m rlhf.train` and return its metric records. Raise RuntimeError with its output if it fails."""
        name = next(text.partition("=")[2] for text in overrides if text.startswith("trainer.experiment_name="))
        done = subprocess.run(
            [sys.executable, "-m", "rlhf.train", *overrides],
            env=os.environ | (environ or {}),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"the run {name} ended with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
        lines = (self.folder / "rlhf" / name / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record.get("step")]


def need(*packages: str) -> None:
    """Raise Skipped if a package is missing."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise Skipped(f"needs {', '.join(missing)}, which is not installed")


@contextmanager
def watched(device: str) -> Iterator[dict[str, list[float]]]:
    """Sample nvidia-smi ten times a second: `busy` is the percentage of time with a kernel, `memory` is in MiB."""
    found: dict[str, list[float]] = {"busy": [], "memory": []}
    if device == "cpu":
        yield found
        return
    done = threading.Event()
    query = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            first = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
            busy, memory = map(float, first.split(","))
            found["busy"].append(busy)
            found["memory"].append(memory)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def seconds_of(device: str, function: Any) -> float:
    """Return the wall seconds of a call, including all GPU work that it starts."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
