"""One strict codec for files: frozen dataclasses to data of JSON or TOML and back, by their annotations.

In: a text or a path, and the dataclass that says what such a file holds. Out: an object of it, or a refusal that names
the key, what was found there and what to write instead. The one idea: a file's format is declared once, as types,

    @dataclass(frozen=True)
    class Step:
        seconds: Seconds                                    # bounds belong to the type
        bytes: Annotated[int, Key(was=("size",))] = 0       # an earlier version called it "size"; may be left out
        spans: tuple[Span, ...] = ()

and nothing is read that is not declared: unknown keys, keys given twice, other types, numbers that are none or out of
bounds, files that are too large or nest too deep are refused. Checks that need more than one field belong into
`__post_init__`, where whoever makes such an object runs them; what it refuses is told with the place in the file.

Known are str, int, float, bool, None, object (anything, as it is), Literal, unions with None, tuples, mappings from
texts and dataclasses; everything else has a `Key` with functions of its own.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lopsided.errors import InputError, LopsidedError, close_words, shown

MOST_BYTES_OF_A_FILE = 128 * 2**20

_WIDTH = 140
_MOST_CHARACTERS = 10_000
# `a.a.a = 1` in a line of TOML nests tables, which takes the square of the number of its dots to read.
_MOST_DOTS = 1000
# So much is read of a file that is there, to see of which kind it is.
_HEAD_BYTES = 2**16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FileKind:
    """What a file holds: the error that refuses it, what it is called, and what writes such a file."""

    error: type[InputError]
    what: str
    made_by: str
    format: str = ""  # what its "format" says, where it has one, and the "version" that is written
    version: int = 0
    toml: bool = False
    most_bytes: int | None = None  # None: MOST_BYTES_OF_A_FILE
    do: str = ""  # all there is to do about a file that nobody edits by hand
    known_by: bytes = b""  # a pattern that the beginning of each such file matches, where no "format" says what it is

    def label(self, key: str) -> str:
        """A key of ours, as people see it in such a file."""
        return key if self.toml else f'"{key}"'


# How a field is written


@dataclass(frozen=True, slots=True)
class Key:
    """What an annotation cannot say of a value in a file: `Annotated[int, Key(least=1)]`."""

    name: str = ""  # its key, where that is not the field's name
    was: tuple[str, ...] = ()  # keys of earlier versions, which are still read
    least: float = -math.inf
    most: float = math.inf
    null: float | None = None  # the number that null stands for
    fits: Callable[[Any], object] | None = None  # what else must hold
    wanted: str = ""  # in words, for who gives something else
    example: str = ""
    rare: bool = False  # left out of a file where it is the default
    read: Callable[[object, Place], object] | None = None  # in place of what the annotation says
    write: Callable[[Any], object] | None = None


Whole = Annotated[int, Key(least=0, most=2**63 - 1, wanted="a whole number of 0 or more")]
Fraction = Annotated[float, Key(least=0, most=1)]
Seconds = Annotated[float, Key(least=0, most=1e12)]
SecondsOrInf = Annotated[float, Key(least=0, most=1e12, null=math.inf)]
"""Seconds of what may be impossible, such as a step without a device that is needed."""
Line = Annotated[
    str,
    Key(
        fits=lambda text: len(text) <= _MOST_CHARACTERS and text.isprintable(),
        wanted=f"a text of one line, at most {_MOST_CHARACTERS:,} characters",
    ),
]
"""Words that are printed on terminals."""
Lines = tuple[Annotated[str, Key(fits=lambda text: "\n" not in text, wanted="a list of lines")], ...]
"""A text that has a reader of its own."""


def lines_of(text: str) -> tuple[str, ...]:
    return tuple(text.removesuffix("\n").split("\n"))


# Where a value is


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value is in a file: in which table, under which key. Refuses what is wrong there."""

    kind: FileKind
    where: str
    key: str = ""
    example: str = ""

    def refuse(self, what: str, do: str) -> InputError:
        return self.kind.error(what, where=self.where, do=self.kind.do or do)

    def wrong(self, value: object, wanted: str) -> InputError:
        do = f"write it like {self.key} = {self.example}" if self.example else f"give {wanted}"
        return self.refuse(f"{self.key or 'this'} is {shown(value)}", do)

    def unknown(self, key: str, known: Sequence[str]) -> InputError:
        guess = close_words(key, known)
        return self.refuse(f"{shown(key)} is not known here", f"{guess}leave it out; known are {', '.join(known)}")

    def inside(self) -> Place:
        """The table that the value itself is."""
        return Place(self.kind, ", ".join(filter(None, (self.where, self.key))))

    def read(self, annotation: Any, value: object) -> Any:
        """The value as one of this type, or a refusal."""
        return _codec(annotation).read(value, self)

    def read_table(self, known: Sequence[str], annotation: Any, value: object) -> dict[str, Any]:
        """A table of some of these keys, with values of one type."""
        return _mapping_codec(known, _codec(annotation)).read(value, self)  # type: ignore[no-any-return]

    @contextmanager
    def located(self, what: str) -> Iterator[None]:
        """What others refuse, with the place in the file."""
        try:
            yield
        except LopsidedError as error:
            place = ", ".join(filter(None, (self.where, what, error.where)))
            raise self.kind.error(error.what, where=place, do=error.do, **error.facts) from None


