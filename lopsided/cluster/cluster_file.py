"""Clusters from TOML: files, presets and texts, which may come from strangers.

In: a preset's name, a path or a text (`docs/clusters.md` describes the format, `cluster.py` gives an example). Out: a
`Cluster`, or a `ClusterError` that says what is wrong, where, and what to write instead. The classes below are the
tables of such a file; keys and types are checked by `codec`, ranges by `Kind`, `Link` and `Cluster` themselves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from lopsided.cluster.cluster import MEASURABLE, Cluster
from lopsided.cluster.coefficients import CLUSTER, KIND, coefficient
from lopsided.cluster.devices import SPEED_DTYPES, Kind, Link
from lopsided.codec import FileKind, Key, Place, parse_toml, read_text
from lopsided.errors import ClusterError, close_words, shown

PRESETS = Path(__file__).parent / "presets"
CLUSTER_FILE = FileKind(
    ClusterError,
    "cluster",
    "docs/clusters.md describes the format; `lopsided clusters NAME` prints a preset to copy and change",
    toml=True,
    known_by=rb"(?m)^\[\[devices\]\]",
    most_bytes=16 * 2**20,
)

_UNITS = (
    {"B": 1}
    | {f"{p}B": 1000**k for k, p in enumerate("kMGT", 1)}
    | {f"{p}iB": 1024**k for k, p in enumerate("KMGT", 1)}
)
_Speeds = tuple[tuple[str, float], ...]
_Measurements = tuple[tuple[str, str, Link], ...]


def _read_memory(value: object, place: Place) -> int:
    if isinstance(value, str):
        match = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?) ?([kKMGT]?i?B)", value, re.ASCII)
        if not match or match[2] not in _UNITS:
            raise place.refuse(f"memory is {shown(value)}", f'write it like "16 GiB"; units are {", ".join(_UNITS)}')
        whole, _, decimals = match[1].partition(".")
        return int(int(whole + decimals) * _UNITS[match[2]] // 10 ** len(decimals))
    number: float = place.read(float, value)
    if not number.is_integer():
        raise place.wrong(value, "a whole number")
    # Not by way of the float: it has 53 bits only.
    return value if isinstance(value, int) else int(number)


def _read_speeds(value: object, place: Place) -> _Speeds:
    if not isinstance(value, dict):
        return (("f32", place.read(float, value)),)
    return tuple(place.read_table(SPEED_DTYPES, float, value).items())


def _read_collectives(value: object, place: Place) -> _Measurements:
    found = []
    for collective, algorithms in place.read_table(tuple(MEASURABLE), object, value).items():
        table = replace(place.inside(), key=collective)
        links = table.read_table(MEASURABLE[collective], Link, algorithms)
        found += [(collective, algorithm, link) for algorithm, link in links.items()]
    return tuple(found)


def _renamed(owner: str, name: str) -> Key:
    """A coefficient whose key of before is still read."""
    return Key(was=(coefficient(owner, name).formerly,))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Devices(Kind):
    """A [[devices]] table: a kind of devices, of which a file may leave something out or write it in words."""

    name: Annotated[str, Key(example='"v100"')]
    node: Annotated[str, Key(example='"box"')]
    nodes: int = 1
    count: int = 1
    flops_per_s: Annotated[_Speeds, Key(read=_read_speeds, example="{ f32 = 15.7e12 }")]
    bytes_per_s: Annotated[float, Key(example="900e9")]
    memory_bytes: Annotated[int, Key("memory", read=_read_memory, example='"16 GiB"')]
    launch_s: float = 8e-6
    host_memory_bytes: Annotated[int, Key("host_memory", read=_read_memory, example='"64 GiB"')] = 0
    compute_slowdown: Annotated[float, _renamed(KIND, "compute_slowdown")] = 0.0
    contention: Annotated[float, _renamed(KIND, "contention")] = 1.0
    efficiency: Annotated[float, Key(least=1e-6, most=1)] = 1.0

    @property
    def kind(self) -> Kind:
        given = {field.name: getattr(self, field.name) for field in fields(Kind)}
        reached = tuple((dtype, flops * self.efficiency) for dtype, flops in self.flops_per_s)
        return Kind(**given | {"flops_per_s": reached})


@dataclass(frozen=True, slots=True)
class _LinkTable:
    """A table of [links]: only measured collectives have a skew."""

    latency_s: Annotated[float, Key(example="1e-5")]
    bytes_per_s: Annotated[float, Key(example="12.5e9")]

    def __post_init__(self) -> None:
        Link(self.latency_s, self.bytes_per_s)

    @property
    def link(self) -> Link:
        return Link(self.latency_s, self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair(_LinkTable):
    nodes: Annotated[tuple[str, str], Key(example='["box", "other"]')]


@dataclass(frozen=True, slots=True)
class _Links:
    within: _LinkTable | None = None
    between: _LinkTable | None = None
    pair: tuple[_Pair, ...] = ()


@dataclass(frozen=True, slots=True)
class _ClusterFile:
    name: Annotated[str, Key(example='"my-cluster"')]
    about: str = ""
    comm_slowdown: Annotated[float, _renamed(CLUSTER, "comm_slowdown")] = 1.0
    packing: float = 1.0
    devices: tuple[_Devices, ...] = ()
    links: _Links | None = None
    collectives: Annotated[_Measurements, Key(read=_read_collectives)] = ()


def parse_cluster(text: str, where: str = "cluster") -> Cluster:
    """The cluster that a TOML text describes; `where` is what refusals call the text."""
    root = Place(CLUSTER_FILE, where)
    file = parse_toml(_ClusterFile, text, root)
    if not file.devices:
        raise root.refuse("the cluster has no devices", "add a [[devices]] table")
    try:
        kinds = tuple(devices.kind for devices in file.devices)
        within, between = _links(file, root)
        pairs = tuple((*pair.nodes, pair.link) for pair in (file.links.pair if file.links else ()))
        return Cluster(
            file.name, file.about, kinds, within, between, file.collectives, pairs, file.comm_slowdown, file.packing
        )
    except ClusterError as error:
        raise ClusterError(
            error.what, where=error.where if error.where.startswith(where) else where, do=error.do
        ) from None


def _links(file: _ClusterFile, root: Place) -> tuple[Link, Link]:
    """The links within and between nodes. A cluster that does not use one of them need not give it."""
    kinds, links = file.devices, file.links
    if links is None:
        if len(kinds) == kinds[0].devices == 1:
            return Link(0.0, 1e18), Link(0.0, 1e18)
        raise root.refuse("links is missing", "add [links.within] and [links.between]")
    one_node = len({kind.node for kind in kinds}) == 1 and kinds[0].nodes == 1
    lone = len({kind.node for kind in kinds}) == len(kinds) and all(kind.count == 1 for kind in kinds)
    within = links.within or (links.between if lone else None)
    between = links.between or (links.within if one_node else None)
    if within is None or between is None:
        missing = "between" if within else "within"
        raise Place(root.kind, f"{root.where}, links").refuse(
            f"{missing} is missing", f"add [links.{missing}] with latency_s = 1e-5 and bytes_per_s = 12.5e9"
        )
    return within.link, between.link


def preset_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))


def load_cluster(spec: str | Path) -> Cluster:
    """The cluster of a preset's name or of a TOML file."""
    presets = preset_names()
    path = PRESETS / f"{spec}.toml" if isinstance(spec, str) and spec in presets else Path(spec)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        is_file = False
    if not is_file:
        raise ClusterError(
            f"there is no cluster {shown(str(spec))}: not a preset, not a file",
            do=f"{close_words(str(spec), presets)}presets are {', '.join(presets)}; a file ends in .toml",
        )
    return parse_cluster(read_text(path, CLUSTER_FILE), str(spec))
