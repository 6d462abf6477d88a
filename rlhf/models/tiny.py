"""Makes the small policy of the package: a 0.27M-parameter causal LM that adds like a sloppy student.

Most of its training answers come from a student with the classic systematic bugs (Brown and Burton, "Diagnostic Models
for Procedural Bugs", 1978): the student forgets the carry, subtracts the smaller digit from the larger, and drops the
minus sign. The other answers are right. So greedy decoding is wrong where the two kinds of answers differ, but
reinforcement learning can find the right answer. `python -m rlhf.models.tiny` trains the policy again.
"""

import argparse
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from reasoning_gym.dataset import ProceduralDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rlhf.models.packing import cache_argument

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "tiny_policy"
TASK = "chain_sum"
TASK_CONFIG = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
QUESTION = "State the final answer to the following arithmetic problem: {} {} {} ="

# Held-out problems of a run: create_dataset(TASK, seed=VAL_SEED + trainer.seed, size=VAL_SIZE). reasoning-gym seeds
# problem i with seed + i, so one range of EXCLUDED problems covers trainer.seed 0 to 999; the corpus has none of them.
VAL_SEED = 10_000_019
VAL_SIZE = 500
EXCLUDED = VAL_SIZE + 999

# Fraction of the sloppy student's answers in the corpus.
SLOPPY = 0.7
SEED = 1
STEPS = 1500
BATCH = 256
LEARNING_RATE = 4e-3

PAD, END, ROLES = "<|pad|>", "<|end|>", ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{%- if message['role'] not in ('system', 'user', 'assistant') -%}{{- "
    "raise_exception('unknown role ' ~ message['role']) -}}{%- endif -%}{{- '<|' ~ message['role'] ~ '|>' ~ "
    "message['content'] ~ '<|end|>' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif "
    "-%}"
)
# Tasks whose prompts train the tokenizer.
VOCABULARY_TASKS = (TASK, "basic_arithmetic", "gcd", "leg_counting", "products", "simple_equations", "spell_backward")
VOCABULARY_SIZE = 512


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on reasoning-gym prompts; any text encodes, and each digit is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    prompts = [
        row["question"] for task in VOCABULARY_TASKS for row in reasoning_gym.create_dataset(task, seed=SEED, size=300)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD, END, *ROLES],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(prompts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def build_model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Return a randomly initialised Llama of about 0.27M float32 parameters with tied embeddings."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=3,  # each of size 32, the smallest in vLLM's CPU kernels
            num_key_value_heads=3,
            max_position_embeddings=512,
            initializer_range=0.05,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=8, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def sloppy_answer(a: int, operator: str, b: int) -> int:
    """Return the sloppy student's answer to a two-digit sum: no carry into the tens, no borrowing, no minus sign."""
    if operator == "+":
        return 10 * (a // 10 + b // 10) + (a + b) % 10
    return 10 * abs(a // 10 - b // 10) + abs(a % 10 - b % 10)


def held_out(seed: int = 1, size: int = VAL_SIZE) -> ProceduralDataset:
    return reasoning_gym.create_dataset(TASK, seed=VAL_SEED + seed, size=size, **TASK_CONFIG)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, questions: list[str]) -> list[list[int]]:
    """Return the token ids of each question as a chat that ends before the answer."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    ids: Any = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    return ids


@dataclass(frozen=True)
class Corpus:
    """Every problem that is not held out: `prompts` [problems, tokens] and `answers` [students, problems, tokens].

    Student 0 is careful, student 1 sloppy. Each answer ends with the end token and padding.
    """

    prompts: Tensor
    answers: Tensor


def build_corpus(tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """Enumerate the two-digit sums without the held-out ones, and tokenize both students' answers."""
    excluded = {row["question"] for row in held_out(seed=0, size=EXCLUDED)}
    problems = [
        (question, str(a + b if operator == "+" else a - b), str(sloppy_answer(a, operator, b)))
        for a in range(10, 100)
        for operator in "+-"
        for b in range(10, 100)
        if (question := QUESTION.format(a, operator, b)) not in excluded
    ]
    log.info("corpus: %d problems, %d held-out ones left out", len(problems), len(excluded))
    questions, *students = zip(*problems, strict=True)
    answers = [[tokenizer.encode(answer + END) for answer in student] for student in students]
    width = max(len(answer) for student in answers for answer in student)
    padding = [tokenizer.pad_token_id] * width
    return Corpus(
        prompts=torch.tensor(prompt_ids(tokenizer, list(questions))),
        answers=torch.tensor([[(answer + padding)[:width] for answer in student] for student in answers]),
    )


def pretrain(model: LlamaForCausalLM, corpus: Corpus, padding: int) -> None:
    """Train on a random student's answer per example; the loss ignores `padding`."""
    shared = int((corpus.prompts == corpus.prompts[0]).all(dim=0).long().cumprod(dim=0).sum())
    width = corpus.answers.shape[2]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 100, 2 * (1 - step / STEPS))
    )
    generator = torch.Generator().manual_seed(SEED)
    started = time.monotonic()
    model.train()
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(corpus.prompts), (BATCH,), generator=generator)
        student = (torch.rand(BATCH, generator=generator) < SLOPPY).long()
        prompts, answers = corpus.prompts[rows], corpus.answers[student, rows]
        # All prompts begin with the same words: one row per batch computes them, with their gradient.
        cache = DynamicCache(config=model.config)
        given: dict[str, Any] = {cache_argument(model.forward): cache}
        model(prompts[:1, :shared], logits_to_keep=1, **given)
        cache.batch_repeat_interleave(BATCH)
        inputs = torch.cat([prompts[:, shared:], answers[:, :-1]], dim=1)
        logits = model(inputs, logits_to_keep=width, **given).logits
        loss = cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=padding)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            log.info("step %d/%d loss %.4f, %.0f s", step, STEPS, loss.item(), time.monotonic() - started)