# Values


def encode(value: object) -> Any:
    """A dataclass as data of JSON."""
    cls: Any = type(value)
    return _codec(cls).write(value)


@dataclass(frozen=True, slots=True)
class _Codec:
    read: Callable[[object, Place], Any]
    write: Callable[[Any], Any]
    is_table: bool = False


@cache
def _codec(annotation: Any) -> _Codec:
    """How values of a type are read and written."""
    key = Key()
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        key = next((each for each in more if isinstance(each, Key)), key)
    if key.read is not None and key.write is not None:
        return _Codec(key.read, key.write)
    made = _plain_codec(annotation, key)
    plainly = key.read or made.read

    def read(value: object, place: Place) -> object:
        found = plainly(value, place)
        if key.fits is not None and not key.fits(found):
            raise place.wrong(value, key.wanted)
        return found

    return replace(made, read=read if key.fits is not None else plainly)


def _plain_codec(annotation: Any, key: Key) -> _Codec:
    if annotation in (int, float):
        return _number_codec(annotation, key)
    if annotation in (str, bool):
        wanted = key.wanted or {str: "a text", bool: "true or false"}[annotation]
        return _checked_codec(lambda value: isinstance(value, annotation), wanted)
    if annotation in (object, Any):
        return _checked_codec(lambda value: True, "")
    if is_dataclass(annotation):
        return _table_codec(annotation)
    origin, of = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _checked_codec(lambda value: value in of, f"one of {', '.join(map(str, of))}")
    if origin in (Union, types.UnionType) and type(None) in of:
        (only,) = (each for each in of if each is not type(None))
        inner = _codec(only)
        return _Codec(
            lambda value, place: None if value is None else inner.read(value, place),
            lambda value: None if value is None else inner.write(value),
        )
    if origin is tuple:
        return _list_codec(_codec(of[0])) if of[-1] is ... else _row_codec([_codec(each) for each in of])
    if origin is Mapping:
        return _mapping_codec(None, _codec(of[1]))
    raise TypeError(f"{annotation} is not known here: give it a Key that reads and writes it")


def _checked_codec(fits: Callable[[object], bool], wanted: str) -> _Codec:
    def read(value: object, place: Place) -> object:
        if not fits(value):
            raise place.wrong(value, wanted)
        return value

    return _Codec(read, lambda value: value)


