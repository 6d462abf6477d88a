"""Saves checkpoints of models and peft adapters with transformers' Trainer, in an environment that has both.

    python trainer_saves.py MODELS TARGET CASE...

A case is `MODEL/full`, or `MODEL/KIND` with a KIND of ADAPTERS. `TARGET/CASE/checkpoint-2` is the Trainer's checkpoint
after two steps. `truth.pt` beside it has the `tensors` (adapters merged by peft) and the `moments` by parameter.
"""

import os
import sys
import warnings
from typing import Any

import torch

warnings.simplefilter("ignore")
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments  # noqa: E402

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": "all-linear"},
    "patterns": {
        "target_modules": ["q_proj", "down_proj", "embed_tokens"],
        "use_rslora": True,
        "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 5},
        "modules_to_save": ["lm_head"],
    },
    "conv1d": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
}


def make(models: str, target: str, case: str) -> None:
    name, kind = case.split("/")
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(f"{models}/{name}", dtype=torch.float32)
    if kind != "full":
        config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **ADAPTERS[kind])
        model = get_peft_model(model, config)
    rows = [{"input_ids": torch.arange(i, i + 8), "labels": torch.arange(i, i + 8)} for i in range(8)]
    arguments = TrainingArguments(
        output_dir=f"{target}/{case}",
        max_steps=2,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        weight_decay=0.01,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(f"{models}/{name}")
    trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    state = trainer.optimizer.state
    moments = {n: dict(state[p]) for n, p in model.named_parameters() if p in state and kind == "full"}
    if kind != "full":
        model = model.merge_and_unload()
    tensors = {n: tensor.clone() for n, tensor in model.state_dict().items()}
    torch.save({"tensors": tensors, "moments": moments}, f"{target}/{case}/truth.pt")


if __name__ == "__main__":
    models, target, *cases = sys.argv[1:]
    for case in cases:
        make(models, target, case)
    sys.stdout.flush()
    os._exit(0)
