"""HTML that cannot be broken out of: text is escaped unless it was made here.

In: text of anybody. Out: `Html`. The one idea: the type says what is markup already (`Html`, made by `tag` alone);
every other string is text, and `tag` escapes it, in content and in attributes alike.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable


class Html(str):
    """Markup, as it is to stand in the page."""

    __slots__ = ()


_EMPTY = {"meta", "rect", "line", "col", "input", "path", "br"}
"""Tags without content; the SVG ones among them are closed by their slash."""


def tag(name: str, /, *inside: str | None, **attributes: str | float | bool | None) -> Html:
    """An element. None and False leave an attribute away, True gives it no value; `class_` is `class`, `a_b` is `a-b`.

    >>> tag("p", "1 < 2", class_="sum")
    '<p class="sum">1 &lt; 2</p>'
    """
    told = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _EMPTY:
        return Html(f"<{name}{told}/>")
    return Html(f"<{name}{told}>{join(inside)}</{name}>")


def join(parts: Iterable[str | None], between: str = "") -> Html:
    return Html(between.join(text(part) for part in parts if part is not None))


def text(part: str) -> Html:
    """Text made safe. What cannot be printed (control characters, changes of direction) is a question mark."""
    if isinstance(part, Html):
        return part
    plain = "".join(c if c.isprintable() or c in "\n\N{NO-BREAK SPACE}" else "?" for c in part)
    return Html(html.escape(plain))


def _attribute(key: str, value: str | float | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    return f' {name}="{text(value if isinstance(value, str) else number(value))}"'


def number(value: float) -> str:
    """Short: four digits behind the point, and none that say nothing.

    >>> number(12.5), number(3.0), number(0.123456)
    ('12.5', '3', '0.1235')
    """
    return f"{value:.4f}".rstrip("0").rstrip(".")


def data(value: object, **attributes: str) -> Html:
    """Data for the page's script: JSON in which nothing can end the element."""
    told = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    safe = told.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return tag("script", Html(safe), type="application/json", **attributes)
