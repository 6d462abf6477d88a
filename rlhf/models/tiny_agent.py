"""Makes the small policy for environments: it plays a guessing game and calls a calculator like a sloppy student.

Training continues from the tiny policy (`rlhf.models.tiny`) on written episodes. In most of them a sloppy student
guesses one number after the other, and adds only two of three terms. In the others a careful student halves the range,
and calls the calculator. Greedy decoding is therefore mostly wrong, but sampling also gives careful episodes,
which reinforcement learning can make more likely. `python -m rlhf.models.tiny_agent` trains the policy again, and
writes the rows of the game.
"""

import argparse
import json
import logging
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import reasoning_gym
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from rlhf.data.turns.chat_turns import ChatTurns
from rlhf.environments.bundled.calculator import Calculator
from rlhf.environments.bundled.guess import GuessNumber
from rlhf.environments.definition import define
from rlhf.models import tiny

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "tiny_agent_policy"
ROWS = Path(__file__).parents[1] / "environments" / "bundled"
TASK_CONFIG = {"min_terms": 3, "max_terms": 3, "min_digits": 2, "max_digits": 2}
PROBLEMS = 6000
WIDTH = 15
"""Count of numbers in the range of a game: four guesses always find the secret."""
LOWS = range(10, 81)
HELD_OUT = 200
SLOPPY = 0.7
SEED, STEPS, BATCH, LEARNING_RATE = 1, 900, 96, 3e-3

Turns = list[tuple[str, str | None]]
"""The policy's text of each turn, and the environment's answer to it; the last turn has None as answer."""


@dataclass(frozen=True)
class WrittenEpisode:
    """An episode as tokens, and which of them the policy wrote."""

    tokens: list[int]
    own: list[bool]


def games() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return training games and held-out games, as pairs of the range's first number and the secret."""
    every = [(low, low + i) for low in LOWS for i in range(WIDTH)]
    random.Random(SEED).shuffle(every)
    return every[HELD_OUT:], every[:HELD_OUT]


def game_prompt(low: int) -> str:
    return f"Guess my number from {low} to {low + WIDTH - 1}."


def guesses(low: int, secret: int, careful: bool) -> Turns:
    """Return the turns of a game: up to four guesses that halve the range, or count up from its first number."""
    turns: Turns = []
    guess, half = (low + WIDTH // 2, (WIDTH + 1) // 4) if careful else (low, 0)
    for _ in range(4):
        answer = None if guess == secret else "higher" if guess < secret else "lower"
        turns.append((str(guess), answer))
        if answer is None:
            break
        guess, half = (guess + (half if answer == "higher" else -half), half // 2) if careful else (guess + 1, 0)
    turns[-1] = turns[-1][0], None
    return turns


def sums(entry: dict, careful: bool) -> Turns:
    """Return the turns of a problem: a calculator call and the answer, or only the sum of the first two terms."""
    expression = entry["metadata"]["expression"]
    if careful:
        return [(f"<calc({expression})>", entry["answer"]), (entry["answer"], None)]
    first, sign, second, *_ = expression.split()
    return [(str(int(first) + int(second) if sign == "+" else int(first) - int(second)), None)]


def write(
    tokenizer: PreTrainedTokenizerBase, chat: ChatTurns, prompt: str, turns: Turns, results: bool
) -> WrittenEpisode:
    """Return the tokens of an episode, as the trainer appends them. `results`: whether answers are tool results."""

    @cache
    def encoded(text: str) -> list[int]:
        return tokenizer.encode(text + tiny.END)

    tokens = chat.prompt([{"role": "user", "content": prompt}])
    own = [False] * len(tokens)
    for text, answer in turns:
        sampled = encoded(text)
        tokens, own = tokens + sampled, own + [True] * len(sampled)
        if answer is not None:
            message = {"role": "user", "content": answer}
            if results:
                message = chat.parse(sampled).calls[0].result(answer)
            seen = chat.observation(sampled, [message])
            tokens, own = tokens + seen, own + [False] * len(seen)
    return WrittenEpisode(tokens, own)


def episodes(tokenizer: PreTrainedTokenizerBase) -> tuple[list[WrittenEpisode], list[WrittenEpisode]]:
    """Return the episodes of the careful and of the sloppy student, with about twice as many problems as games."""
    game = ChatTurns(tokenizer, define("guess", GuessNumber).tools, announce=False)
    calculator = ChatTurns(tokenizer, define("calculator", Calculator).tools, announce=False)
    # The held-out problems of runs have other seeds (`rlhf.data.procedural.VAL_SEED_OFFSET`), far from these.
    problems = list(reasoning_gym.create_dataset("chain_sum", seed=50_000_000, size=PROBLEMS, **TASK_CONFIG))
    played = games()[0]
    students = []
    for careful in (True, False):
        of_games = [
            write(tokenizer, game, game_prompt(low), guesses(low, secret, careful), False) for low, secret in played
        ]
        of_problems = [
            write(tokenizer, calculator, entry["question"], sums(entry, careful), True) for entry in problems
        ]
        students.append([*of_games * 3, *of_problems])
    return students[0], students[1]


def batches(students: Sequence[Sequence[WrittenEpisode]], padding: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield token ids and labels, [BATCH, tokens] each. The label of a token that the policy did not write is -100."""
    rng = random.Random(SEED)
    while True:
        rows = [rng.choice(students[rng.random() < SLOPPY]) for _ in range(BATCH)]
        width = max(len(row.tokens) for row in rows)
        ids = [row.tokens + [padding] * (width - len(row.tokens)) for row in rows]
        labels = [[t if own else -100 for t, own in zip(row.tokens, row.own, strict=True)] for row in rows]
        yield torch.tensor(ids), torch.tensor([row + [-100] * (width - len(row)) for row in labels])


def train(model: torch.nn.Module, students: Sequence[Sequence[WrittenEpisode]], padding: int) -> None:
    """Train; each example of a batch is an episode of a student drawn at random."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 50, 2 * (1 - step / STEPS))
    )
    started = time.monotonic()
    model.train()
    for step, (ids, labels) in zip(range(1, STEPS + 1), batches(students, padding), strict=False):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        wanted = labels[:, 1:] != -100
        loss = cross_entropy(logits[wanted], labels[:, 1:][wanted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            log.info("step %d/%d loss %.4f, %.0f s", step, STEPS, loss.item(), time.monotonic() - started)


def write_rows(folder: Path) -> None:
    """Write the rows of the game, for training and held out."""
    for name, rows in zip(("guess_train", "guess_val"), games(), strict=True):
        lines = [json.dumps({"prompt": game_prompt(low), "secret": secret}) for low, secret in rows]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def main() -> None:
    """Train the policy and write it as a Hugging Face folder."""
    parser = argparse.ArgumentParser(prog="python -m rlhf.models.tiny_agent", description=main.__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write (default: the bundled one)")
    parser.add_argument("--rows", type=Path, default=ROWS, help="folder for the rows of the game")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(SEED)
    # The number of threads changes the order of a sum, and so its last bit.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    write_rows(arguments.rows)
    tokenizer = AutoTokenizer.from_pretrained(tiny.FOLDER)
    model = AutoModelForCausalLM.from_pretrained(tiny.FOLDER)
    train(model, episodes(tokenizer), tokenizer.pad_token_id)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    log.info("wrote %s", arguments.output)


if __name__ == "__main__":
    main()
