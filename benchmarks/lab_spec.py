"""What labs there are, and what building one does to the machine, as plain data: nothing is done here.

In: a `LabSpec`. Out: a `Seat` per host, which says where its processes run, and lists of words to execute. The one
idea: every command is a value, so it can be tested on a machine that may not execute it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import lab_cgroup

NETNS = Path("/var/run/netns")
SUBNET = "10.77.0"
"""Of a network that only the hosts are on: it has no way out, so it cannot collide with one the machine is on."""
MTU = 9000
"""Large frames, so that the kernel's work per frame, which no host pays for, stays small beside what the hosts do."""
BURST_S, LEAST_BURST_BYTES = 0.00026, 20 * 1024
"""What may pass at once: enough for the timer to keep up the rate (two frames at least), too little to hide it."""
QUEUE_BYTES = 16 * 2**20
"""More than the windows of all senders to one host, so that nothing is lost: a retransmission takes 200 ms."""


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of the lab."""

    name: str
    cpu: float = 1.0  # cores: 0.25 is a quarter of one
    mbit: float = 1000.0  # of its link, either way
    delay_ms: float = 0.0  # of its link, each way
    behind: str = ""  # the switch it hangs on
    gpu_percent: int = 0  # of the multiprocessors of the one GPU


@dataclass(frozen=True, slots=True)
class LabSpec:
    """A cluster as it should be. Every further switch is joined to the first by a trunk of its own."""

    name: str
    about: str
    hosts: tuple[Host, ...]
    kind: str = "cpu"
    nccl: bool = False  # hosts that share one GPU talk over NCCL
    trunk_mbit: float = 1000.0
    trunk_delay_ms: float = 0.0

    @property
    def switches(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(host.behind for host in self.hosts))


SPECS = {
    spec.name: spec
    for spec in (
        LabSpec(
            "lab-cpu",
            "four hosts with 100, 50, 25 and 25 % of a core, 1 Gbit/s",
            (Host("a", 1.0), Host("b", 0.5), Host("c", 0.25), Host("d", 0.25)),
        ),
        LabSpec(
            "lab-cpu-2link",
            "two hosts with 100 and 50 % of a core at 1 Gbit/s, two with 25 % behind a trunk of 200 Mbit/s and 1 ms",
            (Host("a", 1.0), Host("b", 0.5), Host("c", 0.25, behind="far"), Host("d", 0.25, behind="far")),
            trunk_mbit=200.0,
            trunk_delay_ms=1.0,
        ),
        LabSpec("lab-even", "four hosts with 50 % of a core, 1 Gbit/s", tuple(Host(name, 0.5) for name in "abcd")),
        LabSpec(
            "lab-gpu",
            "four processes with 50, 25, 12 and 12 % of one GPU",
            tuple(Host(name, gpu_percent=part) for name, part in zip("abcd", (50, 25, 12, 12), strict=True)),
            kind="gpu",
        ),
        LabSpec(
            "lab-gpu-2",
            "two processes with 70 and 30 % of one GPU",
            (Host("a", gpu_percent=70), Host("b", gpu_percent=30)),
            kind="gpu",
        ),
        LabSpec(
            "lab-nccl",
            "four processes with 50, 25, 12 and 12 % of one GPU, which talk over NCCL",
            tuple(Host(name, gpu_percent=part) for name, part in zip("abcd", (50, 25, 12, 12), strict=True)),
            kind="gpu",
            nccl=True,
        ),
        LabSpec(
            "lab-nccl-2",
            "two processes with 50 and 25 % of one GPU, which talk over NCCL",
            (Host("a", gpu_percent=50), Host("b", gpu_percent=25)),
            kind="gpu",
            nccl=True,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Seat:
    """Where the processes of one host run: "-" for what they share with the machine."""

    host: Host
    address: str = "127.0.0.1"
    interface: str = "lo"
    netns: str = "-"
    cgroup: str = "-"
    hostname: str = "-"
    hosts_file: str = "-"
    cores: tuple[int, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def cores_for(hosts: Sequence[Host], cores: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The largest host first, each on the core with the most left; hosts of several cores get several."""
    left = dict.fromkeys(cores, 1.0)
    given: dict[int, tuple[int, ...]] = {}
    for at in sorted(range(len(hosts)), key=lambda at: -hosts[at].cpu):
        wanted = max(1, -(-int(hosts[at].cpu * 1000) // 1000))
        best = sorted(left, key=lambda core: -left[core])[:wanted]
        for core in best:
            left[core] -= hosts[at].cpu / len(best)
        given[at] = tuple(sorted(best))
    return tuple(given[at] for at in range(len(hosts)))


def shape(netns: str, device: str, mbit: float, delay_ms: float) -> list[list[str]]:
    """What leaves `device` at `mbit`, and, where the kernel can, `delay_ms` later."""
    words = ["tc", "-n", netns, "qdisc", "add", "dev", device]
    rate = [*words, "root", "handle", "1:", "tbf", "rate", f"{round(mbit * 1000)}kbit"]
    burst = max(LEAST_BURST_BYTES, round(mbit * 1e6 / 8 * BURST_S))
    rate += ["burst", str(burst), "limit", str(QUEUE_BYTES)]
    if not delay_ms:
        return [rate]
    delay = [*words, "parent", "1:1", "handle", "10:", "netem", "delay", f"{delay_ms:g}ms", "limit", "100000"]
    return [rate, delay]


def delayed(spec: LabSpec) -> dict[str, float]:
    """The cables that take their time, and how many milliseconds."""
    trunks = {f"t{number}": spec.trunk_delay_ms for number in range(1, len(spec.switches))}
    return {name: ms for name, ms in (trunks | {f"h{k}": h.delay_ms for k, h in enumerate(spec.hosts)}).items() if ms}


def network(spec: LabSpec, name: str, *, netem: bool) -> list[list[str]]:
    """The commands that build the network of a lab; without netem, delayed cables are left to `lab_delay.py`."""
    switch = f"{name}-switch"
    commands: list[list[str]] = []
    for number in range(len(spec.switches)):
        commands.append(["ip", "-n", switch, "link", "add", f"s{number}", "type", "bridge"])
        commands.append(["ip", "-n", switch, "link", "set", f"s{number}", "addrgenmode", "none", "up"])

    def cable(near: str, bridge: int, far: str, far_netns: str, mbit: float, delay_ms: float) -> None:
        mtu = ["mtu", str(MTU)]
        if netem or not delay_ms:
            ends = ["type", "veth", "peer", "name", far, *mtu, "netns", far_netns]
            commands.append(["ip", "-n", switch, "link", "add", near, *mtu, *ends])
        else:  # the two ends are there, made by the relay, both among the switches
            commands.append(["ip", "-n", switch, "link", "set", near, *mtu])
            commands.append(["ip", "-n", switch, "link", "set", f"{near}-", "name", far, *mtu, "netns", far_netns])
        commands.append(["ip", "-n", switch, "link", "set", near, "master", f"s{bridge}", "addrgenmode", "none", "up"])
        for netns, device in ((switch, near), (far_netns, far)):
            commands.extend(shape(netns, device, mbit, delay_ms if netem else 0.0))

    for number in range(1, len(spec.switches)):
        far = f"t{number}far"
        cable(f"t{number}", 0, far, switch, spec.trunk_mbit, spec.trunk_delay_ms)
        commands.append(["ip", "-n", switch, "link", "set", far, "master", f"s{number}", "addrgenmode", "none", "up"])
    for rank, host in enumerate(spec.hosts):
        netns = f"{name}-{host.name}"
        cable(f"h{rank}", spec.switches.index(host.behind), "eth0", netns, host.mbit, host.delay_ms)
        commands.append(["ip", "-n", netns, "link", "set", "lo", "up"])
        commands.append(["ip", "-n", netns, "address", "add", f"{SUBNET}.{rank + 1}/24", "dev", "eth0"])
        commands.append(["ip", "-n", netns, "link", "set", "eth0", "addrgenmode", "none", "up"])
    return commands


def torchrun(seats: Sequence[Seat], rank: int, port: int, script: Sequence[str]) -> list[str]:
    """What a user types on machine `rank`."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(seats)), "--node-rank", str(rank)]
    words += ["--nproc-per-node", "1", "--master-addr", seats[0].address, "--master-port", str(port)]
    return [*words, "--local-addr", seats[rank].address, *script]


def environment(seat: Seat) -> dict[str, str]:
    """What every process on a host finds in its environment."""
    sockets = {"GLOO_SOCKET_IFNAME": seat.interface, "TP_SOCKET_IFNAME": seat.interface}
    return {**sockets, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **seat.env}


def hosts_file(seats: Sequence[Seat]) -> str:
    """Torch looks its peers up by the address as IPv6 writes it."""
    lines = [f"{prefix}{seat.address} {seat.hostname}" for seat in seats for prefix in ("", "::ffff:")]
    return "\n".join(["127.0.0.1 localhost", "::1 localhost", *lines]) + "\n"


def mps_environment(folder: Path) -> dict[str, str]:
    """A multi-process service of our own, beside any other."""
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-log")}


NCCL_LIBRARY = "LOPSIDED_LAB_NCCL"
"""The variable with the path of a libnccl.so.2 to load in place of torch's."""
BACKEND = "LOPSIDED_LAB_BACKEND"
"""The variable that tells processes in a lab what they should talk over."""


def nccl_environment(library: str) -> dict[str, str]:
    """NCCL that takes several processes on one GPU (from 2.30 on), with few of its blocks: they are taken from those
    who compute. `library` is a path, or "" for the one that torch brings."""
    told = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4", BACKEND: "nccl"}
    return {**told, "LD_PRELOAD": library} if library else told


def gpu_seats(spec: LabSpec, folder: Path, library: str = "") -> tuple[Seat, ...]:
    part = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    shared = {**mps_environment(folder), "LOPSIDED_DEVICE": "cuda:0"}
    shared |= nccl_environment(library) if spec.nccl else {BACKEND: "gloo"}
    return tuple(Seat(host, env={**shared, part: str(host.gpu_percent)}) for host in spec.hosts)


def affinity_seats(spec: LabSpec, cores: Sequence[int]) -> tuple[Seat, ...]:
    return tuple(Seat(host, cores=own) for host, own in zip(spec.hosts, cores_for(spec.hosts, cores), strict=True))


def host_seats(spec: LabSpec, name: str, folder: Path, cores: Sequence[int]) -> tuple[Seat, ...]:
    root, _ = lab_cgroup.root()
    pinned = cores_for(spec.hosts, cores) if cores else [()] * len(spec.hosts)
    return tuple(
        Seat(
            host,
            address=f"{SUBNET}.{rank + 1}",
            interface="eth0",
            netns=str(NETNS / f"{name}-{host.name}"),
            cgroup=f"{root}/{name}/{host.name}",
            hostname=f"{spec.name}-{host.name}",
            hosts_file=str(folder / "hosts"),
            cores=pinned[rank],
        )
        for rank, host in enumerate(spec.hosts)
    )
