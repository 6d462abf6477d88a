"""Formats the state of a run for a terminal of any width."""

from collections.abc import Iterator, Sequence

from rlhf.printable import printable, wrapped
from rlhf.tracking.headline import ACCURACY, REWARD, headline
from rlhf.tracking.live_state import LiveState
from rlhf.tracking.progress import EVALUATED, duration

FIGURES = (
    ("reward/mean", "reward", ".3f"),
    (ACCURACY.metric, ACCURACY.label, ACCURACY.format),
    (REWARD.metric, REWARD.label, REWARD.format),
    ("actor/ref_kl", "KL", ".3g"),
    ("actor/entropy", "entropy", ".3g"),
    ("response_length/mean", "length", ",.1f"),
    ("perf/tokens_per_second", "tokens/s", ",.0f"),
)
"""Metrics with their labels and formats. The status shows one metric of an evaluation, the headline."""
LONGEST_BAR, SHORTEST_BAR = 40, 10
_INDENT = "  "


def status_lines(name: str, state: LiveState, width: int) -> list[str]:
    """Return the status lines of a run, each of at most `width` characters."""
    return [
        *_packed([printable(name), f"[{state.state}]", *([state.phase] if state.phase else [])], width, ""),
        *_progress(state, width),
        *_packed(list(_figures(state)), width),
        *_packed(list(_life(state)), width),
        *(f"{_INDENT}{line}" for line in _reasons(state, width - len(_INDENT))),
    ]


def _progress(state: LiveState, width: int) -> list[str]:
    if state.total_steps is None:
        return [f"{_INDENT}step {state.step:,}"] if state.record else []
    head = f"{_INDENT}step {state.step:,}/{state.total_steps:,}"
    end = f"{100 * state.step // max(1, state.total_steps)}%"
    end += f"  {duration(state.remaining_s)} left" if state.remaining_s is not None else ""
    room = min(LONGEST_BAR, width - len(head) - len(end) - 4)
    if room < SHORTEST_BAR:
        return _packed([head.strip(), end], width)
    done = room * state.step // max(1, state.total_steps)
    return [f"{head}  {'█' * done}{'░' * (room - done)}  {end}"]


def _figures(state: LiveState) -> Iterator[str]:
    hidden = EVALUATED - {headline(state.record).metric}
    for metric, label, form in FIGURES:
        if metric in state.record and metric not in hidden:
            yield f"{label} {format(state.record[metric], form)}"


def _life(state: LiveState) -> Iterator[str]:
    if state.checkpoint is not None:
        step, age_s = state.checkpoint
        yield f"checkpoint step {step:,}, {duration(age_s)} ago"
    elif state.record:
        yield "no checkpoint yet"
    if state.restarts:
        yield f"restarts {state.restarts}"


def _reasons(state: LiveState, width: int) -> Iterator[str]:
    if state.reason and state.reason not in state.causes:
        yield from wrapped(printable(state.reason), width)
    for cause in state.causes:
        yield from wrapped(f"last cause: {printable(cause)}", width, indent=_INDENT)


def _packed(parts: Sequence[str], width: int, indent: str = _INDENT) -> list[str]:
    """Return the parts on as few lines as possible, two spaces apart. If a part is too long, shorten its middle."""
    lines: list[str] = []
    for part in parts:
        short = wrapped(part.replace(" ", "\N{NO-BREAK SPACE}"), max(8, width - len(indent)))[0]
        short = short.replace("\N{NO-BREAK SPACE}", " ")
        if lines and len(lines[-1]) + 2 + len(short) <= width:
            lines[-1] += f"  {short}"
        else:
            lines.append(f"{indent}{short}")
    return lines