def _number_codec(of: type[int] | type[float], key: Key) -> _Codec:
    wanted = key.wanted or ("a whole number" if of is int else "a number")
    if not key.wanted and math.isfinite(key.least) and math.isfinite(key.most):
        wanted += f" from {key.least:,} to {key.most:,}" if of is int else f" from {key.least:g} to {key.most:g}"
    wanted += "" if key.null is None else ", or null"

    def read(value: object, place: Place) -> float:
        if value is None and key.null is not None:
            return key.null
        # A bool is an int to Python.
        if isinstance(value, bool) or not isinstance(value, int if of is int else int | float):
            raise place.wrong(value, wanted)
        try:
            found = of(value)
        except OverflowError:
            raise place.wrong(value, wanted) from None
        if not key.least <= found <= key.most or (of is float and not math.isfinite(found)):
            raise place.wrong(found, wanted)
        return found

    def write(value: float) -> float | None:
        return None if value == key.null else value

    return _Codec(read, write)


def _list_codec(inner: _Codec) -> _Codec:
    def read(value: object, place: Place) -> tuple[object, ...]:
        if not isinstance(value, list):
            raise place.wrong(value, "a list")
        if inner.is_table:
            return tuple(inner.read(each, replace(place, key=f"{place.key} {k}")) for k, each in enumerate(value, 1))
        return tuple(inner.read(each, place) for each in value)

    return _Codec(read, lambda value: [inner.write(each) for each in value])


def _row_codec(inner: Sequence[_Codec]) -> _Codec:
    def read(value: object, place: Place) -> tuple[object, ...]:
        if not isinstance(value, list) or len(value) != len(inner):
            raise place.wrong(value, f"a list of {len(inner)}")
        return tuple(codec.read(each, place) for codec, each in zip(inner, value, strict=True))

    return _Codec(read, lambda value: [codec.write(each) for codec, each in zip(inner, value, strict=True)])


def _mapping_codec(known: Sequence[str] | None, inner: _Codec) -> _Codec:
    def read(value: object, place: Place) -> dict[str, object]:
        found = {}
        table = place.inside()
        for key, each in _table(value, place).items():
            if known is not None and key not in known:
                raise table.unknown(key, known)
            label = shown(key) if known is None else place.kind.label(key)
            found[key] = inner.read(each, replace(table, key=label))
        return found

    return _Codec(read, lambda value: {key: inner.write(each) for key, each in value.items()})


def _table(value: object, place: Place) -> dict[str, object]:
    if not isinstance(value, dict):
        raise place.wrong(value, "a table" if place.kind.toml else "an object: { ... }")
    return value


@dataclass(frozen=True, slots=True)
class _Slot:
    """A field of a dataclass, and its keys in a file: the one that is written, and those that are read too."""

    name: str
    keys: tuple[str, ...]
    needed: bool
    example: str
    codec: _Codec
    left_out: object = MISSING  # this value is not written


def _slot(field: Field[Any], annotation: Any) -> _Slot:
    keys = [each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Key)]
    key = keys[-1] if keys else Key()  # the field's own, behind those of its type
    needed = field.default is MISSING and field.default_factory is MISSING
    left_out = field.default if key.rare else MISSING
    return _Slot(field.name, (key.name or field.name, *key.was), needed, key.example, _codec(annotation), left_out)


