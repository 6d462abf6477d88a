"""Runs GRPO steps with TRL's GRPOTrainer for `benchmarks.step`. Its Python has TRL, but not this project."""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from rewards import of_text
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Lines(TrainerCallback):
    """Writes one line to `path` after each step, on the first rank."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def on_step_end(self, args, state, control, **kwargs) -> None:  # type: ignore[no-untyped-def]
        if state.is_world_process_zero:
            with self._path.open("a") as file:
                file.write("step\n")


def reward(completions: list[str], **columns: object) -> list[float]:
    """Return `of_text` of each response with the signature of TRL's reward functions."""
    return [of_text(text) for text in completions]


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    samples = spec["prompts_per_step"] * spec["n"] // spec["ranks"]
    config = GRPOConfig(
        output_dir=spec["folder"],
        use_cpu=True,
        max_steps=spec["steps"],
        per_device_train_batch_size=spec["micro_batch"],
        gradient_accumulation_steps=samples // spec["micro_batch"],
        num_generations=spec["n"],
        max_completion_length=spec["max_tokens"],
        learning_rate=spec["lr"],
        beta=0.0,
        gradient_checkpointing=False,
        bf16=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        ddp_backend="gloo" if spec["ranks"] > 1 else None,
        model_init_kwargs={"dtype": "float32"},
    )
    rows = [json.loads(line) for line in Path(spec["prompts"]).read_text().splitlines()]
    trainer = GRPOTrainer(
        model=spec["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Lines(spec["lines"])],
    )
    trainer.train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
