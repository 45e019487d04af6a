"""Which process is which device of a plan.

In: what every process tells of itself (`RankInfo`), the plan's cluster and the part of it that takes part. Out:
`RankMapping`. No process talks here: it is a function of what was told, so every rank comes to the same answer, or the
same refusal.

Hosts are matched to nodes, and the processes of a host to the devices of its node, each by the cheapest assignment:
a process that cannot be the device costs most, then one of which nothing is known, and what remains goes in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy
from scipy.optimize import linear_sum_assignment

from lopsided.cluster.cluster import Cluster
from lopsided.cluster.devices import Kind
from lopsided.comm.backend_choice import NO_NCCL, Nccl
from lopsided.errors import WorldError

ENOUGH_MEMORY = 0.9
"""Of the planned memory. Drivers keep some, and a datasheet's gigabytes are not always 2**30 bytes."""

T = TypeVar("T")

_CANNOT, _PERHAPS = 1000.0, 1.0
_MODEL = re.compile(
    r"(?<![a-z0-9])(?:nvidia|geforce|quadro|tesla|rtx|gtx|titan)*[ _-]*"
    r"((?:[lt]4|[abhklptv]\d{2,4}|g[bh]\d{3}|mi\d{2,3}|[1-9]\d{2}0)(?: ?(?:ti|super|ada)\b|[a-z]\b)?)(?![0-9])"
)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What a process tells of itself."""

    rank: int
    host: str  # equal for processes that share a machine
    local_rank: int
    device: str  # "cuda:1", "cpu"
    hardware: str  # "NVIDIA GeForce RTX 3060", "cpu"
    memory_bytes: int
    chip: str = ""  # what tells one GPU from another
    nccl: Nccl = NO_NCCL

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def __str__(self) -> str:
        if not self.is_gpu:
            return f"rank {self.rank} ({self.host}, {self.device})"
        return f"rank {self.rank} ({self.host}, {self.device}: {self.hardware}, {_gib(self.memory_bytes)})"


@dataclass(frozen=True, slots=True)
class RankMapping:
    """Ranks that take part, sorted, and of each the number of its device in the part of the cluster that does."""

    ranks: tuple[int, ...]
    order: tuple[int, ...]


def model_of(name: str) -> str:
    """The model number in a GPU's or a kind's name; "" if there is none.

    >>> model_of("NVIDIA GeForce RTX 2080 Ti"), model_of("rtx2080ti"), model_of("NVIDIA A100-SXM4-40GB")
    ('2080ti', '2080ti', 'a100')
    """
    found = _MODEL.search(name.lower())
    return found[1].replace(" ", "") if found else ""


def find_seats(told: Sequence[RankInfo], cluster: Cluster, on: Cluster) -> RankMapping:
    """Seat every process at a device of `cluster`, or, where there are just enough for it, of `on`."""
    told = sorted(told, key=lambda one: one.rank)
    if len(told) == cluster.devices:
        seated = _seat(told, cluster)
        part = {device: k for k, device in enumerate(devices_in(on, cluster))}
    elif len(told) == on.devices:
        seated = _seat(told, on)
        part = {k: k for k in range(on.devices)}
    else:
        raise _wrong_number(told, cluster, on)
    where = cluster if len(told) == cluster.devices else on
    kinds = where.device_kinds
    for one in told:
        device = seated[one.rank]
        if device in part and not _can_be(one, kinds[device]):
            raise _wrong_hardware(one, where.device_names[device], kinds[device])
    taking = tuple(one.rank for one in told if seated[one.rank] in part)
    return RankMapping(taking, tuple(part[seated[rank]] for rank in taking))


def devices_in(part: Cluster, whole: Cluster) -> tuple[int, ...]:
    """The number in the whole cluster of each device of a part of it.

    Names may be counted anew in a part, so a name alone does not tell. What tells is the name and what the device can
    do; failing that, the node and what it can do; failing that, what it can do.
    """
    alike = [[kind.is_same_alone(other) for other in whole.kinds] for kind in part.kinds]
    found: dict[int, int] = {}
    free = dict(enumerate(_descriptions(whole)))
    for detail in (2, 1, 0):
        for k, (mine, *wanted) in enumerate(_descriptions(part)):
            if k in found:
                continue
            same = (d for d, (kind, *has) in free.items() if alike[mine][kind] and has[:detail] == wanted[:detail])
            match = next(same, None)
            if match is not None:
                found[k] = match
                del free[match]
    if len(found) < part.devices:
        stranger = next(name for k, name in enumerate(part.device_names) if k not in found)
        raise WorldError(
            f"the plan uses {stranger}, which its cluster does not have",
            where=f"cluster {whole.name}",
            do="make the plan anew",
        )
    return tuple(found[k] for k in range(part.devices))


def _descriptions(cluster: Cluster) -> list[tuple[int, str, str]]:
    """The number of its kind, the node and the name of each device."""
    numbered = zip(cluster.kind_numbers, cluster.device_names, strict=True)
    return [(number, name.split("/")[0], name) for number, name in numbered]


def cluster_of_those_there(told: Sequence[RankInfo], cluster: Cluster) -> Cluster | None:
    """The part of a cluster that these processes can be, where fewer are there than it has devices; None where they
    are more, or other devices."""
    if not told or len(told) > cluster.devices:
        return None
    nodes, hosts = list(_nodes_of(cluster).values()), list(_grouped(told, lambda one: one.host).values())
    kinds = cluster.device_kinds

    def seats(processes: Sequence[RankInfo], devices: Sequence[int]) -> tuple[list[int], float]:
        return _assign(_costs(processes, [kinds[k] for k in devices]))

    def cost(processes: Sequence[RankInfo], devices: Sequence[int]) -> float:
        return seats(processes, devices)[1] if len(processes) <= len(devices) else _CANNOT * (len(told) + 1)

    if len(hosts) > len(nodes) or any(len(each) > max(map(len, nodes)) for each in hosts):
        # Several nodes tried out on one machine.
        hosts, nodes = [list(told)], [list(range(cluster.devices))]
    chosen, _ = _assign([[cost(processes, devices) for devices in nodes] for processes in hosts])
    taken: dict[int, RankInfo] = {}
    for processes, node in zip(hosts, chosen, strict=True):
        if len(processes) > len(nodes[node]):
            return None
        found, _ = seats(processes, nodes[node])
        taken |= {nodes[node][seat]: one for seat, one in zip(found, processes, strict=True)}
    if not all(_can_be(one, kinds[device]) for device, one in taken.items()):
        return None
    left = cluster
    for device in reversed(range(cluster.devices)):  # from the last, since names are counted anew
        if device not in taken:
            left = left.without_device(left.device_names[device])
    return left


# The cheapest assignment


def _seat(told: Sequence[RankInfo], cluster: Cluster) -> dict[int, int]:
    """The device of each rank."""
    hosts = _grouped(told, lambda one: one.host)
    nodes = _nodes_of(cluster)
    kinds = cluster.device_kinds
    if len(hosts) != len(nodes) or len(hosts) == 1:
        # Several nodes tried out on one machine, or one node spread over several: only the devices can be compared.
        hosts, nodes = {"": list(told)}, {"": list(range(cluster.devices))}
    for processes in hosts.values():
        processes.sort(key=lambda one: (one.local_rank, one.rank))
    people, places = list(hosts.values()), list(nodes.values())

    @cache
    def price(looks: tuple[tuple[bool, str, int], ...], wanted: tuple[int, ...]) -> float:
        processes = [RankInfo(0, "", 0, "cuda" if gpu else "cpu", name, memory) for gpu, name, memory in looks]
        return _assign(_costs(processes, [cluster.kinds[k] for k in wanted]))[1]

    def cost(processes: list[RankInfo], devices: list[int]) -> float:
        if len(processes) != len(devices):
            return _CANNOT * (len(told) + 1)
        looks = tuple((one.is_gpu, one.hardware, one.memory_bytes) for one in processes)
        return price(looks, tuple(cluster.kinds.index(kinds[k]) for k in devices))

    seated: dict[int, int] = {}
    chosen, _ = _assign([[cost(processes, devices) for devices in places] for processes in people])
    for processes, place in zip(people, chosen, strict=True):
        devices = places[place]
        if len(processes) != len(devices):
            raise _wrong_sizes(hosts, nodes)
        seats, _ = _assign(_costs(processes, [kinds[k] for k in devices]))
        seated |= {one.rank: devices[seat] for one, seat in zip(processes, seats, strict=True)}
    return seated


def _grouped(items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _assign(costs: Sequence[Sequence[float]]) -> tuple[list[int], float]:
    """The column of each row, of which there may be fewer, and what that costs. Of assignments that cost the same, the
    one nearest to the order."""
    matrix = numpy.array(costs, dtype=float)
    # Squares of distances are least in order; all of them together weigh less than any difference in cost.
    away = numpy.subtract.outer(*map(numpy.arange, matrix.shape)) ** 2.0 / (max(matrix.shape) + 1) ** 3
    rows, columns = linear_sum_assignment(matrix + away)
    return columns.tolist(), float(matrix[rows, columns].sum())


def _costs(processes: Sequence[RankInfo], kinds: Sequence[Kind]) -> list[list[float]]:
    return [[_cost(one, kind) for kind in kinds] for one in processes]


def _cost(one: RankInfo, kind: Kind) -> float:
    if not _can_be(one, kind):
        return _CANNOT
    # What was measured names its hardware in `source`, whatever the kind is called.
    model = model_of(kind.name) or model_of(kind.source)
    has = model_of(one.hardware)
    if not one.is_gpu or not model or not has or not _may_mean(model, has):
        return _PERHAPS
    return 0.0 if model == has else _PERHAPS / 2


def _can_be(one: RankInfo, kind: Kind) -> bool:
    if not one.is_gpu:
        return True
    enough = one.memory_bytes >= ENOUGH_MEMORY * kind.memory_bytes
    return enough and _may_mean(model_of(kind.name), model_of(one.hardware))


def _may_mean(wanted: str, has: str) -> bool:
    """Models that are not known to differ: someone who writes a10 may mean the a10g."""
    return wanted.startswith(has) or has.startswith(wanted)


def strange_hardware(told: Sequence[RankInfo], cluster: Cluster) -> str:
    """What to say where processes without a GPU stand in for GPUs, which is fine to try a plan out; "" elsewhere."""
    hosts = [one for one in told if not one.is_gpu]
    gpus = [kind for kind in cluster.kinds if model_of(kind.name) or model_of(kind.source)]
    others = cluster.devices - sum(kind.devices for kind in gpus)
    if len(hosts) <= others or not gpus:
        return ""
    named = ", ".join(dict.fromkeys(kind.name for kind in gpus))
    return (
        f"the plan is for the cluster {cluster.name} with {named}, and {len(hosts)} of {len(told)} processes have no "
        "GPU: the run is right, and its times are not those that were predicted. Leave cluster= and plan= out to have "
        "these devices measured"
    )


# Refusals


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


def _counted(groups: Mapping[str, Sequence[object]]) -> str:
    return ", ".join(f"{len(members)} on {name}" for name, members in groups.items())


def _nodes_of(cluster: Cluster) -> dict[str, list[int]]:
    return _grouped(range(cluster.devices), lambda k: cluster.device_names[k].split("/")[0])


def torchrun_line(cluster: Cluster) -> str:
    """How to start a process for each device."""
    nodes = _nodes_of(cluster)
    sizes = {len(devices) for devices in nodes.values()}
    if len(nodes) == 1:
        return f"torchrun --nproc-per-node {cluster.devices} train.py"
    start = f"torchrun --nnodes {len(nodes)} --node-rank K --master-addr HOST --nproc-per-node"
    if len(sizes) == 1:
        return f"{start} {max(sizes)} train.py, on each node, K from 0"
    return f"{start} N train.py, on each node, K from 0, N being {_counted(nodes)}"


def _wrong_number(told: Sequence[RankInfo], cluster: Cluster, on: Cluster) -> WorldError:
    hosts = _grouped(told, lambda one: one.host)
    wants = f"{on.devices} ({_counted(_nodes_of(on))})"
    if on.devices != cluster.devices:
        wants += f", or {cluster.devices} for all of its cluster ({_counted(_nodes_of(cluster))})"
    return WorldError(
        f"there are {len(told)} processes, and the plan wants {wants}",
        where=f"processes: {_counted(hosts)}",
        do=f"start it with {torchrun_line(on)}; or plan for the devices there are",
    )


def _wrong_sizes(hosts: Mapping[str, Sequence[RankInfo]], nodes: Mapping[str, Sequence[int]]) -> WorldError:
    return WorldError(
        f"the plan wants {_counted(nodes)}, and processes are spread otherwise: {_counted(hosts)}",
        where="processes per node",
        do="start as many processes on each host as its node has devices (torchrun --nproc-per-node)",
    )


def _wrong_hardware(one: RankInfo, name: str, kind: Kind) -> WorldError:
    return WorldError(
        f"{one} should be {name} ({_gib(kind.memory_bytes)})",
        where=f"kind {kind.name} of the plan's cluster",
        do="start the processes on the hardware that was planned for, or plan for this hardware",
    )
