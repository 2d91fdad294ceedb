"""Charts of the page as inline SVG: real text at any width (places are percentages), colours from the page's CSS.

Rule 1: no script, no address, nothing from outside. Every text is escaped here.
Rule 2: nothing is told by colour alone: lines have dashes, bars have labels, every mark has a title.
"""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.pictures import POINTS_MAX
from pipelines.report_page.facts import Stay

COLOURS = 5
"""`c0` .. `c4` in the page's CSS (Okabe and Ito's palette, which colour-blind people can tell apart)."""
ENGINES_MAX = 64
_LEFT, _WIDE = 13.0, 84.0
_TOP, _HIGH = 10, 150
Series = Mapping[int, float]


def lines(title: str, series: Mapping[str, Series], across: str, *, low: float | None = None) -> str:
    """Lines over whole numbers (steps, versions); `across` names them; `low`: where the axis begins, else the least."""
    drawn = {name: _thin(of) for name, of in series.items() if of}
    if not drawn:
        return nothing(title)
    xs = [x for of in drawn.values() for x in of]
    ys = [y for of in drawn.values() for y in of.values()]
    left, right = min(xs), max(xs)
    bottom, top = min(ys) if low is None else min(low, *ys), max(ys)
    if bottom == top:
        bottom, top = bottom - 0.5, top + 0.5

    def place(x: float, y: float) -> tuple[float, float]:
        return (x - left) / ((right - left) or 1) * 100, (1 - (y - bottom) / (top - bottom)) * 100

    paths, marks = [], []
    for number, (name, of) in enumerate(drawn.items()):
        path = " ".join(f"{px:.2f},{py:.2f}" for px, py in (place(x, y) for x, y in of.items()))
        paths.append(f'<polyline class="line s{number % COLOURS}" points="{path}"/>')
        for x, y in of.items():
            px, py = place(x, y)
            marks.append(
                f'<circle class="s{number % COLOURS}" cx="{_LEFT + px * _WIDE / 100:.2f}%" '
                f'cy="{_TOP + py * _HIGH / 100:.1f}" r="2.5"><title>{_t(name)}, {_t(across)} {x}: {y:.4g}</title>'
                "</circle>"
            )
    inner = (
        f'<svg x="{_LEFT}%" y="{_TOP}" width="{_WIDE}%" height="{_HIGH}" viewBox="0 0 100 100" '
        f'preserveAspectRatio="none" overflow="visible">{"".join(paths)}</svg>{"".join(marks)}'
    )
    shown = "0" if abs(bottom) < 1e-9 * abs(top) else f"{bottom:.3g}"
    axes = _axes(f"{top:.3g}", shown, f"{across} {left}", str(right))
    return _figure(title, axes + inner, _TOP + _HIGH + 24, [(f"s{n % COLOURS}", name) for n, name in enumerate(drawn)])


def bars(title: str, of: Mapping[str, float], *, percent: bool = False) -> str:
    """A bar across for each entry; shares (`percent`) are drawn against the whole."""
    if not of:
        return nothing(title)
    most, rows = 1.0 if percent else max(of.values()) or 1, []
    for place, (name, value) in enumerate(of.items()):
        y, wide = 4 + 24 * place, value / most * 48
        shown = f"{100 * value:.1f} %" if percent else f"{value:,g}"
        rows.append(
            f'<text x="0" y="{y + 13}">{_t(name)}</text><rect class="c0" x="36%" y="{y}" width="{wide:.2f}%" '
            f'height="18"/><text x="{37 + wide:.2f}%" y="{y + 13}">{shown}</text>'
        )
    return _figure(title, "".join(rows), 8 + 24 * len(of))


def columns(title: str, of: Mapping[str, float], across: str) -> str:
    """A column for each entry in order; the first and the last are named."""
    if not of:
        return nothing(title)
    most, step, drawn = max(of.values()) or 1, _WIDE / len(of), []
    for place, (name, value) in enumerate(of.items()):
        tall = value / most * _HIGH
        drawn.append(
            f'<rect class="c0" x="{_LEFT + place * step:.2f}%" y="{_TOP + _HIGH - tall:.1f}" '
            f'width="{step * 0.9:.2f}%" height="{tall:.1f}"><title>{_t(name)} {_t(across)}: {value:,g}</title></rect>'
        )
    first, last = next(iter(of)), list(of)[-1]
    axes = _axes(f"{most:,g}", "0", f"{first} {across}", last if len(of) > 1 else "")
    return _figure(title, axes + "".join(drawn), _TOP + _HIGH + 24)


