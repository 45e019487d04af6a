"""The page in a real browser without a head: no complaint, no request, keys that work, light and dark, wide and narrow.

Needs Chromium, its driver and selenium. With LOPSIDED_BROWSER=install, root and apt-get they are installed; else the
tests are skipped where they are missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lopsided.report.page import report_html
from tests.support.plans import ZERO, plan_of
from tests.support.recorded_runs import HOSTILE, hostile_plan, run_of

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_INSTALL = ("apt-get", "install", "-y", "-q", "chromium", "chromium-driver")


def _found() -> tuple[str, str] | None:
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
    from selenium.webdriver.chrome.service import Service

    if _found() is None and os.environ.get("LOPSIDED_BROWSER") == "install" and os.geteuid() == 0:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(_INSTALL, check=False, capture_output=True, timeout=600)
    paths = _found()
    if paths is None:
        pytest.skip(f"there is no Chromium with its driver: {' '.join(_INSTALL)}")
    options = webdriver.ChromeOptions()
    options.binary_location = paths[0]
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    try:
        made = webdriver.Chrome(options=options, service=Service(paths[1]))
    except Exception as error:
        # A machine without what a browser needs (shared memory, fonts) says nothing about the page.
        pytest.skip(f"the browser does not start: {next(iter(str(error).splitlines()), type(error).__name__)}")
    made.set_page_load_timeout(60)
    yield made
    made.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    plan, hostile = plan_of(ZERO), hostile_plan()
    made = {
        "plan": report_html(plan, title="block"),
        "run": report_html(plan, run_of(plan)),
        "hostile": report_html(hostile, run_of(hostile, hardware=HOSTILE, model=HOSTILE)),
    }
    for name, page in made.items():
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


def opened(driver: Any, page: Path, *, width: int = 1280, scheme: str = "light") -> None:
    """The page at this width and in this scheme; forgets what was logged before."""
    driver.get_log("performance")
    driver.get_log("browser")
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get(page.as_uri())


def requests(driver: Any) -> list[str]:
    messages = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def pressed(driver: Any, *keys: str) -> None:
    """Keys to what has the focus, as a person without a mouse would."""
    from selenium.webdriver.common.action_chains import ActionChains

    actions = ActionChains(driver)
    for key in keys:
        actions.send_keys(key)
    actions.perform()


@pytest.mark.parametrize("name", ["plan", "run", "hostile"])
def test_the_page_opens_without_complaint_or_request(driver: Any, pages: dict[str, Path], name: str) -> None:
    opened(driver, pages[name])
    assert driver.get_log("browser") == []
    assert requests(driver) == [pages[name].as_uri()]
    assert driver.execute_script("return window.bad") is None
    assert driver.execute_script("return document.querySelectorAll('.axis text').length") >= 3


def test_the_timeline_zooms_and_is_walked_by_keys(driver: Any, pages: dict[str, Path]) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(driver, pages["plan"])
    for _ in range(30):
        pressed(driver, Keys.TAB)
        if driver.execute_script("return document.activeElement.classList.contains('scroller')"):
            break
    width = "return document.querySelector('.sheet').getBoundingClientRect().width"
    before = driver.execute_script(width)
    pressed(driver, Keys.ARROW_RIGHT)
    first = driver.find_element("id", "readout").text
    pressed(driver, Keys.ARROW_RIGHT)
    second = driver.find_element("id", "readout").text
    pressed(driver, Keys.ARROW_DOWN)
    assert len({first, second, driver.find_element("id", "readout").text}) == 3
    assert "box/small-* (2)" in driver.find_element("id", "readout").text
    pressed(driver, "+", "+", "+")
    assert driver.execute_script(width) == pytest.approx(before * 1.5**3, rel=0.01)
    pressed(driver, "-")
    assert driver.execute_script(width) == pytest.approx(before * 1.5**2, rel=0.01)
    pressed(driver, "0")
    assert driver.execute_script(width) == pytest.approx(before, rel=0.01)
    assert driver.get_log("browser") == []


def test_light_and_dark_are_readable(driver: Any, pages: dict[str, Path]) -> None:
    """Text against its ground, by the measure of WCAG: 4.5 is enough for small print."""
    seen = []
    for scheme in ("light", "dark"):
        opened(driver, pages["run"], scheme=scheme)
        ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        for where in (".lede", ".hint", "thead th", ".chip", "nav a"):
            ink, own = driver.execute_script(
                "const e = document.querySelector(arguments[0]), s = getComputedStyle(e);"
                "return [s.color, s.backgroundColor]",
                where,
            )
            behind = ground if own == "rgba(0, 0, 0, 0)" else own
            assert contrast(ink, behind) >= 4.5, (scheme, where)
        seen.append(ground)
    assert luminance(seen[0]) > 0.8
    assert luminance(seen[1]) < 0.1


def luminance(colour: str) -> float:
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("width", [400, 1600])
def test_pages_of_any_width_do_not_run_over(driver: Any, pages: dict[str, Path], width: int) -> None:
    opened(driver, pages["run"], width=width)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    # All of every table is inside as well; only the timeline and the row of links scroll.
    over = driver.execute_script(
        "return [...document.querySelectorAll('td, tbody th, p, li')].filter(e => !e.closest('.scroller')"
        " && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.textContent.slice(0, 40))"
    )
    assert over == []
