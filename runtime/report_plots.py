"""Plots as inline SVG. Colours come from the page's style sheet, by class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH = 920
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 10, 44


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from low to high."""
    span = high - low
    if span <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / wanted))
    step = next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= wanted)
    first = math.ceil(low / step - 1e-9)
    return [at * step for at in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A few digits, no exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


class Plot:
    """A frame with two linear axes, filled by the methods and then turned into text.

    Args:
        x: lowest and highest value.
        y: likewise; the frame ends there.
        x_label, y_label: with units.
        height: of the whole picture.
    """

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        x_label: str,
        y_label: str,
        height: int = 240,
    ) -> None:
        self._x = x if x[1] > x[0] else (x[0], x[0] + 1)
        self._y = y if y[1] > y[0] else (y[0], y[0] + 1)
        self._labels = (x_label, y_label)
        self._height = height
        self._marks: list[str] = []
        self._x_ticks: Sequence[tuple[float, str]] | None = None

    def px(self, x: float) -> float:
        low, high = self._x
        return LEFT + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def py(self, y: float) -> float:
        low, high = self._y
        share = (min(max(y, low), high) - low) / (high - low)
        return self._height - BOTTOM - share * (self._height - TOP - BOTTOM)

    def x_ticks(self, named: Sequence[tuple[float, str]]) -> None:
        """Use these ticks instead of round numbers."""
        self._x_ticks = named

    def bar(self, x0: float, x1: float, y0: float, y1: float, kind: str, tip: str = "") -> None:
        left, right, top, bottom = self.px(x0), self.px(x1), self.py(y1), self.py(y0)
        if bottom - top < 0.05:
            return
        title = f"<title>{escape(tip)}</title>" if tip else ""
        box = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}"'
        self._marks.append(f'<rect class="{kind}" {box} height="{bottom - top:.1f}">{title}</rect>')

    def stack(self, x0: float, x1: float, parts: Mapping[str, float], tip: str) -> None:
        """A bar of parts on top of each other; their names are their classes."""
        below = 0.0
        for kind, part in parts.items():
            self.bar(x0, x1, below, below + part, kind, f"{tip}: {number(part)} {kind}")
            below += part

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        path = " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in points)
        self._marks.append(f'<polyline class="line {kind}" points="{path}"/>')

    def dash(self, x0: float, x1: float, y: float, kind: str, tip: str) -> None:
        """A short level line, such as a target on a bar."""
        at = f'x1="{self.px(x0):.1f}" x2="{self.px(x1):.1f}" y1="{self.py(y):.1f}"'
        self._marks.append(
            f'<line class="{kind}" {at} y2="{self.py(y):.1f}"><title>{escape(tip)}</title></line>'
        )

    def steps(self, tops: Sequence[float], bottoms: Sequence[float], kind: str) -> None:
        """An area of equal steps over the whole width."""
        low, high = self._x
        width = (high - low) / max(len(tops), 1)
        there, back = [], []
        for at, (top, bottom) in enumerate(zip(tops, bottoms, strict=True)):
            edges = (low + at * width, low + (at + 1) * width)
            there += [f"{self.px(x):.1f},{self.py(top):.1f}" for x in edges]
            back += [f"{self.px(x):.1f},{self.py(bottom):.1f}" for x in edges]
        self._marks.append(f'<polygon class="{kind}" points="{" ".join(there + back[::-1])}"/>')

    def svg(self, title: str) -> str:
        """The picture; the title is for those who cannot see it."""
        bottom = self._height - BOTTOM
        parts = []
        for y in ticks(*self._y):
            parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" {_level(self.py(y))}/>'
            )
            parts.append(_text(LEFT - 8, self.py(y) + 4, number(y), "end"))
        named = self._x_ticks
        for x, name in (
            named if named is not None else [(x, number(x)) for x in ticks(*self._x, 10)]
        ):
            parts.append(_text(self.px(x), bottom + 17, name, "middle"))
        parts += self._marks
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" {_level(bottom)}/>')
        middle = (TOP + bottom) / 2
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, self._height - 6, self._labels[0], "middle"))
        turned = f'transform="rotate(-90 14 {middle:.0f})"'
        parts.append(_text(14, middle, self._labels[1], "middle", turned))
        box = f'viewBox="0 0 {WIDTH} {self._height}"'
        return f'<svg {box} role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _level(y: float) -> str:
    return f'y1="{y:.1f}" y2="{y:.1f}"'


def _text(x: float, y: float, text: str, anchor: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(text)}</text>'


def legend(names: Mapping[str, str]) -> str:
    """Coloured boxes with names."""
    items = (f'<span><i class="{kind}"></i>{escape(name)}</span>' for kind, name in names.items())
    return f'<p class="legend">{"".join(items)}</p>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table whose first column names the rows."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(c)}</td>' for c in row[1:])}</tr>"
        for row in rows
    )
    line = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    return f'<div class="wide"><table class="{kind}">{line}<tbody>{body}</tbody></table></div>'


def heat(
    head: Sequence[str], rows: Sequence[tuple[str, Sequence[tuple[float, str] | None]]]
) -> str:
    """A table of shares from 0 to 1, the darker the larger, each with a tip."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = []
    for name, cells in rows:
        line = [f"<tr><th>{escape(name)}</th>"]
        for cell in cells:
            if cell is None:
                line.append("<td></td>")
                continue
            share, tip = cell
            style = f"--heat:{100 * share:.0f}%"
            line.append(f'<td style="{style}" title="{escape(tip)}">{100 * share:.0f}</td>')
        lines.append("".join(line) + "</tr>")
    return (
        f'<div class="wide"><table class="heat"><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
