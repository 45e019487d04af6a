"""What `parallelize` tells while it works, who hears it, and when nobody does."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from lopsided.planner.plan_data import Baseline
from lopsided.runtime.progress import Announcer, about_plan, shown
from tests.support import plans

_log = logging.getLogger("lopsided")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From here on it is as under torchrun: called in the test, for pytest looks for loggers like this beforehand."""

    def begin() -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        monkeypatch.setattr(_log, "propagate", False)  # pytest's own handlers are the root's

    return begin


def test_rank_0_shows_it_on_stderr(start: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    start()
    heard: list[str] = []
    with shown(quiet=False, is_first=True):
        tell = Announcer(heard.append, logs=True)
        tell("planning")
        tell.passing("3 s left")  # not a terminal, and not five seconds later
    _log.info("later")
    assert capsys.readouterr().err == "lopsided  planning\n"
    assert heard == ["planning"]
    assert not _log.handlers
    assert _log.level == logging.NOTSET


class Terminal:
    """A stream that says it is one."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def test_a_terminal_overwrites_what_passes(start: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with shown(quiet=False, is_first=True):
        tell = Announcer(lambda _: None, logs=True)
        tell.passing("2 s left")
        tell.passing("1 s left")
    blank = "\r" + " " * 18 + "\r"
    assert terminal.text == f"lopsided  2 s left{blank}lopsided  1 s left{blank}"


def own_level() -> None:
    _log.setLevel(logging.WARNING)


def own_handler() -> None:
    _log.addHandler(logging.NullHandler())


@pytest.mark.parametrize(
    ("quiet", "is_first", "before"),
    [(True, True, None), (False, False, None), (False, True, own_level), (False, True, own_handler)],
)
def test_nothing_is_shown(
    quiet: bool,
    is_first: bool,
    before: Callable[[], None] | None,
    start: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where it is to be quiet, on other ranks, and where the script says how it logs."""
    start()
    try:
        if before is not None:
            before()
        with shown(quiet=quiet, is_first=is_first):
            Announcer(lambda _: None, logs=is_first)("planning")
    finally:
        _log.setLevel(logging.NOTSET)
        _log.handlers.clear()
    assert capsys.readouterr().err == ""


def test_seconds_that_are_left_are_told_once_a_second() -> None:
    told: list[str] = []
    tell = Announcer(told.append, logs=False)
    part_done = tell.countdown("measuring", 20.0)
    part_done(1, 10)
    assert told == []


def test_what_was_chosen_why_and_who_is_idle() -> None:
    plan = plans.plan_of()
    classics = (Baseline("dp-ev", "data parallelism, equal shares", 2 * plan.step_s, True), *plan.baselines[:0])
    chosen, why = about_plan(replace(plan, baselines=classics))
    assert f"on {plan.on.devices} of {plan.cluster.devices} devices: {plan.devices[0]} " in chosen
    assert why.startswith("why: data parallelism, equal shares would take ")
    smaller = replace(plan, on=plan.cluster.only([0]), shares=type(plan.shares)((1.0,)))
    *_, idle = about_plan(smaller)
    assert idle.startswith(f"idle: {plan.cluster.device_names[1]}")
