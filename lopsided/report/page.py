"""A plan, and a run of it, as one page to look at: no network, no other files.

In: a `Plan` and perhaps a `Run`. Out: HTML.

    markup     text that cannot be broken out of
    words      what one sees, in sentences
    figures    bars and the timeline, as SVG
    parts      tables, lists, chips
    sections, program, measured    what the page is made of
    page.css, page.js    how it looks, and what it does when looked at closely

Names in plans come from strangers. All text is escaped (`markup`), and should that fail, the page's policy allows no
script and no style but the two here, known by their hashes, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from lopsided.calibration.run_record import Run
from lopsided.planner.plan_data import Plan
from lopsided.report.chart import measured_chart, predicted_chart
from lopsided.report.figures import hatches
from lopsided.report.markup import Html, tag
from lopsided.report.measured import run_section
from lopsided.report.program import program_section
from lopsided.report.sections import (
    about_section,
    classics_section,
    devices_section,
    head,
    time_section,
    worth_section,
)

__all__ = ["report_html"]

_LINKS = (
    ("time", "Time"),
    ("run", "Measured"),
    ("devices", "Devices"),
    ("classics", "Classics"),
    ("worth", "Worth"),
    ("program", "Program"),
    ("about", "About"),
)


def report_html(plan: Plan, run: Run | None = None, *, title: str = "") -> str:
    """The page. The title is the model's name as a rule, which a plan does not know and a run does."""
    name = title or (run.model if run else "") or "A plan"
    style, script = _file("page.css"), _file("page.js")
    sections = {
        "time": time_section(predicted_chart(plan), measured_chart(run) if run else None),
        "run": run_section(run) if run else None,
        "devices": devices_section(plan),
        "classics": classics_section(plan),
        "worth": worth_section(plan),
        "program": program_section(plan),
        "about": about_section(plan),
    }
    links = [tag("a", words, href=f"#{where}") for where, words in _LINKS if sections[where]]
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    top = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"{name} on {plan.cluster.name}"),
        tag("style", Html(style)),
    )
    body = tag(
        "body",
        hatches(),
        tag("a", "Skip to the timeline", href="#time", class_="skip"),
        head(plan, name, run),
        tag("nav", *links, aria_label="Sections"),
        tag("main", *sections.values()),
        tag("script", Html(script)),
    )
    page = tag("html", top, body, lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _file(name: str) -> str:
    return (resources.files("lopsided.report") / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