def _table_codec(cls: Any) -> _Codec:
    hints = get_type_hints(cls, include_extras=True)
    slots = [_slot(field, hints[field.name]) for field in fields(cls)]
    known, listed = {key for slot in slots for key in slot.keys}, [slot.keys[0] for slot in slots]

    def read(value: object, place: Place) -> object:
        given, here = _table(value, place), place.inside()
        for key in given:
            if key not in known:
                raise here.unknown(key, listed)
        if isinstance(name := given.get("name"), str) and place.key:
            here = replace(here, where=f"{here.where} ({shown(name)})")
        found = {}
        for slot in slots:
            keys = [key for key in slot.keys if key in given]
            at = replace(here, key=here.kind.label(slot.keys[0]), example=slot.example)
            if len(keys) > 1:
                raise at.refuse(f"{at.key} is given as {shown(keys[-1])} too, its earlier name", "keep one of them")
            if keys:
                found[slot.name] = slot.codec.read(given[keys[0]], at)
            elif slot.needed:
                do = f"add {slot.keys[0]} = {slot.example}" if slot.example else ""
                raise at.refuse(f"{at.key} is missing", do or f"undo the edit, or make the {here.kind.what} anew")
        try:
            return cls(**found)
        except LopsidedError as error:
            raise here.kind.error(error.what, where=here.where, do=here.kind.do or error.do, **error.facts) from None

    def write(value: object) -> dict[str, object]:
        named = ((slot, getattr(value, slot.name)) for slot in slots)
        return {slot.keys[0]: slot.codec.write(found) for slot, found in named if found != slot.left_out}

    return _Codec(read, write, is_table=True)


# Texts


def parse_json(cls: type[T], text: str, place: Place) -> T:
    """The object that a text of JSON describes, of the format and version that its kind of file has."""
    kind = place.kind
    given = _parsed_json(text, place)
    if not isinstance(given, dict):
        raise place.refuse(f"this is {shown(given)}, not a {kind.what}", _remake(kind))
    if kind.format:
        _check_version(given, place)
    return place.read(cls, given)  # type: ignore[no-any-return]


def _check_version(given: Mapping[str, object], place: Place) -> None:
    kind = place.kind
    if given.get("format") != kind.format:
        raise place.refuse(f'this is not a {kind.what}: its "format" is not "{kind.format}"', kind.made_by)
    if "version" not in given:
        raise place.refuse('"version" is missing', _remake(kind))
    version = replace(place, key='"version"').read(Whole, given["version"])
    if version != kind.version:
        newer = f": this {kind.what} was made by a newer lopsided; this one knows version {kind.version}"
        raise place.refuse(
            f"there is no version {version} of the format{newer if version > kind.version else ''}",
            f"update lopsided, or make the {kind.what} anew",
        )


def _remake(kind: FileKind) -> str:
    return f"undo the edit, or make the {kind.what} anew: {kind.made_by}"


def _parsed_json(text: str, place: Place) -> object:
    do = _remake(place.kind)

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
            raise place.refuse(f"{shown(twice)} is given twice", do)
        return found

    def constant(name: str) -> object:
        raise place.refuse(f"{name} is not a number of a {place.kind.what}", do)

    if len(text) > (most := place.kind.most_bytes or MOST_BYTES_OF_A_FILE):
        raise place.refuse(f"the text is longer than {most:,} characters", do)
    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise place.refuse(f"this is not JSON: {error.msg} in line {error.lineno}", do) from None
    except RecursionError:
        raise place.refuse("the lists of this file nest too deep", do) from None
    except ValueError:  # Python does not read integers of more than some thousand digits.
        raise place.refuse("a number in this file has too many digits", do) from None