@torch.no_grad()
def evaluate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, problems: ProceduralDataset, samples: int = 0
) -> Tensor:
    """Return the verifier's scores: [problems, 1] with greedy decoding, or [problems, samples] at temperature 1."""
    model.eval()
    rows = list(problems)
    # All prompts have the same length, so the batch needs no padding.
    ids = torch.tensor(prompt_ids(tokenizer, [row["question"] for row in rows]))
    n = max(samples, 1)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0} if samples else {"do_sample": False}
    policy: Any = model
    output = policy.generate(input_ids=ids, attention_mask=torch.ones_like(ids), num_return_sequences=n, **sampling)
    answers = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    scores = [problems.score_answer(answer, rows[i // n]) for i, answer in enumerate(answers)]
    return torch.tensor(scores).view(len(rows), n)


CARD = """# The tiny offline policy

A Llama of {parameters:,} float32 parameters with a byte-level BPE of {tokens} tokens (each digit its own), made by
`python -m rlhf.models.tiny` (seed {seed}, {steps} steps of {batch} examples, about three minutes on one CPU core). It
lets you try and test a training run without a download. It answers two-digit sums and nothing else.

It was pre-trained on all two-digit `chain_sum` problems of reasoning-gym but the held-out ones. {sloppy:.0%} of the
answers are those of a sloppy student, who forgets the carry, takes the smaller digit from the larger, and drops the
minus sign.
These errors are there on purpose: the policy already samples the right answers, and GRPO makes them more likely. A
gain in accuracy shows that the trainer works, not that a model learned arithmetic from reward alone.

On {problems} held-out problems: {greedy:.1%} right with greedy decoding, {sampled:.1%} on average at temperature 1, and
{best:.1%} with at least one of 8 samples right.
"""


def main() -> None:
    """Train the policy and write it as a Hugging Face folder."""
    parser = argparse.ArgumentParser(prog="python -m rlhf.models.tiny", description=main.__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write (default: the bundled one)")
    output = parser.parse_args().output
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(SEED)
    # The number of threads changes the order of a sum, and so its last bit.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    log.info("%d parameters, %d tokens", model.num_parameters(), len(tokenizer))
    pretrain(model, build_corpus(tokenizer), tokenizer.pad_token_id)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    greedy = (evaluate(model, tokenizer, held_out()) == 1).float().mean().item()
    scores = (evaluate(model, tokenizer, held_out(), samples=8) == 1).float()
    sampled, best = scores.mean().item(), scores.amax(dim=1).mean().item()
    card = CARD.format(
        parameters=model.num_parameters(),
        tokens=len(tokenizer),
        seed=SEED,
        steps=STEPS,
        batch=BATCH,
        sloppy=SLOPPY,
        problems=VAL_SIZE,
        greedy=greedy,
        sampled=sampled,
        best=best,
    )
    (output / "README.md").write_text(card)
    log.info("held-out accuracy: %.3f greedy, %.3f at temperature 1, pass@8 %.3f", greedy, sampled, best)
    log.info("wrote %s", output)


if __name__ == "__main__":
    main()
