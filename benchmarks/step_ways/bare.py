"""Runs GRPO steps in a bare loop of torch and transformers' `generate`, as a lower bound for `benchmarks.step`.

bare.py SPEC.json writes one line to `spec["lines"]` after each step. The loop has no recovery, metrics or correction.
"""

import json
import os
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rewards import of_text
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text())
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.set_num_threads(spec["threads"])
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(rank)
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec["lr"])
    texts = [json.loads(line)["prompt"] for line in Path(spec["prompts"]).read_text().splitlines()]
    order = random.Random(0)
    for _ in range(spec["steps"]):
        mine = order.sample(texts, spec["prompts_per_step"])[rank::ranks]
        step(wrapped, model, optimizer, tokenizer, mine, spec)
        if rank == 0:
            with Path(spec["lines"]).open("a") as file:
                file.write("step\n")
    if ranks > 1:
        dist.destroy_process_group()
    return 0


def step(wrapped, model, optimizer, tokenizer, texts, spec) -> None:  # type: ignore[no-untyped-def]
    """Generate `n` samples of each text, score them, and take one optimizer step with the group's advantages."""
    prompts = tokenizer([text for text in texts for _ in range(spec["n"])], return_tensors="pt", padding=True)
    width = prompts["input_ids"].shape[1]
    model.eval()
    with torch.no_grad():
        ids = model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=spec["max_tokens"])
    response = ids[:, width:]
    ended = (response == tokenizer.eos_token_id).int()
    written = (ended.cumsum(dim=1) - ended == 0).float()
    lengths = written.sum(dim=1).long().tolist()
    decoded = tokenizer.batch_decode([row[:n] for row, n in zip(response, lengths, strict=True)])
    rewards = torch.tensor([of_text(text) for text in decoded]).view(-1, spec["n"])
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    mask = torch.cat([prompts["attention_mask"], written.long()], dim=1)
    model.train()
    total = written.sum().item()
    for part in torch.arange(len(ids)).split(spec["micro_batch"]):
        hidden = wrapped(input_ids=ids[part], attention_mask=mask[part], logits_to_keep=response.shape[1] + 1)
        log_probs = hidden.logits[:, :-1].log_softmax(dim=-1).gather(2, response[part].unsqueeze(2)).squeeze(2)
        ratio = (log_probs - log_probs.detach()).exp()
        (-(ratio * advantages[part] * written[part]).sum() / total).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    sys.exit(main())