def parse_toml(cls: type[T], text: str, place: Place) -> T:
    """The object that a text of TOML describes."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MOST_DOTS:
            raise place.refuse(f"line {number} has more than {_MOST_DOTS:,} dots", "write shorter lines")
    try:
        given = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        what = f"this is not TOML: {str(error)[:200] or type(error).__name__}"
        raise place.refuse(what, place.kind.made_by) from None
    return place.read(cls, given)  # type: ignore[no-any-return]


def json_text(value: object, indent: str = "") -> str:
    """JSON with a line for each line of text, and a row of numbers on one."""
    inner = indent + "  "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {json_text(part, inner)}" for key, part in value.items()]
        line = f"{{{', '.join(parts)}}}"
        if indent and len(line) <= _WIDTH and not any(isinstance(part, dict | list) for part in value.values()):
            return line
    elif isinstance(value, list) and any(isinstance(part, str | dict | list) for part in value):
        parts = [json_text(part, inner) for part in value]
    else:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    left, right = "{}" if isinstance(value, dict) else "[]"
    return left + ",".join(f"\n{inner}{part}" for part in parts) + (f"\n{indent}" if parts else "") + right


class Inline(dict[str, object]):
    """A table that is written on one line, after its key."""


def toml_text(table: Mapping[str, object]) -> str:
    """TOML of a table: what has a line of its own first, then tables and lists of tables, all in their order."""
    return "\n".join(_toml_lines(table, "")) + "\n"


def _toml_lines(table: Mapping[str, Any], path: str, gap: Sequence[str] = ("",)) -> Iterator[str]:
    """`path` is what headings of tables inside begin with; before each of them goes a `gap`."""
    own = [key for key, value in table.items() if not _has_heading(value)]
    for key in own:
        yield f"{key} = {_toml_value(table[key])}"
    for key in (key for key in table if key not in own):
        many = isinstance(table[key], list)
        for inside in table[key] if many else [table[key]]:
            if not all(map(_has_heading, inside.values())):
                yield from (*gap, f"[[{path}{key}]]" if many else f"[{path}{key}]")
            yield from _toml_lines(inside, f"{path}{key}.", () if many else gap)


def _has_heading(value: object) -> bool:
    rows = value if isinstance(value, list) and value else [value]
    return all(isinstance(row, Mapping) and not isinstance(row, Inline) for row in rows)


def _toml_value(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_toml_value(part)}' for key, part in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str):
        # JSON's escapes are TOML's; only the delete character has to be escaped in TOML alone.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


# Files


def read_text(path: str | Path, kind: FileKind) -> str:
    path, most = Path(path), kind.most_bytes or MOST_BYTES_OF_A_FILE
    try:
        # Only plain files: a pipe would wait for ever, a device never end.
        if not path.is_file():
            what = "there is no such file"
            if path.exists():
                what = "this is a directory" if path.is_dir() else "this is not a plain file"
            raise kind.error(what, where=str(path), do=f"give the path of a {kind.what} file; {kind.made_by}")
        if path.stat().st_size > most:
            raise kind.error(f"the file is larger than {most:,} bytes", where=str(path), do=f"give a {kind.what} file")
        return path.read_bytes().decode()
    except (OSError, ValueError) as error:
        what = f"the file cannot be read: {error}"
        raise kind.error(what, where=shown(str(path)), do=kind.do or kind.made_by) from None


def write_text(path: str | Path, text: str, kind: FileKind) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise unwritable(path, kind, getattr(error, "strerror", None) or str(error)) from None


def check_writable(path: str | Path, kind: FileKind, *, force: bool = False) -> None:
    """Refuse a path to which nothing can be written, before time is spent on making one; and, without `force`, a file
    of another kind, which would be lost."""
    path = Path(path)
    try:
        if path.is_dir():
            raise unwritable(path, kind, "this is a directory", "name a file in it")
        if not path.parent.is_dir():
            raise unwritable(path, kind, f"there is no folder {shown(str(path.parent))}", "make the folder first")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise unwritable(path, kind, "it is not allowed")
        if not force and path.is_file() and not _is_of(path, kind):
            raise unwritable(path, kind, "a file of another kind is there", "name another file, or add --force")
    except (OSError, ValueError) as error:
        raise unwritable(path, kind, getattr(error, "strerror", None) or str(error)) from None


def _is_of(path: Path, kind: FileKind) -> bool:
    """Whether a file looks like one of this kind, or is empty."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    known_by = kind.known_by or b'"format":\\s*"%s"' % re.escape(kind.format).encode()
    return not head or re.search(known_by, head) is not None


def unwritable(path: str | Path, kind: FileKind, why: str, do: str = "") -> InputError:
    do = do or "name a file in a folder that can be written to and has room"
    return kind.error(f"the {kind.what} cannot be written: {why}", where=str(path), do=do)
