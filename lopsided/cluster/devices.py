"""Devices that are alike, and links: the plain facts of a cluster, checked when made, printed as TOML.

In: numbers and names. Out: `Measured`, `Kind`, `Link`. The one idea: whoever makes one (a file's reader, a profiler,
a test) gets the same refusals, so nothing after this has to look again.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

from lopsided.cluster.coefficients import (
    KIND,
    LINK,
    check_between,
    check_coefficients,
    coefficient,
    given_coefficients,
)
from lopsided.codec import Inline
from lopsided.errors import ClusterError, shown

MOST_DEVICES = 65_536
SPEED_DTYPES = ("f64", "f32", "bf16", "f16")

Points = tuple[tuple[float, float], ...]


# Checks


def check_name(name: str, what: str, where: str) -> None:
    # A slash separates node and device in a device's name, and names are printed on terminals.
    if not 0 < len(name) <= 100 or not name.isprintable() or "/" in name or name != name.strip():
        raise ClusterError(
            f"{shown(name)} cannot be the name of a {what}",
            where=where,
            do="use up to 100 printable characters, no slash, no space at the ends",
        )


def check_words(words: str, what: str, where: str) -> None:
    if len(words) > 10_000 or not words.replace("\n", "").isprintable():
        raise ClusterError(
            f"the {what} has characters that cannot be printed, or more than 10,000",
            where=where,
            do="write it in plain text",
        )


# Types


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one call, whole batch and whole weights at fraction 1, at several fractions: (fraction, seconds)."""

    call: str
    forward: Points
    backward: Points = ()

    def __post_init__(self) -> None:
        where = f"measured call {shown(self.call)}"
        check_words(self.call, "call", where)
        if not self.call or not self.forward:
            raise ClusterError(
                "a measurement needs a call and a time",
                where=where,
                do="give call, and forward = [[1.0, seconds], ...]",
            )
        for points in (self.forward, self.backward):
            for fraction, seconds in points:
                check_between(fraction, 0, 1, "a fraction", where)
                check_between(seconds, 0, 1e6, "a time in seconds", where)
            if len({fraction for fraction, _ in points}) < len(points):
                raise ClusterError("a fraction was measured twice", where=where, do="keep one time per fraction")

    def table(self) -> dict[str, object]:
        """This as a table of TOML."""
        passes = {"forward": self.forward, "backward": self.backward}
        given = {name: [[float(number) for number in point] for point in points] for name, points in passes.items()}
        return {"call": self.call, **{name: points for name, points in given.items() if points}}


