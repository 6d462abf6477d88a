"""Chooses samples for the report: held-out prompts before and after the training, and groups of the last step."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from rlhf.tracking.sample_files import ROLLOUT, VALIDATION, SampleFiles, ShownSample

MOST_READ = 2000
"""The report reads at most this many samples of a step."""
PROMPTS, GROUPS, OF_GROUP = 8, 4, 8
LONGEST = 1500
"""The report shows at most this many characters of a text."""
LEVELS = (0.5, 0.2, 0.05)
"""Thresholds: the report colours a token more for each threshold that is above the token's probability."""


@dataclass(frozen=True)
class TextPart:
    """Part of a response: text of the environment, or successive tokens of the policy that have the same `level`."""

    text: str
    by_environment: bool = False
    level: int = 0
    """Surprise of the tokens, from 0 to len(LEVELS): the number of LEVELS above each token's probability."""


@dataclass(frozen=True)
class SampleCard:
    """A sample as the report shows it."""

    response: list[TextPart]
    score: float
    length: int | None
    finish_reason: str
    advantage: float | None


@dataclass(frozen=True)
class Pair:
    """A held-out prompt with one sample of the first and one sample of the last evaluation."""

    prompt: str
    truth: str
    change: str
    before: SampleCard
    after: SampleCard


@dataclass(frozen=True)
class ShownGroup:
    """Samples of one prompt in one step."""

    prompt: str
    truth: str
    samples: list[SampleCard]
    more: int


@dataclass(frozen=True)
class ShownSamples:
    """The chosen samples of a run, with the steps that they are from."""

    steps: tuple[int, int] | None
    pairs: list[Pair]
    group_step: int | None
    groups: list[ShownGroup]


def choose_samples(run_dir: Path) -> ShownSamples:
    """Return the samples to show. Raises UserError for a damaged file."""
    files = SampleFiles(run_dir)
    steps = files.steps()
    evaluated: list[tuple[int, list[ShownSample]]] = []
    for order in (steps, reversed(steps)):
        for step in islice(order, 2000):
            if found := _read(files, step, VALIDATION):
                evaluated.append((step, found))
                break
    pairs: list[Pair] = []
    of_steps = None
    if len(evaluated) == 2 and evaluated[0][0] < evaluated[1][0]:
        (first, before), (last, after) = evaluated
        of_steps, pairs = (first, last), _pairs(before, after)
    for step in reversed(steps):
        if found := _read(files, step, ROLLOUT):
            return ShownSamples(of_steps, pairs, step, _groups(found))
    return ShownSamples(of_steps, pairs, None, [])


def _read(files: SampleFiles, step: int, split: str) -> list[ShownSample]:
    return [sample for sample in islice(files.read(step), MOST_READ) if sample.get("split") == split]


def _pairs(before: Iterable[ShownSample], after: Iterable[ShownSample]) -> list[Pair]:
    """Return at most PROMPTS pairs: half with a higher score, a quarter lower, a quarter equal; any kind fills gaps."""
    earlier = {(sample.get("uid"), sample.get("sample")): sample for sample in before}
    kinds: dict[str, list[Pair]] = {"better": [], "worse": [], "same": []}
    for sample in after:
        old = earlier.get((sample.get("uid"), sample.get("sample")))
        if old is None or old.get("prompt") != sample.get("prompt"):
            continue
        difference = float(sample["score"]) - float(old["score"])
        change = "better" if difference > 0 else "worse" if difference < 0 else "same"
        pair = Pair(_text(sample.get("prompt")), _truth(sample), change, _sample(old), _sample(sample))
        kinds[change].append(pair)
    chosen = [*kinds["better"][: PROMPTS // 2], *kinds["worse"][: PROMPTS // 4], *kinds["same"][: PROMPTS // 4]]
    rest = [pair for of_kind in kinds.values() for pair in of_kind if pair not in chosen]
    return [*chosen, *rest[: PROMPTS - len(chosen)]]


def _groups(samples: Iterable[ShownSample]) -> list[ShownGroup]:
    of_prompt: dict[object, list[ShownSample]] = {}
    for sample in samples:
        of_prompt.setdefault(sample.get("uid"), []).append(sample)
    found: Sequence[list[ShownSample]] = sorted(of_prompt.values(), key=len, reverse=True)[:GROUPS]
    return [
        ShownGroup(
            _text(group[0].get("prompt")),
            _truth(group[0]),
            [_sample(each) for each in sorted(group, key=lambda s: -float(s["score"]))[:OF_GROUP]],
            max(0, len(group) - OF_GROUP),
        )
        for group in found
    ]


def _sample(sample: ShownSample) -> SampleCard:
    length, advantage = sample.get("length"), sample.get("advantage")
    return SampleCard(
        response=_response(sample),
        score=float(sample["score"]),
        length=length if isinstance(length, int) else None,
        finish_reason=str(sample.get("finish_reason") or ""),
        advantage=None if advantage is None else float(advantage),
    )


def _response(sample: ShownSample) -> list[TextPart]:
    """Return the first LONGEST characters of a response in pieces: by its tokens, by its turns, or as a whole."""
    pieces: list[TextPart] = []
    if tokens := sample.get("tokens"):
        for text, log_prob in tokens:
            piece = TextPart(text, log_prob is None, 0 if log_prob is None else _level(float(log_prob)))
            if pieces and replace(pieces[-1], text="") == replace(piece, text=""):
                pieces[-1] = replace(piece, text=pieces[-1].text + text)
            else:
                pieces.append(piece)
    else:
        turns = sample.get("parts") or [("policy", sample["response"])]
        pieces = [TextPart(text, who != "policy") for who, text in turns]
    shown: list[TextPart] = []
    room = LONGEST
    for piece in pieces:
        if room > 0 and piece.text:
            shown.append(replace(piece, text=_encodable(piece.text[:room])))
            room -= len(piece.text)
    if (more := len(str(sample["response"])) - LONGEST) > 0 or (tokens and len(tokens) < (sample.get("length") or 0)):
        shown.append(TextPart(f" … ({more:,} more characters)" if more > 0 else " …"))
    return shown


def _level(log_prob: float) -> int:
    return sum(log_prob < math.log(probability) for probability in LEVELS)


def _truth(sample: ShownSample) -> str:
    truth = sample.get("ground_truth")
    return "" if truth is None else _text(truth)


def _text(value: object) -> str:
    """Return a text of at most LONGEST characters."""
    text = _encodable(str(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text) - LONGEST:,} more characters)"


def _encodable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 lacks, by question marks."""
    return text.encode(errors="replace").decode()
