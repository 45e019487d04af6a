"""Files of JSON that people read and strangers send: written with a line for each line of text, read key by key.

In: a path or a text. Out: `Fields`, which hand out what is there, of the type that is asked for, or refuse and say
where. Plans (`planfile`) and runs (`record`) are such files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lopsided.errors import InputError, LopsidedError, shown

MOST_BYTES_OF_A_FILE = 128 * 2**20

_WIDTH = 140
_MOST_SECONDS = 1e12
_MOST_WORDS = 10_000


@dataclass(frozen=True, slots=True)
class FileKind:
    """What a file holds: the error that refuses it, what it is called, and what writes such a file."""

    error: type[InputError]
    what: str
    made_by: str


def read_text(path: str | Path, kind: FileKind) -> str:
    path = Path(path)
    try:
        # Only plain files: a pipe would wait for ever, a device never end.
        if not path.is_file():
            what = "there is no such file"
            if path.exists():
                what = "this is a directory" if path.is_dir() else "this is not a plain file"
            raise kind.error(what, where=str(path), do=f"give the path of a {kind.what} file; {kind.made_by}")
        if path.stat().st_size > MOST_BYTES_OF_A_FILE:
            raise kind.error(
                f"the file is larger than {MOST_BYTES_OF_A_FILE:,} bytes",
                where=str(path),
                do=f"give a {kind.what} file",
            )
        return path.read_bytes().decode()
    except (OSError, ValueError) as error:
        raise kind.error(f"the file cannot be read: {error}", where=str(path), do=kind.made_by) from None


def write_text(path: str | Path, text: str, kind: FileKind) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise unwritable(path, kind, getattr(error, "strerror", None) or str(error)) from None


def check_writable(path: str | Path, kind: FileKind) -> None:
    """Refuse a path to which nothing can be written, before time is spent on making one."""
    path = Path(path)
    try:
        if path.is_dir():
            raise unwritable(path, kind, "this is a directory", "name a file in it")
        if not path.parent.is_dir():
            raise unwritable(path, kind, f"there is no folder {shown(str(path.parent))}", "make the folder first")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise unwritable(path, kind, "it is not allowed")
    except (OSError, ValueError) as error:
        raise unwritable(path, kind, getattr(error, "strerror", None) or str(error)) from None


def unwritable(path: str | Path, kind: FileKind, why: str, do: str = "") -> InputError:
    do = do or "name a file in a folder that can be written to and has room"
    return kind.error(f"the {kind.what} cannot be written: {why}", where=str(path), do=do)


def written(value: object, indent: str = "") -> str:
    """JSON with a line for each line of text, and a row of numbers on one."""
    inner = indent + "  "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {written(part, inner)}" for key, part in value.items()]
        line = f"{{{', '.join(parts)}}}"
        if indent and len(line) <= _WIDTH and not any(isinstance(part, dict | list) for part in value.values()):
            return line
    elif isinstance(value, list) and any(isinstance(part, str | dict | list) for part in value):
        parts = [written(part, inner) for part in value]
    else:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    left, right = "{}" if isinstance(value, dict) else "[]"
    return left + ",".join(f"\n{inner}{part}" for part in parts) + (f"\n{indent}" if parts else "") + right


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of the file and where it is: hands out what is there, of the type that is asked for."""

    items: Mapping[str, object]
    where: str
    kind: FileKind

    def refuse(self, what: str, do: str) -> InputError:
        return self.kind.error(what, where=self.where, do=do)

    def has_only(self, keys: Sequence[str]) -> None:
        for key in self.items:
            if key not in keys:
                raise self.refuse(f"{shown(key)} is not known here", f"leave it out; known are {', '.join(keys)}")

    @contextmanager
    def located(self, what: str) -> Iterator[None]:
        """What others refuse, with the place in the file."""
        try:
            yield
        except LopsidedError as error:
            place = ", ".join(filter(None, (self.where, what, error.where)))
            raise self.kind.error(error.what, where=place, do=error.do, **error.facts) from None

    def get(self, key: str) -> object:
        if key not in self.items:
            raise self.refuse(f'"{key}" is missing', f"undo the edit, or make the {self.kind.what} anew")
        return self.items[key]

    def wrong(self, key: str, value: object, wanted: str) -> InputError:
        return self.refuse(f'"{key}" is {shown(value)}', f"give {wanted}")

    def text(self, key: str) -> str:
        return self._text(key, self.get(key))

    def _text(self, key: str, value: object) -> str:
        # What is said in such a file is printed on terminals.
        if not isinstance(value, str) or len(value) > _MOST_WORDS or not value.isprintable():
            raise self.wrong(key, value, f"a text of one line, at most {_MOST_WORDS:,} characters")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(self._text(key, part) for part in self.entries(key))

    def lines(self, key: str) -> tuple[str, ...]:
        """Lines of a text that has its own reader."""
        parts = self.entries(key)
        for part in parts:
            if not isinstance(part, str) or "\n" in part:
                raise self.wrong(key, part, "a list of lines")
        return tuple(str(part) for part in parts)

    def entries(self, key: str) -> list[object]:
        value = self.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, value, "a list")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def seconds(self, key: str, *, null: bool = False, least: float = 0.0) -> float:
        return self._number(key, self.get(key), _MOST_SECONDS, null=null, least=least)

    def numbers(self, key: str) -> tuple[float, ...]:
        return tuple(self._number(key, part, 1.0) for part in self.entries(key))

    def _number(self, key: str, value: object, most: float, *, null: bool = False, least: float = 0.0) -> float:
        if value is None and null:
            return math.inf
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.wrong(key, value, f"a number from 0 to {most:g}{', or null' if null else ''}")
        return float(value)

    def whole(self, key: str) -> int:
        return self._whole(key, self.get(key))

    def wholes(self, key: str) -> tuple[int, ...]:
        return tuple(self._whole(key, part) for part in self.entries(key))

    def _whole(self, key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise self.wrong(key, value, "a whole number of 0 or more")
        return value

    def part(self, key: str) -> Fields:
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object: { ... }")
        return Fields(value, f'{self.where}, "{key}"', self.kind)

    def parts(self, key: str) -> list[Fields]:
        found = []
        for k, value in enumerate(self.entries(key), 1):
            if not isinstance(value, dict):
                raise self.wrong(key, value, "a list of objects: { ... }")
            found.append(Fields(value, f'{self.where}, "{key}" {k}', self.kind))
        return found


def parse_fields(text: str, where: str, kind: FileKind) -> Fields:
    """The object that a text is."""

    def refuse(what: str) -> InputError:
        return kind.error(what, where=where, do=f"undo the edit, or make the {kind.what} anew: {kind.made_by}")

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise refuse(f"{shown(twice)} is given twice")
        return found

    def constant(name: str) -> object:
        raise refuse(f"{name} is not a number of a {kind.what}")

    if len(text) > MOST_BYTES_OF_A_FILE:
        raise refuse(f"the text is longer than {MOST_BYTES_OF_A_FILE:,} characters")
    try:
        value = json.loads(text, object_pairs_hook=once, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise refuse(f"this is not JSON: {error.msg} in line {error.lineno}") from None
    except RecursionError:
        raise refuse("the lists of this file nest too deep") from None
    except ValueError:  # Python does not read integers of more than some thousand digits
        raise refuse("a number in this file has too many digits") from None
    if not isinstance(value, dict):
        raise refuse(f"this is {shown(value)}, not a {kind.what}")
    return Fields(value, where, kind)