@dataclass(frozen=True, slots=True)
class Kind:
    """Devices that are alike, in nodes that are alike: `count` in each of `nodes` nodes.

    What its numbers mean, their units and bounds: `coefficients.py`.
    """

    name: str
    node: str
    nodes: int
    count: int
    flops_per_s: tuple[tuple[str, float], ...]
    bytes_per_s: float
    memory_bytes: int
    launch_s: float
    source: str = ""
    measured: tuple[Measured, ...] = ()
    compute_slowdown: float = 0.0
    overhead_s: float = 0.0
    contention: float = 1.0
    memory_reserve: float = 0.08
    host_bytes_per_s: float = 0.0
    host_memory_bytes: int = 0  # of the node, free for what its devices keep there; 0 where nobody said

    def __post_init__(self) -> None:
        where = f"kind {shown(self.name)}"
        check_name(self.name, "kind of device", where)
        check_name(self.node, "node", where)
        check_words(self.source, "source", where)
        check_between(self.nodes, 1, MOST_DEVICES, "nodes", where)
        check_between(self.count, 1, MOST_DEVICES, "count", where)
        dtypes = [dtype for dtype, _ in self.flops_per_s]
        if not dtypes or not {*dtypes} <= {*SPEED_DTYPES} or len({*dtypes}) < len(dtypes):
            raise ClusterError(
                f"flops_per_s is given for {', '.join(map(shown, dtypes)) or 'no dtype'}",
                where=where,
                do=f"give it once for one or more of {', '.join(SPEED_DTYPES)}",
            )
        check_between(self.memory_bytes, 1, 2**60, "memory", where)
        check_between(self.host_memory_bytes, 0, 2**60, "host_memory", where)
        check_coefficients(KIND, self, where)
        if len({m.call for m in self.measured}) < len(self.measured):
            raise ClusterError(
                "a call was measured twice", where=where, do="put its points into one [[devices.measured]]"
            )

    @property
    def devices(self) -> int:
        return self.nodes * self.count

    def flops(self, dtype: str) -> float:
        """FLOP/s on values of this dtype, listed or not.

        f16 is as fast as bf16, where only that is listed (never the other way round: V100 and 2080 Ti know only f16);
        f64 is half as fast as f32; all else goes as f32 goes, and f32, if not listed, as the slowest that is.
        """
        listed = dict(self.flops_per_s)
        if dtype in listed:
            return listed[dtype]
        if dtype == "f16" and "bf16" in listed:
            return listed["bf16"]
        if dtype in ("f64", "c128"):
            return listed["f64"] if "f64" in listed else self.flops("f32") / 2
        return listed["f32"] if "f32" in listed else min(listed.values())

    @property
    def speed(self) -> float:
        """One number to compare devices by: f32, or the best listed."""
        listed = dict(self.flops_per_s)
        return listed["f32"] if "f32" in listed else max(listed.values())

    @property
    def likeness(self) -> str:
        """What a device can do, whatever it is called and wherever it sits: equal for devices that are alike."""
        speeds = sorted((dtype, float(flops)) for dtype, flops in self.flops_per_s)
        tables = sorted((m.call, _plain(m.forward), _plain(m.backward)) for m in self.measured)
        facts = [speeds, float(self.bytes_per_s), int(self.memory_bytes), float(self.launch_s), tables]
        beside = [float(self.compute_slowdown), float(self.overhead_s)]
        if self.host_bytes_per_s or self.host_memory_bytes:
            beside += [float(self.host_bytes_per_s), float(self.host_memory_bytes)]
        if self.memory_reserve != coefficient(KIND, "memory_reserve").default:
            beside.append(float(self.memory_reserve))
        if self.contention != 1:
            return json.dumps([*facts, beside, float(self.contention)])
        # Devices that nobody measured are as they always were: plans for them keep their fingerprints.
        return json.dumps([*facts, beside] if any(beside) else facts)

    def with_fewer(self, was: int, now: int) -> Kind:
        """The same devices when `now` of the `was` devices of their node work: faster, if they crowd each other."""
        if self.contention == 1 or was == now:
            return self
        left = 1 + (self.contention - 1) * (now - 1) / (was - 1)
        return replace(self.taking(left / self.contention), contention=left)

    def taking(self, times: float) -> Kind:
        """The same devices if all they compute takes so many times as long."""
        most_flops, most_bytes = (coefficient(KIND, name).high for name in ("flops_per_s", "bytes_per_s"))
        return replace(
            self,
            flops_per_s=tuple((dtype, min(flops / times, most_flops)) for dtype, flops in self.flops_per_s),
            bytes_per_s=min(self.bytes_per_s / times, most_bytes),
            launch_s=self.launch_s * times,
            overhead_s=self.overhead_s * times,
            measured=tuple(
                replace(entry, forward=_in_times(entry.forward, times), backward=_in_times(entry.backward, times))
                for entry in self.measured
            ),
        )

    def table(self) -> dict[str, object]:
        """This as a table of TOML."""
        table: dict[str, object] = {
            "name": self.name,
            "node": self.node,
            "nodes": self.nodes,
            "count": self.count,
            "flops_per_s": Inline((dtype, float(flops)) for dtype, flops in self.flops_per_s),
            "bytes_per_s": float(self.bytes_per_s),
            "memory": _bytes_text(self.memory_bytes),
            "launch_s": float(self.launch_s),
            **given_coefficients(KIND, self),
        }
        if self.host_memory_bytes:
            table["host_memory"] = _bytes_text(self.host_memory_bytes)
        if self.source:
            table["source"] = self.source
        if self.measured:
            table["measured"] = [entry.table() for entry in self.measured]
        return table

    def is_same_alone(self, other: Kind) -> bool:
        """Whether devices may be the same, however many others worked beside them when they were described."""
        if self.contention == other.contention:
            return self.likeness == other.likeness
        mine, theirs = (_numbers_alone(kind) for kind in (self, other))
        return len(mine) == len(theirs) and all(
            one == two if isinstance(one, str) or isinstance(two, str) else math.isclose(one, two, rel_tol=1e-9)
            for one, two in zip(mine, theirs, strict=True)
        )


def _bytes_text(size: int) -> int | str:
    gib, rest = divmod(size, 2**30)
    return size if rest else f"{gib} GiB"


def _in_times(points: Points, times: float) -> Points:
    return tuple((fraction, seconds * times) for fraction, seconds in points)


def _numbers_alone(kind: Kind) -> list[float | str]:
    """What a likeness is of, but as if no other device of the node worked, in a fixed order."""
    alone = kind.with_fewer(2, 1)
    found: list[float | str] = [alone.bytes_per_s, alone.memory_bytes, alone.launch_s]
    found += [
        alone.compute_slowdown,
        alone.overhead_s,
        alone.host_bytes_per_s,
        alone.host_memory_bytes,
        alone.memory_reserve,
    ]
    for dtype, flops in sorted(alone.flops_per_s):
        found += [dtype, flops]
    for entry in sorted(alone.measured, key=lambda entry: entry.call):
        for points in (entry.forward, entry.backward):
            found += [entry.call, *(number for point in sorted(points) for number in point)]
    return found


def _plain(points: Points) -> list[list[float]]:
    return sorted([float(fraction), float(seconds)] for fraction, seconds in points)


@dataclass(frozen=True, slots=True)
class Link:
    """How fast bytes go. Of a measured collective, `skew` is the part of its seconds a byte that grows with the largest
    piece, where that was measured.
    """

    latency_s: float
    bytes_per_s: float
    skew: float | None = None

    def __post_init__(self) -> None:
        check_coefficients(LINK, self, "a link")

    def table(self) -> dict[str, object]:
        """This as a table of TOML."""
        skew = {} if self.skew is None else {"skew": float(self.skew)}
        return {"latency_s": float(self.latency_s), "bytes_per_s": float(self.bytes_per_s), **skew}
