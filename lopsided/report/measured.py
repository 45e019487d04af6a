"""The section of a run: predicted against measured, line by line.

In: a `Run`. Out: `Html`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lopsided.calibration.comparison import ComparisonLine, confront
from lopsided.calibration.run_record import NETWORK, Run
from lopsided.report.comparison_text import error_text, verdict
from lopsided.report.figures import bar, steps_plot
from lopsided.report.listing import bytes_text, seconds_text
from lopsided.report.markup import Html, join, tag
from lopsided.report.parts import cell, row_of, section, swatch, table, words_list
from lopsided.report.plan_text import plural
from lopsided.report.words import percent


def run_section(run: Run) -> Html:
    """Line by line what was predicted and what was measured, under what it is about."""
    found = confront(run)
    step = found.step
    sentences = [
        f"The median of {len(run.timed_s):,} {plural('step', len(run.timed_s))} took {seconds_text(step.measured)}, "
        f"and {seconds_text(step.predicted)} were predicted: {error_text(step.error)}, "
        f"while measured steps scatter by ± {percent(found.noise)}."
    ]
    whose, worst = found.worst
    if run.devices[0].recorded:
        part = abs(worst.predicted - worst.measured) / step.measured if step.measured else 0.0
        name = worst.what if whose == NETWORK else f"{worst.what} on {whose}"
        said = verdict(worst)
        sentences.append(f"Most of it is due to {name}: {said}, {percent(part)} of the step.")
    tables = [
        ("all it computes", found.busy, seconds_text),
        ("op, all devices together", found.classes, seconds_text),
        ("collective", found.collectives, seconds_text),
        ("peak of memory", found.memory, bytes_text),
    ]
    hardware = ", ".join(dict.fromkeys(device.hardware for device in run.devices if device.hardware))
    return section(
        "run",
        "Predicted against measured",
        words_list(sentences),
        tag("div", steps_plot(run.timed_s, step.predicted), class_="steps-box"),
        tag("p", "A dot for each step that was timed; the line is the prediction.", class_="hint"),
        *(_confronted(title, lines, said) for title, lines, said in tables if lines),
        tag(
            "p",
            swatch("foreseen"),
            " predicted, ",
            swatch("found"),
            f" measured: {run.model}, with torch {run.torch}{f' on {hardware}' if hardware else ''}.",
            class_="hint",
        ),
    )


def _confronted(title: str, lines: Sequence[ComparisonLine], said: Callable[[float], str]) -> Html:
    most = max(max(line.predicted, line.measured) for line in lines)
    rows = []
    for line in lines:
        drawn = join([bar([("foreseen", line.predicted)], most), bar([("found", line.measured)], most)])
        off = verdict(line, of_bytes=said is bytes_text)
        rows.append(
            row_of(
                f"{line.what} × {line.times}" if line.times > 1 else line.what,
                cell(drawn, class_="wide two"),
                cell(said(line.predicted), "predicted"),
                cell(said(line.measured), "measured"),
                cell(off, "", "off"),
            )
        )
    heads = (title, "", ">predicted", ">measured", "the prediction is")
    return table(heads, rows, label=f"Predicted and measured: {title}", class_="against")
