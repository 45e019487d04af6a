"""The page: its numbers are the plan's, nothing in it is anybody's but ours, and it needs nothing from anywhere."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from lopsided.report import figures
from lopsided.report.chart import predicted_chart
from lopsided.report.figures import ticks, timeline
from lopsided.report.listing import bytes_text, listing, seconds_text
from lopsided.report.markup import Html, data, tag, text
from lopsided.report.page import report_html
from lopsided.report.parts import flowing
from lopsided.report.program import coloured
from tests.support.plans import ZERO, plan_of
from tests.support.recorded_runs import HOSTILE, hostile_plan, run_of

EMPTY = {"meta", "rect", "line", "col", "input", "path", "br"}


class Page(HTMLParser):
    """Every tag with its attributes, every text under the tags it stands in; complains where tags do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def words(self) -> str:
        told = " ".join(data for tag, data in self.texts if tag not in ("script", "style"))
        return re.sub(r"\s+", " ", told)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(report_html(plan_of(ZERO), title="block"))


@pytest.fixture(scope="module")
def page_of_run() -> Page:
    plan = plan_of(ZERO)
    return Page(report_html(plan, run_of(plan)))


def test_sections_are_there_and_linked(page: Page) -> None:
    sections = {attributes["id"] for attributes in page.named("section")}
    assert sections == {"time", "devices", "classics", "worth", "program", "about"}
    links = {str(attributes["href"]) for attributes in page.named("a")}
    assert links == {f"#{name}" for name in sections}
    assert ("h1", "block") in page.texts


def test_numbers_are_those_of_the_plan(page: Page) -> None:
    plan, words = plan_of(ZERO), page.words()
    assert f"is predicted to take {seconds_text(plan.step_s)}".replace(" ", " ") in words.replace("\xa0", " ")
    for share in (*plan.shares.work, *plan.shares.of("state")):
        assert f"{share * 100:.2f} %" in words
    for held, limit in zip(plan.memory_bytes, ("8.0 GiB", "4.0 GiB", "4.0 GiB"), strict=True):
        assert f"{bytes_text(held)} of {limit}" in words
    assert seconds_text(plan.baselines[0].step_s) in words
    assert "3.00 ×" in words
    assert "does not fit" in words
    assert "needed: nothing fits without" in words
    for note in plan.notes:
        assert note in words
    for row in listing(plan):
        if row.compute_s:
            assert seconds_text(row.compute_s) in words


def test_bars_are_as_long_as_their_numbers(page: Page) -> None:
    widths = [str(a["width"]) for a in page.named("rect") if a.get("class") == "share-work"]
    assert widths == ["100%", "50%", "50%"]
    assert [a["width"] for a in page.named("rect") if a.get("class") == "ours"] == ["33.33333%"]


def test_blocks_of_the_timeline_are_those_of_the_chart(page: Page) -> None:
    told = json.loads(next(data for tag, data in page.texts if data.startswith('{"step_s"')))
    chart = predicted_chart(plan_of(ZERO))
    assert told["step_s"] == chart.step_s
    assert [lane[0] for lane in told["lanes"]] == [*(strip.label for strip in chart.strips), "network"]
    assert [len(lane[1]) for lane in told["lanes"]] == [
        *(len(strip.blocks) for strip in chart.strips),
        len(chart.network),
    ]
    start, taken, what, _ = told["lanes"][0][1][-1]
    assert start + taken == pytest.approx(chart.step_s, rel=1e-4)
    assert 0 <= what < len(told["strings"])


def test_a_run_is_shown_against_its_plan(page_of_run: Page) -> None:
    plan = plan_of(ZERO)
    words = page_of_run.words().replace("\xa0", " ")
    assert "run" in {attributes["id"] for attributes in page_of_run.named("section")}
    assert f"took {seconds_text(1.25 * plan.step_s)}, and {seconds_text(plan.step_s)} were predicted" in words
    assert "20 % too short" in words
    assert "a box" in words
    lanes = [str(a["aria-label"]) for a in page_of_run.named("svg") if str(a.get("class", "")).startswith("lane")]
    assert len(lanes) == 2 + 3 + 2  # kinds, devices, and the network of both


