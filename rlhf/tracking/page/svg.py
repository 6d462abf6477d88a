"""Draws plots as SVG elements. Colours are CSS variables, so that they follow the reader's light or dark theme."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rlhf.tracking.page.curves import Points

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 28
COLOURS = 8
"""Colours of the style sheet, --c0 to --c7."""
DASHES = ("", "6 3", "2 3", "8 3 2 3")
_MARKERS = 60
"""A curve with at most this many points shows them as dots."""


@dataclass(frozen=True)
class Line:
    """A curve: its label, its points, the numbers of its colour and dashes, and whether it is drawn faintly."""

    label: str
    points: Points
    colour: int = 0
    dash: int = 0
    faint: bool = False


@dataclass(frozen=True)
class Scale:
    """Maps values of an axis to coordinates of the drawing."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def ticks(low: float, high: float, most: int, least: float = 0.0) -> list[float]:
    """Return at most `most` round numbers between `low` and `high`, at least `least` apart."""
    if not low < high:
        return [low]
    rough = max((high - low) / max(1, most - 1), least)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float, digits: int = 1) -> str:
    """Format a value briefly. Values from 1e6 on and below 1e-3 have an exponent and `digits` decimal places."""
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.{digits}e}".replace("e-0", "e-").replace("e+0", "e")
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if size < 1 else f"{value:.3f}".rstrip("0").rstrip(".")


def plot(lines: Sequence[Line], name: str, *, share: bool = False, of_x: Callable[[float], str] = number) -> Markup:
    """Return a plot of `lines` over the steps. `share`: the axis covers 0 to 1. The element's name is `name`."""
    every = [point for line in lines for point in line.points]
    x = _scale([p[0] for p in every], LEFT, WIDTH - RIGHT, pad=False)
    y = _scale([0.0, 1.0] if share else [p[1] for p in every], HEIGHT - BOTTOM, TOP, pad=not share)
    parts = [_axes(x, y, of_x)]
    for line in sorted(lines, key=lambda each: not each.faint):
        parts.append(_path(line, x, y))
    parts.append(Markup('<line class="cursor" y1="{}" y2="{}" x1="-9" x2="-9"/>').format(TOP, HEIGHT - BOTTOM))
    scales = " ".join(
        f"{each:.10g}" for each in (x.low, x.high, y.low, y.high, LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM, TOP)
    )
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" data-scales="{}">{}</svg>').format(
        WIDTH, HEIGHT, name, scales, Markup("").join(parts)
    )


def _scale(values: Sequence[float], start: float, end: float, *, pad: bool) -> Scale:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        room = abs(low) * 0.1 or 1.0
        low, high = (low - room, high + room) if pad else (low, low + 1)
    elif pad:
        room = 0.06 * (high - low)
        low, high = low - room if low < 0 or low - room >= 0 else 0.0, high + room
    return Scale(low, high, start, end)


def _axes(x: Scale, y: Scale, of_x: Callable[[float], str]) -> Markup:
    parts = []
    values = ticks(y.low, y.high, 6)
    digits = 1 if len({number(value) for value in values}) == len(values) else 2
    for value in values:
        at = round(y(value), 1)
        grid = Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(LEFT, WIDTH - RIGHT, at, at)
        parts += [grid, _text(LEFT - 6, at + 3.5, number(value, digits), "end")]
    for value in ticks(x.low, x.high, 6, least=1):  # steps or seconds
        at = round(x(value), 1)
        parts.append(_text(at, HEIGHT - BOTTOM + 16, of_x(value), "end" if at > WIDTH - 24 else "middle"))
    base = HEIGHT - BOTTOM
    return Markup("").join(
        [*parts, Markup('<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(LEFT, WIDTH - RIGHT, base, base)]
    )


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>').format(x, y, anchor, text)


def _path(line: Line, x: Scale, y: Scale) -> Markup:
    if not line.points:
        return Markup("")
    places = [f"{x(step):.1f} {y(value):.1f}" for step, value in line.points]
    dash = Markup(' stroke-dasharray="{}"').format(DASHES[line.dash % 4]) if line.dash % 4 else Markup("")
    drawn = Markup('<path class="line c{}{}" data-label="{}" d="M{}"{}/>').format(
        line.colour % COLOURS, " faint" if line.faint else "", line.label, "L".join(places), dash
    )
    if len(places) > _MARKERS or line.faint:
        return drawn
    dots = (place.split() for place in places)
    circles = [
        Markup('<circle class="c{}" cx="{}" cy="{}" r="2.4"/>').format(line.colour % COLOURS, *dot) for dot in dots
    ]
    return Markup("").join([drawn, *circles])


def legend(lines: Sequence[Line]) -> Markup:
    """Return the labels of the lines, each with a stroke of its colour and dashes."""
    items = [
        Markup(
            '<li><svg viewBox="0 0 22 8" aria-hidden="true">'
            '<path class="line c{}{}" d="M1 4H21" stroke-dasharray="{}"/>'
            "</svg>{}</li>"
        ).format(line.colour % COLOURS, " faint" if line.faint else "", DASHES[line.dash % 4] or "none", line.label)
        for line in lines
    ]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items))
