"""Clusters from TOML: files, presets and texts, which may come from strangers.

In: a preset's name, a path or a text (`docs/clusters.md` describes the format, `cluster.py` gives an example). Out: a
`Cluster`, or a `ClusterError` that says what is wrong, where, and what to write instead. Every key, type and range is
checked, here and in the types themselves.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lopsided.cluster.cluster import MEASURABLE, Cluster, close_words
from lopsided.cluster.coefficients import CLUSTER, KIND, check_between, optional, with_new_names
from lopsided.cluster.devices import SPEED_DTYPES, Kind, Link, Measured, Points
from lopsided.errors import ClusterError, shown

MOST_BYTES_OF_A_FILE = 16 * 2**20
PRESETS = Path(__file__).parent / "presets"

_UNITS = (
    {"B": 1}
    | {f"{p}B": 1000**k for k, p in enumerate("kMGT", 1)}
    | {f"{p}iB": 1024**k for k, p in enumerate("KMGT", 1)}
)


@dataclass(frozen=True, slots=True)
class _Table:
    """A TOML table and where it is. Knows types and keys; ranges are the types' own business."""

    items: Mapping[str, object]
    where: str

    def refuse(self, what: str, do: str) -> ClusterError:
        return ClusterError(what, where=self.where, do=do)

    def allow(self, *keys: str) -> None:
        for key in self.items:
            if key not in keys:
                raise self.refuse(f"{shown(key)} is not known here", f"{close_words(key, keys)}use {', '.join(keys)}")

    def need(self, key: str, example: str) -> object:
        if key not in self.items:
            raise self.refuse(f"{key} is missing", f"add {key} = {example}")
        return self.items[key]

    def wrong(self, key: str, value: object, example: str) -> ClusterError:
        return self.refuse(f"{key} is {shown(value)}", f"write it like {key} = {example}")

    def text(self, key: str, example: str, default: str | None = None) -> str:
        value = self.items.get(key, default) if default is not None else self.need(key, example)
        if not isinstance(value, str):
            raise self.wrong(key, value, example)
        return value

    def number(self, key: str, example: str, default: float | None = None) -> float:
        value = self.items.get(key, default) if default is not None else self.need(key, example)
        return self.as_number(key, value, example)

    def as_number(self, key: str, value: object, example: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, value, example)
        try:
            return float(value)
        except OverflowError:
            raise self.wrong(key, value, example) from None

    def whole(self, key: str, default: int) -> int:
        value = self.items.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, value, str(default))
        return value

    def table(self, key: str, example: str) -> _Table:
        value = self.need(key, example)
        if not isinstance(value, dict):
            raise self.wrong(key, value, example)
        return _Table(value, f"{self.where}, {key}")

    def tables(self, key: str, example: str) -> list[_Table]:
        value = self.items.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.refuse(f"{key} is {shown(value)}", f"write {example}")
        return [_Table(item, f"{self.where}, {key} {k}") for k, item in enumerate(value, 1)]

    @contextmanager
    def located(self) -> Iterator[None]:
        """What the types refuse, with the place in the file."""
        try:
            yield
        except ClusterError as error:
            raise ClusterError(error.what, where=self.where, do=error.do) from None