def test_nothing_comes_from_elsewhere(page: Page, page_of_run: Page) -> None:
    for each in (page, page_of_run):
        for name, attributes in each.tags:
            assert name not in ("link", "img", "iframe", "object", "embed", "base", "form")
            assert not {"src", "style", "srcset", "action"} & {*attributes}, (name, attributes)
            assert not [key for key in attributes if key.startswith("on")]
        policy = next(a["content"] for a in each.named("meta") if a.get("http-equiv") == "Content-Security-Policy")
        assert str(policy).startswith("default-src 'none'; style-src 'sha256-")
        assert "unsafe" not in str(policy)
        style = next(data for tag, data in each.texts if tag == "style")
        assert not re.search(r"@import|https?:|url\((?!#)", style)


def test_everything_can_be_had_without_a_mouse(page: Page) -> None:
    for attributes in page.named("button"):
        assert attributes["aria-label"]
    for attributes in page.named("svg"):
        assert attributes.get("aria-label") or attributes.get("aria-hidden") == "true"
    for attributes in page.named("table"):
        assert attributes["aria-label"]
    assert [a["tabindex"] for a in page.named("div") if a.get("class") == "scroller"] == ["0"]


# Strangers


def test_names_of_strangers_stay_text() -> None:
    plan = hostile_plan()
    run = run_of(plan, hardware=HOSTILE, model=HOSTILE)
    source = report_html(plan, run)
    page = Page(source)
    plain = Page(report_html(plan_of(), run_of(plan_of())))
    assert {name for name, _ in page.tags} == {name for name, _ in plain.tags}
    assert len(page.named("script")) == len(plain.named("script")) == 2
    assert HOSTILE in page.words()
    assert "<b>bold" in page.words()
    assert "<i>big&" in page.words()
    assert "<img" not in source
    for _, attributes in page.tags:
        assert not [key for key in attributes if key.startswith("on") or key == "src"]


@pytest.mark.parametrize("bad", ["</script>", "<!--", "]]>", "&lt;", "'\"", "\u202e", "\x00", "\x1b[0m"])
def test_text_is_escaped_everywhere(bad: str) -> None:
    made = tag("p", bad, title=bad)
    assert isinstance(made, Html)
    parsed = Page(made)
    plain = "".join(c if c.isprintable() else "?" for c in bad)
    assert parsed.words() == plain
    assert parsed.named("p") == [{"title": plain}]
    held = data([bad])
    assert json.loads(held.removeprefix('<script type="application/json">').removesuffix("</script>")) == [bad]
    assert held.count("<") == 2


def test_html_is_not_escaped_twice() -> None:
    assert tag("p", tag("b", "<")) == "<p><b>&lt;</b></p>"
    assert text(tag("br")) == "<br/>"


# Parts


def test_placements_are_coloured_and_nothing_else() -> None:
    made = coloured("linear = linear(x: S0, up.weight, bias: S0x3/64@state→R) : P [table]")
    chips = re.findall(r'<i class="chip chip-([^"]*)">([^<]*)</i>', made)
    assert chips == [("S0", "S0"), ("S0-by", "S0x3/64@state"), ("R", "R"), ("P", "P")]
    assert "chip" not in coloured("S0 = split(R) and I")


def test_numbers_keep_their_units() -> None:
    assert flowing("dp-ev takes 3.00 ms more") == (
        '<span class="held-together">dp-ev</span> takes 3.00\N{NO-BREAK SPACE}ms more'
    )


@pytest.mark.parametrize("whole", [1e-7, 0.0123, 0.99, 1.0, 7.3, 1e4])
def test_ticks_are_few_and_round(whole: float) -> None:
    found = ticks(whole)
    assert 3 <= len(found) <= 9
    assert found[0] == 0
    assert found[-1] <= whole


def test_long_steps_are_drawn_with_fewer_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    chart = predicted_chart(plan_of(ZERO))
    whole = timeline(chart)
    monkeypatch.setattr(figures, "_MOST_BLOCKS", 12)
    fewer = timeline(chart)
    assert fewer.count("<rect") < whole.count("<rect")
    told = json.loads(fewer[fewer.index('{"step_s"') : fewer.rindex("</script>")])
    for lane, strip in zip(told["lanes"], chart.strips, strict=False):
        assert sum(taken for _, taken, *_ in lane[1]) == pytest.approx(
            sum(block.seconds for block in strip.blocks), rel=1e-3
        )
