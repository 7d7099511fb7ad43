"""Lines on doubly logarithmic axes, as SVG: a panel for each operation and number of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = {"mlx-lm": "#d95f02", "mlximpl": "#1f5fbf", "floor": "#888888"}
DASHES = {"mlx-lm": "6 3", "mlximpl": "none", "floor": "2 3"}
WIDTH, HEIGHT = 185.0, 130.0
LEFT, TOP, GAP = 78.0, 58.0, 22.0
TICK = 'font-size="11" fill="#555555"'


@dataclass(frozen=True)
class Point:
    """What one size takes: median milliseconds by name."""

    operation: str
    batch: int
    tokens: int
    milliseconds: Mapping[str, float]


@dataclass(frozen=True)
class Axis:
    """A logarithmic scale from pixel to pixel."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a value."""
        part = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return self.begin + part * (self.end - self.begin)


def plot(points: Sequence[Point], title: str) -> str:
    """The drawing: operations below each other, numbers of rows side by side; a row of panels shares its scale."""
    operations = list(dict.fromkeys(point.operation for point in points))
    batches = sorted({point.batch for point in points})
    tokens = sorted({point.tokens for point in points})
    width, height = LEFT + len(batches) * (WIDTH + GAP), TOP + len(operations) * (HEIGHT + GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        f'<text x="{LEFT:.0f}" y="16" font-size="12">{escape(title)}</text>',
        *_legend([name for name in COLOURS if any(name in point.milliseconds for point in points)]),
    ]
    for row, operation in enumerate(operations):
        of_row = [point for point in points if point.operation == operation]
        top = TOP + row * (HEIGHT + GAP)
        vertical = _decades([ms for point in of_row for ms in point.milliseconds.values()], top + HEIGHT, top)
        parts.append(_turned(operation, 14, top + HEIGHT / 2))
        for column, batch in enumerate(batches):
            left = LEFT + column * (WIDTH + GAP)
            horizontal = Axis(tokens[0] / 1.5, tokens[-1] * 1.5, left, left + WIDTH)
            parts += _frame(horizontal, vertical, tokens, numbered=column == 0, last=row == len(operations) - 1)
            parts.append(f'<text x="{left + 6:.0f}" y="{top + 15:.0f}" font-size="12">B = {batch}</text>')
            here = [point for point in of_row if point.batch == batch]
            parts += _lines(here, horizontal, vertical) if here else _nothing(left, top)
    return "\n".join([*parts, "</svg>", ""])


def _nothing(left: float, top: float) -> list[str]:
    where = f'x="{left + WIDTH / 2:.0f}" y="{top + HEIGHT / 2:.0f}" text-anchor="middle"'
    return [f"<text {where} {TICK}>not measured</text>"]


def _decades(values: Sequence[float], bottom: float, top: float) -> Axis:
    low = math.floor(math.log10(min(values)))
    return Axis(10.0**low, 10.0 ** max(low + 1, math.ceil(math.log10(max(values)))), bottom, top)


def _legend(names: Sequence[str]) -> list[str]:
    parts = []
    for i, name in enumerate(names):
        x = LEFT + 110 * i
        parts.append(f'<path d="M{x:.0f} 36h30" {_stroke(name)}/>')
        parts.append(f'<text x="{x + 36:.0f}" y="40" font-size="12">{escape(name)}</text>')
    return parts


def _stroke(name: str) -> str:
    return f'fill="none" stroke="{COLOURS[name]}" stroke-width="2" stroke-dasharray="{DASHES[name]}"'


def _turned(text: str, x: float, y: float) -> str:
    where = f'x="{x:.0f}" y="{y:.0f}" transform="rotate(-90 {x:.0f} {y:.0f})"'
    return f'<text {where} text-anchor="middle" font-size="12">{escape(text)}, ms</text>'


def _frame(across: Axis, up: Axis, tokens: Sequence[int], *, numbered: bool, last: bool) -> list[str]:
    box = f'x="{across.begin:.1f}" y="{up.end:.1f}" width="{WIDTH:.0f}" height="{HEIGHT:.0f}"'
    parts = [f'<rect {box} fill="none" stroke="#bbbbbb"/>']
    for power in range(round(math.log10(up.low)), round(math.log10(up.high)) + 1):
        y = up.at(10.0**power)
        parts.append(f'<path d="M{across.begin:.1f} {y:.1f}h{WIDTH:.0f}" stroke="#e5e5e5"/>')
        if numbered:
            anchor = f'x="{across.begin - 6:.0f}" y="{y + 4:.1f}" text-anchor="end"'
            parts.append(f"<text {anchor} {TICK}>{10.0**power:g}</text>")
    for count in tokens:
        x = across.at(count)
        parts.append(f'<path d="M{x:.1f} {up.begin:.1f}v-4" stroke="#bbbbbb"/>')
        if last:
            name = f"{count // 1024}k" if count >= 1024 else str(count)
            parts.append(f'<text x="{x:.1f}" y="{up.begin + 15:.0f}" text-anchor="middle" {TICK}>{name}</text>')
    return parts


def _lines(points: Sequence[Point], across: Axis, up: Axis) -> list[str]:
    parts = []
    for name in COLOURS:
        at = [(across.at(p.tokens), up.at(p.milliseconds[name])) for p in points if name in p.milliseconds]
        if at:
            parts.append(f'<path d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in at)}" {_stroke(name)}/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{COLOURS[name]}"/>' for x, y in at]
    return parts