def _read_memory(table: _Table) -> int:
    value = table.need("memory", '"16 GiB"')
    if isinstance(value, str):
        match = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?) ?([kKMGT]?i?B)", value, re.ASCII)
        if not match or match[2] not in _UNITS:
            raise table.refuse(f"memory is {shown(value)}", f'write it like "16 GiB"; units are {", ".join(_UNITS)}')
        whole, _, decimals = match[1].partition(".")
        return int(int(whole + decimals) * _UNITS[match[2]] // 10 ** len(decimals))
    number = table.as_number("memory", value, '"16 GiB"')
    if not number.is_integer():
        raise table.wrong("memory", value, '"16 GiB"')
    # Not by way of the float: it has 53 bits only.
    return int(value) if isinstance(value, int) else int(number)


def _read_speeds(table: _Table) -> tuple[tuple[str, float], ...]:
    example = "{ f32 = 15.7e12 }"
    value = table.need("flops_per_s", example)
    efficiency = table.number("efficiency", "0.5", 1.0)
    check_between(efficiency, 1e-6, 1, "efficiency", table.where)
    if not isinstance(value, dict):
        return (("f32", table.as_number("flops_per_s", value, example) * efficiency),)
    speeds = table.table("flops_per_s", example)
    speeds.allow(*SPEED_DTYPES)
    return tuple((dtype, speeds.number(dtype, "15.7e12") * efficiency) for dtype in speeds.items)


def _read_points(table: _Table, key: str) -> Points:
    example = "[[1.0, 3.1e-3], [0.5, 1.6e-3]]"
    value = table.items.get(key, [])
    if not isinstance(value, list):
        raise table.wrong(key, value, example)
    points = []
    for point in value:
        if not isinstance(point, list) or len(point) != 2:
            raise table.wrong(key, point, example)
        points.append((table.as_number(key, point[0], example), table.as_number(key, point[1], example)))
    return tuple(points)


def _read_measured(table: _Table) -> Measured:
    table.allow("call", "forward", "backward")
    call = table.text("call", '"aten.linear.default(f32[32, 768], f32[768, 768])"')
    forward, backward = _read_points(table, "forward"), _read_points(table, "backward")
    with table.located():
        return Measured(call, forward, backward)


def _read_coefficients(table: _Table, owner: str) -> dict[str, Any]:
    """What was measured of an owner and has a default, by name."""
    return {one.name: table.number(one.name, f"{one.example:g}", one.default) for one in optional(owner)}


def _read_kind(table: _Table) -> Kind:
    table = replace(table, items=with_new_names(KIND, table.items))
    table.allow(
        *("name", "node", "nodes", "count", "flops_per_s", "efficiency", "bytes_per_s", "memory", "launch_s", "source"),
        *("measured", *(one.name for one in optional(KIND))),
    )
    name = table.text("name", '"v100"')
    table = replace(table, where=f"{table.where} ({shown(name)})")
    node, source = table.text("node", '"box"'), table.text("source", '"the datasheet"', "")
    nodes, count = table.whole("nodes", 1), table.whole("count", 1)
    speeds, memory = _read_speeds(table), _read_memory(table)
    bytes_per_s, launch_s = table.number("bytes_per_s", "900e9"), table.number("launch_s", "8e-6", 8e-6)
    coefficients = _read_coefficients(table, KIND)
    measured = tuple(_read_measured(entry) for entry in table.tables("measured", "[[devices.measured]] tables"))
    with table.located():
        return Kind(
            *(name, node, nodes, count, speeds, bytes_per_s, memory, launch_s, source, measured), **coefficients
        )


def _read_link(table: _Table, *more: str) -> Link:
    table.allow("latency_s", "bytes_per_s", *more)
    latency_s, bytes_per_s = table.number("latency_s", "1e-5"), table.number("bytes_per_s", "12.5e9")
    skew = table.number("skew", "0.5") if "skew" in table.items else None
    with table.located():
        return Link(latency_s, bytes_per_s, skew)


def _read_pairs(root: _Table) -> tuple[tuple[str, str, Link], ...]:
    if "links" not in root.items:
        return ()
    pairs = []
    for table in root.table("links", "{}").tables("pair", "[[links.pair]] tables"):
        nodes = table.need("nodes", '["box", "other"]')
        if not isinstance(nodes, list) or len(nodes) != 2 or not all(isinstance(name, str) for name in nodes):
            raise table.wrong("nodes", nodes, '["box", "other"]')
        pairs.append((nodes[0], nodes[1], _read_link(table, "nodes")))
    return tuple(pairs)


def _read_links(root: _Table, kinds: Sequence[Kind]) -> tuple[Link, Link]:
    """The links within and between nodes. A cluster that does not use one of them need not give it."""
    example = "{ latency_s = 1e-5, bytes_per_s = 12.5e9 }"
    one_device = len(kinds) == kinds[0].devices == 1
    if one_device and "links" not in root.items:
        return Link(0.0, 1e18), Link(0.0, 1e18)
    table = root.table("links", f"{{ within = {example}, between = {example} }}")
    table.allow("within", "between", "pair")
    given = {key: _read_link(table.table(key, example)) for key in table.items if key != "pair"}
    one_node = len({kind.node for kind in kinds}) == 1 and kinds[0].nodes == 1
    lone = len({kind.node for kind in kinds}) == len(kinds) and all(kind.count == 1 for kind in kinds)
    if "within" not in given and not lone:
        table.need("within", example)
    if "between" not in given and not one_node:
        table.need("between", example)
    if not given:
        table.need("within", example)
    first = next(iter(given.values()))
    return given.get("within", first), given.get("between", first)


def _read_collectives(root: _Table) -> tuple[tuple[str, str, Link], ...]:
    if "collectives" not in root.items:
        return ()
    example = "{ latency_s = 2e-4, bytes_per_s = 8e8 }"
    table = root.table("collectives", f"{{ all_gather = {{ padded = {example} }} }}")
    table.allow(*MEASURABLE)
    entries = []
    for collective in table.items:
        ways = table.table(collective, f"{{ {MEASURABLE[collective][0]} = {example} }}")
        ways.allow(*MEASURABLE[collective])
        entries += [(collective, way, _read_link(ways.table(way, example), "skew")) for way in ways.items]
    return tuple(entries)


def parse_cluster(text: str, where: str = "cluster") -> Cluster:
    """The cluster that a TOML text describes; `where` is what refusals call the text."""
    try:
        root = _Table(tomllib.loads(text), where)
    except (ValueError, RecursionError) as error:
        raise ClusterError(
            f"this is not TOML: {str(error)[:200] or type(error).__name__}",
            where=where,
            do="docs/clusters.md describes the format; `lopsided clusters NAME` prints a preset to copy and change",
        ) from None
    root = replace(root, items=with_new_names(CLUSTER, root.items))
    root.allow("name", "about", *(one.name for one in optional(CLUSTER)), "devices", "links", "collectives")
    name, about = root.text("name", '"my-cluster"'), root.text("about", '"..."', "")
    kinds = tuple(_read_kind(table) for table in root.tables("devices", "[[devices]] tables"))
    if not kinds:
        raise root.refuse("the cluster has no devices", "add a [[devices]] table")
    within, between = _read_links(root, kinds)
    collectives, pairs = _read_collectives(root), _read_pairs(root)
    coefficients = _read_coefficients(root, CLUSTER)
    with root.located():
        return Cluster(name, about, kinds, within, between, collectives, pairs, **coefficients)


def preset_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))


def load_cluster(spec: str | Path) -> Cluster:
    """The cluster of a preset's name or of a TOML file."""
    path = PRESETS / f"{spec}.toml" if isinstance(spec, str) and spec in preset_names() else Path(spec)
    try:
        # Only plain files: a pipe would wait for ever, a device never end.
        if not path.is_file():
            presets = preset_names()
            raise ClusterError(
                f"there is no cluster {shown(str(spec))}: not a preset, not a file",
                do=f"{close_words(str(spec), presets)}presets are {', '.join(presets)}; a file ends in .toml",
            )
        if path.stat().st_size > MOST_BYTES_OF_A_FILE:
            raise ClusterError(
                f"the file is larger than {MOST_BYTES_OF_A_FILE:,} bytes", where=str(path), do="give a cluster.toml"
            )
        text = path.read_bytes().decode()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"the file cannot be read: {error}", where=shown(str(spec)), do="give a readable TOML file in UTF-8"
        ) from None
    return parse_cluster(text, str(spec))
