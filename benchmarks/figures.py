"""Results of the proof as pictures and a page: docs/figures/*.svg and docs/proof.md.

python benchmarks/figures.py          (or make figures)

In: what was measured (`cells`), and the page made of it (`page`). Out: nothing that is not in them: no number is typed.
Pictures are plain SVG, in the reader's own font, legible on light and on dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from cells import GOAL_WORST, LABS, NAMES, Cell, Row, geometric_mean, read_cells, read_programs, times_without
from page import proof_page
from proof import OURS

from lopsided.planner.ablation import HAP

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DOCS = HERE.parent / "docs"

STYLE = """
.ink{fill:#1f2328}.dim{fill:#59636e}.line{stroke:#59636e}.grid{stroke:#d1d9e0}.ours{fill:#1f6feb}.hap{fill:#d9822b}
.base{fill:#8c959f}.band{fill:#1f6feb;opacity:.1}.send{fill:#d9822b}.hollow{fill:none;stroke:#59636e}
@media (prefers-color-scheme:dark){.ink{fill:#e6edf3}.dim{fill:#9198a1}.line{stroke:#9198a1}.grid{stroke:#3d444d}
.ours{fill:#58a6ff}.hap{fill:#f0a35e}.base{fill:#7d8590}.band{fill:#58a6ff;opacity:.16}.send{fill:#f0a35e}
.hollow{stroke:#9198a1}}
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}.small{font-size:11px}.bold{font-weight:600}
"""


@dataclass(slots=True)
class Drawing:
    """SVG, piece by piece."""

    width: float
    height: float
    title: str
    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, look: str, title: str = "") -> None:
        inside = f"<title>{escape(title)}</title>" if title else ""
        # A bar of no height still says that it is there.
        self.parts.append(
            f'<rect class="{look}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.6):.1f}" '
            f'height="{max(height, 0.6):.1f}">{inside}</rect>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, look: str = "grid", dash: str = "") -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<line class="{look}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{dashed}/>')

    def dot(self, x: float, y: float, look: str, radius: float = 4.0, title: str = "") -> None:
        inside = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(f'<circle class="{look}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{inside}</circle>')

    def text(self, x: float, y: float, words: str, look: str = "ink", anchor: str = "start", turn: float = 0) -> None:
        turned = f' transform="rotate({turn:g} {x:.1f} {y:.1f})"' if turn else ""
        self.parts.append(
            f'<text class="{look}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turned}>{escape(words)}</text>'
        )

    def area(self, points: Sequence[tuple[float, float]], look: str) -> None:
        told = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polygon class="{look}" points="{told}"/>')

    def legend(self, x: float, y: float, items: Sequence[tuple[str, str]]) -> None:
        for look, words in items:
            self.rect(x, y - 9, 10, 10, look)
            self.text(x + 15, y, words, "ink small")
            x += 34 + 6.2 * len(words)

    def svg(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" role="img" aria-label="{escape(self.title)}">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style>" + "\n".join(self.parts) + "</svg>\n"
        )


def _ticks(high: float, about: int = 4) -> list[float]:
    """Round numbers from 0 to at least `high`."""
    raw = high / about
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * k for k in (1, 2, 2.5, 5, 10) if unit * k >= raw - 1e-12)
    return [step * k for k in range(math.ceil(high / step - 1e-9) + 1)]


def speedups(cells: Sequence[Cell]) -> str:
    """The main figure: how many times as fast as plain data parallelism, by lab and model."""
    labs = [lab for lab in LABS if any(cell.lab == lab for cell in cells)]
    columns, panel_w, panel_h, top = min(2, len(labs)), 430.0, 222.0, 62.0
    rows = math.ceil(len(labs) / columns)
    drawing = Drawing(columns * panel_w + 10, top + rows * panel_h, "Speed-up over data parallelism with equal shares")
    drawing.text(14, 22, "Times as fast as DDP with equal shares", "ink bold")
    drawing.legend(14, 44, [("base", "best of DDP, FSDP2, DeepSpeed"), ("hap", "HAP's method"), ("ours", "Lopsided")])
    panels = [(lab, [(c.model, _bars(c)) for c in cells if c.lab == lab]) for lab in labs]
    if len(labs) > 1 and len(labs) % columns:
        panels.append(("geometric means", [(lab, _mean_bars([c for c in cells if c.lab == lab])) for lab in labs]))
    for number, (title, groups) in enumerate(panels):
        x0, y0 = (number % columns) * panel_w, top + (number // columns) * panel_h
        _panel(drawing, title, groups, x0, y0, panel_w, panel_h)
    return drawing.svg()


Bars = dict[str, float]


def _panel(
    drawing: Drawing,
    title: str,
    groups: Sequence[tuple[str, Bars]],
    x0: float,
    y0: float,
    width: float,
    height: float,
) -> None:
    left, right, upper, lower = x0 + 40, x0 + width - 8, y0 + 26, y0 + height - 30
    tallest = max((value for _, bars in groups for value in bars.values() if math.isfinite(value)), default=1.0)
    ticks = _ticks(max(tallest * 1.08, 1.2))
    scale = (lower - upper) / ticks[-1]
    drawing.text(left - 26, y0 + 12, title, "ink bold")
    for tick in ticks:
        drawing.line(left, lower - tick * scale, right, lower - tick * scale)
        drawing.text(left - 6, lower - tick * scale + 4, f"{tick:g}×", "dim small", "end")
    each = (right - left) / max(len(groups), 1)
    bar = min(each / 4, 17.0)
    for k, (name, bars) in enumerate(groups):
        middle = left + (k + 0.5) * each
        for place, (look, value) in enumerate(bars.items()):
            if math.isfinite(value):
                x = middle + (place - 1.5) * bar
                drawing.rect(x, lower - value * scale, bar - 1.5, value * scale, look, f"{name}, {title}: {value:.2f}×")
                if look == "ours":
                    drawing.text(x + bar / 2 - 1, lower - value * scale - 4, f"{value:.2f}", "ink small", "middle")
        drawing.text(middle, lower + 16, name, "ink small", "middle")
    drawing.line(left, lower - scale, right, lower - scale, "line", "4 3")


def _mean_bars(cells: Sequence[Cell]) -> Bars:
    every = [_bars(cell) for cell in cells]
    return {look: geometric_mean(bars[look] for bars in every) for look in ("base", "hap", "ours")}


def _bars(cell: Cell) -> Bars:
    best = cell.faster(cell.best_baseline) if cell.best_baseline else math.nan
    return {"base": best, "hap": cell.faster(HAP), "ours": cell.faster(OURS)}


def ablation(cells: Sequence[Cell]) -> str:
    """What a step takes without each addition, over what it takes with all."""
    rows = times_without(cells)
    left, right, top, each = 150.0, 760.0, 66.0, 34.0
    height = top + each * max(len(rows), 1) + 40
    drawing = Drawing(800, height, "A step without each addition, over a step with all of them")
    drawing.text(14, 22, "A step without each addition, over a step with all (measured)", "ink bold")
    drawing.text(14, 42, "a dot for each model and lab, the bar their geometric mean", "dim small")
    values = [value for found in rows.values() for _, value in found] or [1.0]
    low, high = min(0.9, min(values) * 0.97), max(1.5, max(values) * 1.03)

    def place(value: float) -> float:
        return left + (math.log(value) - math.log(low)) / (math.log(high) - math.log(low)) * (right - left)

    bottom = top + each * len(rows)
    for tick in (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0):
        if low <= tick <= high:
            drawing.line(place(tick), top - 8, place(tick), bottom, "line" if tick == 1 else "grid")
            drawing.text(place(tick), bottom + 18, f"{tick:g}×", "dim small", "middle")
    for number, (name, found) in enumerate(rows.items()):
        y = top + each * (number + 0.5)
        mean = geometric_mean(value for _, value in found)
        drawing.text(left - 14, y + 4, name if name == HAP else f"no {name}", "ink", "end")
        drawing.rect(min(place(1.0), place(mean)), y - 9, abs(place(mean) - place(1.0)), 18, "band")
        drawing.line(place(mean), y - 11, place(mean), y + 11, "line")
        for cell, value in found:
            told = f"{cell.model} on {cell.lab}: {value:.2f}×"
            drawing.dot(place(value), y, "hap" if name == HAP else "ours", 4, told)
    return drawing.svg()


def predictions(cells: Sequence[Cell], programs: Sequence[Row]) -> str:
    """Predicted against measured steps, on logarithmic axes."""
    points: list[tuple[str, float, float, str]] = []
    for cell in cells:
        for name, one in cell.counted.items():
            if "predicted_s" in one:
                look = "ours" if name == OURS else "base"
                told = f"{NAMES.get(name, name)}, {cell.model} on {cell.lab}"
                points.append((look, one["predicted_s"], one["measured_s"], told))
    for many in programs:
        for name, one in many["row"]["contestants"].items():
            if "error" in one and one["same"]:
                points.append(("hap", one["predicted_s"], one["measured_s"], f"{name}: {many['model']}, {many['lab']}"))
    size, left, top = 420.0, 66.0, 66.0
    drawing = Drawing(left + size + 20, top + size + 50, "Predicted against measured seconds of a step")
    drawing.text(14, 22, f"A step: predicted against measured (shaded: within {GOAL_WORST:.0%})", "ink bold")
    legend = [("ours", "our plans"), ("base", "other plans and baselines")]
    drawing.legend(14, 44, [*legend, ("hap", "programs of one model")] if programs else legend)
    every = [value for _, predicted, measured, _ in points for value in (predicted, measured)] or [0.1, 1.0]
    low, high = math.log(min(every) * 0.8), math.log(max(every) * 1.25)

    def place(seconds: float) -> float:
        return (math.log(seconds) - low) / (high - low) * size

    a, b = math.exp(low), math.exp(high)
    band = 1 + GOAL_WORST
    drawing.area(
        [
            (left + place(a), top + size - place(a)),
            (left + place(a * band), top + size - place(a)),
            (left + place(b), top + size - place(b / band)),
            (left + place(b), top + size - place(b)),
            (left + place(b / band), top + size - place(b)),
            (left + place(a), top + size - place(a * band)),
        ],
        "band",
    )
    for power in range(-4, 3):
        for times in (1, 2, 5):
            tick = times * 10.0**power
            if a <= tick <= b:
                words = f"{tick:g} s" if tick >= 1 else f"{tick * 1e3:g} ms"
                drawing.line(left + place(tick), top, left + place(tick), top + size)
                drawing.line(left, top + size - place(tick), left + size, top + size - place(tick))
                drawing.text(left + place(tick), top + size + 16, words, "dim small", "middle")
                drawing.text(left - 6, top + size - place(tick) + 4, words, "dim small", "end")
    drawing.line(left, top + size, left + size, top, "line")
    for look in ("base", "hap", "ours"):  # ours on top
        for own, predicted, measured, told in points:
            if own == look:
                words = f"{told}: predicted {predicted * 1e3:.0f} ms, measured {measured * 1e3:.0f} ms"
                drawing.dot(left + place(measured), top + size - place(predicted), look, 3.5, words)
    drawing.text(left + size / 2, top + size + 38, "measured", "dim", "middle")
    drawing.text(16, top + size / 2, "predicted", "dim", "middle", -90)
    return drawing.svg()


def timeline(cell: Cell) -> str:
    """The predicted step of our plan in one cell: when devices compute, and when something is sent."""
    own = cell.row["contestants"][OURS]
    lanes: dict[str, list[list[float]]] = own["timeline"]
    left, right, top, each = 150.0, 760.0, 60.0, 30.0
    end = max([span[1] for spans in lanes.values() for span in spans] + [own["measured_s"] * 1e3])
    drawing = Drawing(800, top + each * len(lanes) + 46, f"The step of {cell.model} on {cell.lab}")
    drawing.text(14, 22, f"{cell.model} on {cell.lab}: the predicted step", "ink bold")
    drawing.legend(14, 44, [("ours", "computes"), ("send", "sends"), ("base", "measured step ends")])

    def place(ms: float) -> float:
        return float(left + ms / end * (right - left))

    bottom = top + each * len(lanes)
    for tick in _ticks(end, 6):
        if tick <= end:
            drawing.line(place(tick), top, place(tick), bottom)
            drawing.text(place(tick), bottom + 18, f"{tick:g} ms", "dim small", "middle")
    for number, (name, spans) in enumerate(sorted(lanes.items(), key=lambda lane: lane[0] == "network")):
        y = top + each * number
        drawing.text(left - 12, y + 19, name, "ink small", "end")
        for start, stop in spans:
            look = "send" if name == "network" else "ours"
            drawing.rect(
                place(start), y + 6, place(stop) - place(start), each - 12, look, f"{start:.1f} to {stop:.1f} ms"
            )
    measured = place(own["measured_s"] * 1e3)
    drawing.rect(measured - 1, top, 2, bottom - top, "base", f"measured: {own['measured_s'] * 1e3:.0f} ms")
    return drawing.svg()


# Writing


def write(results: Path = RESULTS, docs: Path = DOCS) -> list[Path]:
    """The page and the pictures; those that nothing belongs to any more go."""
    cells, zoo, ablated = (read_cells(results, kind) for kind in ("proof", "zoo", "ablation"))
    programs = read_programs(results)
    about = {
        lab: json.loads((results / f"proof-{lab}.json").read_text())
        for lab in LABS
        if (results / f"proof-{lab}.json").is_file()
    }
    pictures: dict[str, str] = {}
    if cells:
        drawn = [cell for cell in cells if OURS in cell.counted] or cells
        pictures = {"speedup": speedups(drawn), "predicted": predictions([*cells, *zoo], programs)}
    if ablated:
        pictures["ablation"] = ablation(ablated)
    for cell in cells:
        if OURS in cell.counted and not cell.reached:
            pictures[f"timeline-{cell.lab}-{cell.model}"] = timeline(cell)
    folder = docs / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("timeline-*.svg"):
        old.unlink()
    for name, picture in pictures.items():
        (folder / f"{name}.svg").write_text(picture)
    (docs / "proof.md").write_text(proof_page(cells, zoo, ablated, programs, about))
    return [docs / "proof.md", *(folder / f"{name}.svg" for name in pictures)]


if __name__ == "__main__":
    for written in write():
        print(written.relative_to(HERE.parent))
