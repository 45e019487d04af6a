"""Every measured number that scales a price, declared once: unit, bounds, who measures it, and where it counts.

In: nothing. Out: `COEFFICIENTS`, a table of `Coefficient`s, each a field of a `Kind`, a `Link` or a `Cluster`. The
types check their fields by it, a cluster file has its names for keys, profiling stays within its bounds, and a test
holds the modules that a row names against the source. To add a coefficient: a row here and a field of its owner, then
the module that measures it and the module that prices with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lopsided.errors import ClusterError, shown

KIND, LINK, CLUSTER = "kind", "link", "cluster"


@dataclass(frozen=True, slots=True)
class Coefficient:
    """A measured number: a field of its owner, and a key in a cluster file.

    `default` is what a device or link has of which nobody measured it; None where it must be given, or may be absent.
    Modules are named by their paths below `lopsided`. `formerly` is its key in files from before it was renamed.
    """

    owner: str
    name: str
    unit: str
    low: float
    high: float
    default: float | None
    example: float
    meaning: str
    measured_by: tuple[str, ...]
    counts_in: tuple[str, ...]
    formerly: str = ""

    def clamp(self, number: float) -> float:
        """The nearest number within bounds."""
        return min(max(number, self.low), self.high)


# Bounds are wide enough for every machine, and narrow enough that no product of them overflows.
COEFFICIENTS = (
    Coefficient(
        *(KIND, "flops_per_s", "FLOP/s", 1.0, 1e24, None, 15.7e12),
        "how fast a device multiplies, by dtype",
        ("profiling/op_times",),
        ("cluster/devices",),
    ),
    Coefficient(
        *(KIND, "bytes_per_s", "B/s", 1.0, 1e18, None, 900e9),
        "how fast a device reads and writes its memory",
        ("profiling/op_times",),
        ("schedule/cost",),
    ),
    Coefficient(
        *(KIND, "launch_s", "s", 0.0, 3600.0, None, 8e-6),
        "the least an op takes",
        ("profiling/op_times",),
        ("schedule/cost", "planner/proposals"),
    ),
    Coefficient(
        *(KIND, "compute_slowdown", "part", 0.0, 1.0, 0.0, 0.2),
        "the part of its computing that a device loses while something is sent behind it",
        ("profiling/overlap",),
        ("schedule/timeline", "schedule/critical_path", "planner/search_cost"),
        "drag",
    ),
    Coefficient(
        *(KIND, "overhead_s", "s", 0.0, 3600.0, 0.0, 2e-5),
        "what a process takes around every op and every conversion, forward or backward, beside the op itself",
        ("profiling/overhead",),
        ("schedule/cost",),
    ),
    Coefficient(
        *(KIND, "contention", "times", 1.0, 100.0, 1.0, 1.3),
        "how many times as long calls take with all devices of a node at work as with one alone",
        ("profiling/overlap",),
        ("cluster/devices", "planner/estimate"),
        "crowding",
    ),
    Coefficient(
        *(KIND, "host_bytes_per_s", "B/s", 0.0, 1e18, 0.0, 12e9),
        "how fast bytes go between a device and pinned memory of its host; 0 where it has none but its own",
        ("profiling/links",),
        ("schedule/cost", "schedule/host_state", "schedule/offload"),
    ),
    Coefficient(
        *(KIND, "memory_reserve", "part", 0.0, 0.99, 0.08, 0.12),
        "the part of a device's memory that a plan leaves to the driver, libraries and the gaps of the allocator",
        ("profiling/dry_run", "calibration/calibrate"),
        ("planner/candidates",),
    ),
    Coefficient(
        *(LINK, "latency_s", "s", 0.0, 3600.0, None, 1e-5),
        "what a message takes however small it is",
        ("profiling/links", "profiling/topology"),
        ("cluster/collectives",),
    ),
    Coefficient(
        *(LINK, "bytes_per_s", "B/s", 1.0, 1e18, None, 12.5e9),
        "how fast bytes go; of a measured collective, bytes of the whole tensor",
        ("profiling/links", "profiling/topology"),
        ("cluster/collectives",),
    ),
    Coefficient(
        *(LINK, "skew", "part", 0.0, 1.0, None, 0.5),
        "the part of a collective's seconds a byte that grows with the largest piece",
        ("profiling/links",),
        ("cluster/collectives",),
    ),
    Coefficient(
        *(CLUSTER, "comm_slowdown", "times", 0.1, 100.0, 1.0, 1.5),
        "how many times as long a transfer takes when devices compute beside it; below 1, transfers in a row overlap",
        ("profiling/overlap",),
        ("schedule/timeline", "schedule/critical_path"),
        "stretch",
    ),
    Coefficient(
        *(CLUSTER, "packing", "times", 1.0, 1e6, 1.0, 3.0),
        "how many times as long as reading and writing it once it takes to put what is sent together and in its place",
        ("profiling/dry_run",),
        ("schedule/cost",),
    ),
)

_BY_NAME = {(one.owner, one.name): one for one in COEFFICIENTS}


def coefficient(owner: str, name: str) -> Coefficient:
    """The row of the table for a field of a kind, a link or the cluster."""
    return _BY_NAME[owner, name]


def optional(owner: str) -> tuple[Coefficient, ...]:
    """The coefficients of an owner that need not be given, because they have a default."""
    return tuple(one for one in COEFFICIENTS if one.owner == owner and one.default is not None)


def check_between(number: float, low: float, high: float, what: str, where: str) -> None:
    if not low <= number <= high:  # not so for nan either
        raise ClusterError(
            f"{what} is {shown(number)}", where=where, do=f"give a number between {low:,g} and {high:,g}"
        )


def check_coefficients(owner: str, made: object, where: str) -> None:
    """Refuse a kind, a link or a cluster of which a coefficient is out of bounds."""
    for one in COEFFICIENTS:
        if one.owner != owner:
            continue
        value = getattr(made, one.name)
        # Speeds are pairs of a dtype and a number, and a skew that nobody measured is None.
        named = [(f"{one.name} of {dtype}", number) for dtype, number in value] if isinstance(value, tuple) else []
        for what, number in named or ([(one.name, value)] if value is not None else []):
            check_between(number, one.low, one.high, what, where)


def given_coefficients(owner: str, made: object) -> dict[str, float]:
    """The coefficients that have a default and differ from it."""
    numbers = {one: float(getattr(made, one.name)) for one in optional(owner)}
    return {one.name: number for one, number in numbers.items() if number != one.default}
