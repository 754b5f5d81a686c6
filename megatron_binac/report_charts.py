"""Charts of a report as SVG text: they scale, print, and need neither script nor network."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

# Okabe and Ito's colours, which colour-blind readers tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 34


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One curve: where it goes, and a band around it."""

    name: str
    color: str
    points: Sequence[tuple[float, float]]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    faint: bool = False
    """One seed behind the mean of all."""
    dots: bool = False


def line_chart(title: str, lines: Sequence[Line], *, x_label: str, unit: bool = False) -> str:
    """A figure of curves over one axis; `unit` fixes the y axis to 0..1. Empty text without any
    point."""
    drawn = [line for line in lines if line.points]
    if not drawn:
        return ""
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    ys += [y for line in drawn for band in (line.low, line.high) if band for y in band]
    x_low, x_high = min(0.0, *xs), max(xs)
    y_low, y_high = (0.0, 1.0) if unit else _range(min(ys), max(ys))
    if x_high == x_low:
        x_high = x_low + 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low)
        up = (min(max(y, y_low), y_high) - y_low) / (y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (
            HEIGHT - TOP - BOTTOM
        )

    parts = [_axes(x_low, x_high, y_low, y_high, x_label)]
    for line in sorted(drawn, key=lambda one: not one.faint):
        points = [place(x, y) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        if line.low and line.high:
            over = [place(p[0], y) for p, y in zip(line.points, line.high, strict=True)]
            under = [place(p[0], y) for p, y in zip(line.points, line.low, strict=True)]
            band = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*over, *reversed(under)])
            parts.append(f'<polygon points="{band}" fill="{line.color}" opacity=".15"/>')
        style = 'opacity=".35" stroke-width="1"' if line.faint else 'stroke-width="2"'
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{line.color}" {style}>'
            f"<title>{html.escape(line.name)}</title></polyline>"
        )
        if line.dots:
            for (x, y), (_, value) in zip(points, line.points, strict=True):
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{line.color}">'
                    f"<title>{html.escape(line.name)}: {value:.3f}</title></circle>"
                )
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def bars(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str) -> str:
    """Stacked bars, one a row: (name, [(part, value)]); a part keeps its colour in all rows."""
    rows = [(name, parts) for name, parts in rows if sum(value for _, value in parts) > 0]
    if not rows:
        return ""
    names = list(dict.fromkeys(part for _, parts in rows for part, _ in parts))
    most = max(sum(value for _, value in parts) for _, parts in rows)
    lines = []
    for name, parts in rows:
        pieces = []
        for part, value in parts:
            color = COLORS[names.index(part) % len(COLORS)]
            share = 100 * value / most
            pieces.append(
                f'<span style="width:{share:.2f}%;background:{color}" '
                f'title="{html.escape(part)}: {value:.3g} {unit}"></span>'
            )
        total = sum(value for _, value in parts)
        lines.append(
            f'<div class="bar"><b>{html.escape(name)}</b><div>{"".join(pieces)}</div>'
            f"<i>{total:.3g} {unit}</i></div>"
        )
    keys = "".join(
        f'<li><span style="background:{COLORS[i % len(COLORS)]}"></span>{html.escape(n)}</li>'
        for i, n in enumerate(names)
    )
    return (
        f'<figure class="wide"><figcaption>{html.escape(title)}</figcaption>{"".join(lines)}'
        f'<ul class="legend">{keys}</ul></figure>'
    )


def _range(low: float, high: float) -> tuple[float, float]:
    """The y axis with some air; it begins at 0 where nothing is below."""
    if low >= 0 and low < 0.6 * high:
        return 0.0, high * 1.08 or 1.0
    air = 0.08 * (high - low) or abs(high) * 0.1 or 1.0
    return low - air, high + air


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers in [low, high], at most `most` + 1 of them."""
    rough = (high - low) / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _label(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1000:
        return f"{value / 1000:g}k"
    return f"{value:.3g}"


def _axes(x_low: float, x_high: float, y_low: float, y_high: float, x_label: str) -> str:
    parts = []
    for value in ticks(y_low, y_high):
        up = (value - y_low) / (y_high - y_low)
        y = HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="y">{_label(value)}</text>')
    for value in ticks(x_low, x_high, 4):
        x = LEFT + (value - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" class="x">{_label(value)}</text>'
        )
    middle = (WIDTH + LEFT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 3}" class="x">{html.escape(x_label)}</text>')
    return f'<g class="axes">{"".join(parts)}</g>'