def stacked(title: str, of: Mapping[int, Mapping[int, int]], across: str, part: str) -> str:
    """A column for each number in order, made of its parts from the bottom up (`{step: {lag: count}}`)."""
    if not of:
        return nothing(title)
    of = _thin(of)
    most, step, drawn = max(sum(parts.values()) for parts in of.values()) or 1, _WIDE / len(of), []
    for place, (x, parts) in enumerate(of.items()):
        y = float(_TOP + _HIGH)
        for key, count in sorted(parts.items()):
            tall = count / most * _HIGH
            y -= tall
            drawn.append(
                f'<rect class="c{key % COLOURS}" x="{_LEFT + place * step:.2f}%" y="{y:.1f}" '
                f'width="{step * 0.9:.2f}%" height="{tall:.1f}">'
                f"<title>{_t(across)} {x}, {_t(part)} {key}: {count:,}</title></rect>"
            )
    axes = _axes(f"{most:,}", "0", f"{across} {next(iter(of))}", str(list(of)[-1]) if len(of) > 1 else "")
    keys = sorted({key for parts in of.values() for key in parts})
    return _figure(
        title, axes + "".join(drawn), _TOP + _HIGH + 24, [(f"c{key % COLOURS}", f"{part} {key}") for key in keys]
    )


def gantt(title: str, stays: Sequence[Stay], published: Mapping[int, float], seconds: float) -> str:
    """A row for each engine, a bar for each version that it served; lines where versions were announced. From the
    first that served to the end."""
    engines = sorted({stay.engine for stay in stays})[:ENGINES_MAX]
    began = min((stay.began for stay in stays), default=0.0)
    if not engines or seconds <= began:
        return nothing(title)
    tall = 24 if len(engines) <= 16 else 12
    rows = {engine: place for place, engine in enumerate(engines)}
    low = 4 + tall * len(engines)

    def x(at: float) -> float:
        return _LEFT + (at - began) / (seconds - began) * _WIDE

    drawn = [f'<text x="0" y="{15 + tall * place}">e{engine}</text>' for engine, place in rows.items() if tall > 12]
    for at in (at for at in published.values() if at >= began):
        drawn.append(f'<line class="grid" x1="{x(at):.2f}%" x2="{x(at):.2f}%" y1="0" y2="{low}"/>')
    for stay in (stay for stay in stays if stay.engine in rows):
        y, wide = 2 + tall * rows[stay.engine], x(stay.ended) - x(stay.began)
        drawn.append(
            f'<rect class="c{stay.version % COLOURS}" x="{x(stay.began):.2f}%" y="{y}" width="{max(wide, 0.1):.2f}%" '
            f'height="{tall - 4}"><title>engine {stay.engine}, version {stay.version}: {stay.began:.1f} to '
            f"{stay.ended:.1f} s</title></rect>"
        )
        if wide >= 6 and tall > 12:
            drawn.append(f'<text class="in" x="{x(stay.began) + 0.6:.2f}%" y="{y + 14}">v{stay.version}</text>')
    drawn.append(f'<text x="{_LEFT}%" y="{low + 14}">{began:.0f} s</text>')
    drawn.append(f'<text class="end" x="{_LEFT + _WIDE}%" y="{low + 14}">{seconds:.0f} s</text>')
    return _figure(title, "".join(drawn), low + 20)


def nothing(title: str) -> str:
    return f'<figure><figcaption>{_t(title)}</figcaption><p class="none">Nothing of it in the archive.</p></figure>'


def _thin(of: Mapping[int, Any]) -> dict[int, Any]:
    """At most POINTS_MAX of them, the first and the last among them."""
    every = max(1, -(-len(of) // (POINTS_MAX - 1)))
    return {x: y for place, (x, y) in enumerate(of.items()) if place % every == 0 or place == len(of) - 1}


def _axes(top: str, bottom: str, left: str, right: str) -> str:
    return (
        f'<line class="grid" x1="{_LEFT}%" x2="{_LEFT + _WIDE}%" y1="{_TOP}" y2="{_TOP}"/>'
        f'<line class="grid" x1="{_LEFT}%" x2="{_LEFT + _WIDE}%" y1="{_TOP + _HIGH}" y2="{_TOP + _HIGH}"/>'
        f'<text class="end" x="{_LEFT - 1.5}%" y="{_TOP + 5}">{_t(top)}</text>'
        f'<text class="end" x="{_LEFT - 1.5}%" y="{_TOP + _HIGH}">{_t(bottom)}</text>'
        f'<text x="{_LEFT}%" y="{_TOP + _HIGH + 17}">{_t(left)}</text>'
        f'<text class="end" x="{_LEFT + _WIDE}%" y="{_TOP + _HIGH + 17}">{_t(right)}</text>'
    )


def _figure(title: str, inner: str, high: int, legend: Sequence[tuple[str, str]] = ()) -> str:
    named = "".join(
        f'<li><svg class="key {css}"><line class="{css}" x1="0" x2="22" y1="6" y2="6"/></svg>{_t(name)}</li>'
        for css, name in legend
    )
    under = f'<ul class="legend">{named}</ul>' if len(legend) > 1 else ""
    return (
        f'<figure><figcaption>{_t(title)}</figcaption><svg class="plot" role="img" aria-label="{_t(title)}" '
        f'width="100%" height="{high}">{inner}</svg>{under}</figure>'
    )


def _t(text: str) -> str:
    return html.escape(text)
