"""A cluster of unequal hosts, built out of one Linux machine, used, and removed.

python benchmarks/lab.py lab-cpu -- SCRIPT.py ARGS...     run a script with torchrun on every host
python benchmarks/lab.py lab-cpu --check                  measure the hosts and links against what was asked for
python benchmarks/lab.py --list | --clean                 what there is; remove what a killed run left behind

In: a `LabSpec` (`lab_spec.py`). Out: `build(spec)`, a context that gives a `Lab`; `lab.run([script, ...])` runs it on
every host with plain torchrun and gloo, exactly as one would type it on so many machines, and returns what each host
printed.

    as root       a host is a network namespace on a bridge, its link shaped by `tc`, its processor share a quota of its
                  control group, its cores a mask, its name a UTS namespace
    otherwise     a host is a mask of cores, and nothing else: no share of a core, no link. A warning says so
    on a GPU      a host is a client of the CUDA multi-process service with a part of the multiprocessors. In a lab that
                  talks over NCCL, LOPSIDED_LAB_NCCL (or --nccl) is the path of a library that takes them all

The one idea: all links and bridges live in namespaces of their own, and all names carry the process that made them, so
nothing of the machine's own network is touched, and what belongs to a dead process can be told from its name alone.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import lab_cgroup
from lab_spec import (
    NCCL_LIBRARY,
    NETNS,
    SPECS,
    Host,
    LabSpec,
    Seat,
    affinity_seats,
    cores_for,
    delayed,
    environment,
    gpu_seats,
    host_seats,
    hosts_file,
    mps_environment,
    network,
    torchrun,
)

__all__ = [
    "SPECS",
    "Completed",
    "Host",
    "Lab",
    "LabError",
    "LabSpec",
    "LabWarning",
    "build",
    "clean",
    "cores_for",
    "start_line",
]

HERE = Path(__file__).parent
NAME = re.compile(r"lps-([0-9a-f]+)-([0-9a-f]+)-([0-9]+)")
"""What everything of a lab is called: process, when it started (clock ticks since boot), and how many labs it made."""
PERIOD_US = 20_000
PORT = 29_500
GRACE_S = 10.0
"""How long the others have when one host has failed, and how long anyone has between SIGTERM and SIGKILL."""
DOOR = "LOPSIDED_LAB_DOOR"


class LabError(RuntimeError):
    """A lab that cannot be built, or a command that cannot be run in it. (Building one needs neither torch nor us.)"""


class LabWarning(UserWarning):
    """The lab is not all that was asked for."""


@dataclass(frozen=True, slots=True)
class Completed:
    """What a command did on one host."""

    host: str
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False


# How a lab is called, and whose it is


def own_name(count: int) -> str:
    return f"lps-{os.getpid():x}-{_started(os.getpid()):x}-{count}"


def is_in_use(name: str) -> bool:
    """Does the process that made it still live? Anything not named by us counts as in use."""
    parts = NAME.match(name)
    return parts is None or _started(int(parts[1], 16)) == int(parts[2], 16)


def _started(pid: int) -> int:
    """When a process started, in clock ticks since boot; -1 if there is none. The name in brackets is anything."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return -1


# The lab


class Lab:
    """A built cluster. `run` it; the context it came from removes it."""

    def __init__(self, spec: LabSpec, name: str, seats: tuple[Seat, ...], folder: Path) -> None:
        self.spec, self.name, self.seats, self.folder = spec, name, seats, folder
        self._runs = 0

    @property
    def is_whole(self) -> bool:
        """Whether hosts have their shares and links, and not just cores."""
        return self.spec.kind == "gpu" or self.seats[0].netns != "-"

    def run(
        self,
        script: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        fast_start: bool = False,
        on_line: Callable[[str, str], None] | None = None,
    ) -> list[Completed]:
        """Run a script (a file and its arguments) with torchrun on every host at once.

        With `fast_start` hosts run at full speed until every rank has called `start_line()`: importing torch on a
        quarter of a core takes longer than what is to be measured.
        """
        self._runs += 1
        port = PORT + self._runs % 1000 if self.seats[0].netns != "-" else _free_port()
        commands = [torchrun(self.seats, rank, port, script) for rank in range(len(self.seats))]
        return self.execute(commands, env=env, timeout_s=timeout_s, fast_start=fast_start, on_line=on_line)

    def execute(
        self,
        commands: Sequence[Sequence[str]],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        fast_start: bool = False,
        on_line: Callable[[str, str], None] | None = None,
    ) -> list[Completed]:
        """Run a command of its own on each host, all at once. When one fails, the others have ten seconds left.

        `on_line(host, line)` is told what is said as it comes, one line after the other.
        """
        if len(commands) != len(self.seats):
            raise LabError(f"{len(commands)} commands for {len(self.seats)} hosts: give one per host")
        door = Path(tempfile.mkdtemp(prefix="door-", dir=self.folder))
        self._speed(full=fast_start)
        jobs: list[_Job] = []
        one_at_a_time = threading.Lock()

        def tell(host: str, line: str) -> None:
            if on_line is not None:
                with one_at_a_time:
                    on_line(host, line)

        deadline = time.monotonic() + timeout_s
        try:
            for seat, command in zip(self.seats, commands, strict=True):
                own = {**os.environ, **environment(seat), **(env or {})}
                own |= {DOOR: str(door)} if fast_start else {}
                pinned = seat.cgroup == "-" or not fast_start
                jobs.append(_Job(seat, command, own, pinned=pinned, tell=tell))
            while any(job.running for job in jobs) and time.monotonic() < deadline:
                if fast_start and len(list(door.glob("rank-*"))) == len(jobs):
                    self._speed(full=False)
                    (door / "open").touch()
                    fast_start = False
                if any(job.failed for job in jobs):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                time.sleep(0.02)
            late = [job.running for job in jobs]
            failed = any(job.failed for job in jobs)
            return [job.end(timed_out=slow and not failed) for job, slow in zip(jobs, late, strict=True)]
        finally:
            for job in jobs:
                job.end(timed_out=True)
            for seat in self.seats:
                if seat.cgroup != "-":
                    lab_cgroup.kill(Path(seat.cgroup))
            shutil.rmtree(door, ignore_errors=True)

    def _speed(self, *, full: bool) -> None:
        for seat in self.seats:
            if seat.cgroup != "-":
                lab_cgroup.limit(Path(seat.cgroup), None if full else seat.host.cpu, PERIOD_US)
                if not full and seat.cores:
                    lab_cgroup.pin(Path(seat.cgroup), seat.cores)


class _Job:
    """A command on one host, with its output read as it comes."""

    def __init__(
        self,
        seat: Seat,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        pinned: bool,
        tell: Callable[[str, str], None],
    ) -> None:
        self.seat = seat
        cores = ",".join(map(str, seat.cores)) if pinned and seat.cores else "-"
        place = [seat.cgroup, seat.netns, seat.hostname, seat.hosts_file, cores]
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HERE / "lab_host.py"), *place, "--", *command],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._said: tuple[list[str], list[str]] = ([], [])
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, said, tell), daemon=True)
            for pipe, said in zip((self._process.stdout, self._process.stderr), self._said, strict=True)
        ]
        for reader in self._readers:
            reader.start()
        self._done: Completed | None = None

    def _read(self, pipe: Iterator[str], said: list[str], tell: Callable[[str, str], None]) -> None:
        for line in pipe:
            said.append(line)
            tell(self.seat.host.name, line.rstrip("\n"))

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def failed(self) -> bool:
        return self._process.poll() not in (None, 0)

    def end(self, *, timed_out: bool) -> Completed:
        """What it did; if it is still at it, it is asked to end, and then made to."""
        if self._done is None:
            timed_out = timed_out and self.running
            for number in (signal.SIGTERM, signal.SIGKILL):
                if self.running:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self._process.pid, number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(GRACE_S)
            seconds = time.monotonic() - self._began
            if self.seat.cgroup != "-":
                lab_cgroup.kill(Path(self.seat.cgroup))  # whoever holds the pipes open keeps the readers waiting
            for reader in self._readers:
                reader.join(GRACE_S)
            for pipe in (self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
            code = self._process.returncode if self._process.returncode is not None else -int(signal.SIGKILL)
            out, err = ("".join(said) for said in self._said)
            self._done = Completed(self.seat.host.name, code, out, err, seconds, timed_out)
        return self._done


def start_line(rank: int) -> None:
    """For scripts that were started with `fast_start`: returns once all have come, and hosts have their speeds."""
    if DOOR in os.environ:
        door = Path(os.environ[DOOR])
        (door / f"rank-{rank}").touch()
        while not (door / "open").exists():
            time.sleep(0.005)


# Building and removing


_built = 0
_relays: dict[str, subprocess.Popen[str]] = {}


@contextlib.contextmanager
def build(spec: LabSpec, *, pin: bool = True) -> Iterator[Lab]:
    """The lab of a spec, for as long as the context lasts. Whatever ends the context removes it, SIGTERM included."""
    global _built
    _built += 1
    name = own_name(_built)
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o700)
    with contextlib.ExitStack() as stack:
        last_resort = atexit.register(functools.partial(_remove, name))
        stack.callback(atexit.unregister, last_resort)
        stack.callback(_remove, name)
        stack.enter_context(_ended_by_signals())
        if spec.kind == "gpu":
            library = os.environ.get(NCCL_LIBRARY, "") if spec.nccl else ""
            if library and not Path(library).is_file():
                raise LabError(f"{NCCL_LIBRARY}: there is no {library}")
            _start_mps(folder)
            seats = gpu_seats(spec, folder, str(Path(library).resolve()) if library else "")
        elif obstacle := _obstacle(name):
            warnings.warn(LabWarning(f"hosts have cores but no shares of them, and no links: {obstacle}"), stacklevel=3)
            seats = affinity_seats(spec, sorted(os.sched_getaffinity(0)))
        else:
            seats = host_seats(spec, name, folder, sorted(os.sched_getaffinity(0)) if pin else ())
            (folder / "hosts").write_text(hosts_file(seats))
            _plug_in(spec, name)
        yield Lab(spec, name, seats, folder)


def _obstacle(name: str) -> str:
    """Why this machine cannot be split into hosts; empty if it can, and then the first namespace is there."""
    if os.geteuid() != 0:
        return "that needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} (iproute2) not found"
    root, reason = lab_cgroup.root()
    if root is None:
        return reason
    made = subprocess.run(["ip", "netns", "add", f"{name}-switch"], capture_output=True, text=True, check=False)
    return f"ip netns add: {made.stderr.strip()}" if made.returncode else ""


def _plug_in(spec: LabSpec, name: str) -> None:
    root, _ = lab_cgroup.root()
    assert root is not None
    lab_cgroup.make(root / name, [host.name for host in spec.hosts])
    for host in spec.hosts:
        _do(["ip", "netns", "add", f"{name}-{host.name}"])
    delays = delayed(spec)
    netem = not delays or _has_netem(name)
    if not netem:
        _start_relay(name, delays)
    for command in network(spec, name, netem=netem):
        _do(command)


def _has_netem(name: str) -> bool:
    """Tried on the loopback of a namespace that is ours and needs none."""
    words = ["tc", "-n", f"{name}-switch", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return subprocess.run(words, capture_output=True, check=False, stdin=subprocess.DEVNULL).returncode == 0


def _start_relay(name: str, delays: Mapping[str, float]) -> None:
    """It ends when its input does, so at the latest with this process."""
    cables = [f"{cable}={milliseconds:g}" for cable, milliseconds in delays.items()]
    relay = subprocess.Popen(
        [sys.executable, "-E", "-S", str(HERE / "lab_delay.py"), str(NETNS / f"{name}-switch"), *cables],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _relays[name] = relay
    assert relay.stdout is not None
    assert relay.stderr is not None
    if relay.stdout.readline() != "ready\n":
        raise LabError(f"links cannot be delayed: {relay.stderr.read().strip()}")


def _stop_relay(name: str) -> None:
    if (relay := _relays.pop(name, None)) is not None:
        relay.communicate()


def _do(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")


def _start_mps(folder: Path) -> None:
    if shutil.which("nvidia-cuda-mps-control") is None:
        raise LabError("nvidia-cuda-mps-control not found: a GPU lab needs a machine with an NVIDIA GPU and its driver")
    for path in mps_environment(folder).values():
        Path(path).mkdir()
    with (folder / "mps-start.txt").open("w") as said:  # a pipe would be held open by the daemon
        done = subprocess.run(
            ["nvidia-cuda-mps-control", "-d"],
            env={**os.environ, **mps_environment(folder)},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            check=False,
        )
    if done.returncode:
        raise LabError(f"the CUDA multi-process service does not start: {(folder / 'mps-start.txt').read_text()}")


def _stop_mps(folder: Path) -> None:
    if (folder / "mps").is_dir() and shutil.which("nvidia-cuda-mps-control") is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                ["nvidia-cuda-mps-control"],
                env={**os.environ, **mps_environment(folder)},
                input="quit -t 5\n",
                text=True,
                capture_output=True,
                check=False,
                timeout=30,
            )


def _remove(name: str) -> None:
    """Everything that carries this name. Signals wait until it is done."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        root, _ = lab_cgroup.root()
        if root is not None:
            with contextlib.suppress(OSError):  # a process that cannot be killed yet; the rest goes all the same
                lab_cgroup.remove(root / name)
        _stop_relay(name)
        for netns in _entries(NETNS):
            if netns.startswith(f"{name}-"):
                subprocess.run(["ip", "netns", "delete", netns], capture_output=True, check=False)
        folder = Path(tempfile.gettempdir()) / name
        if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.geteuid():
            _stop_mps(folder)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def clean() -> list[str]:
    """Remove the labs of processes that are gone, and return their names."""
    root, _ = lab_cgroup.root()
    found = [*_entries(NETNS), *(_entries(root) if root else []), *_entries(Path(tempfile.gettempdir()))]
    names = sorted({match[0] for entry in found if (match := NAME.match(entry)) and not is_in_use(match[0])})
    for name in names:
        _remove(name)
    return names


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that contexts end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# The command line


def check(lab: Lab, arguments: Sequence[str] = ()) -> str:
    """What the hosts and links of a lab are, against what was asked for, as a table."""
    done = lab.run([str(HERE / "lab_probe.py"), *arguments], fast_start=True, timeout_s=300)
    for one in done:
        if one.returncode:
            raise LabError(f"the probe failed on {one.host}: {one.stderr.strip()}")
    return check_table(lab.spec, json.loads(done[0].stdout))


def check_table(spec: LabSpec, found: Mapping[str, Any]) -> str:
    gpu, speeds = spec.kind == "gpu", found["hosts"]
    asked = [host.gpu_percent / 100 if gpu else host.cpu for host in spec.hosts]
    lines = [f"{spec.name}: {spec.about}", "", "host   asked   all at once        blocks of 30 ms vary   of 3 ms"]
    for host, share, speed in zip(spec.hosts, asked, speeds, strict=True):
        # A part of a GPU cannot be had at full speed: there the first host is what others are measured by.
        whole = speeds[0]["long"]["per_s"] / asked[0] if gpu else speed["alone"]["per_s"]
        got, (short, long) = speed["long"]["per_s"] / whole, (speed[name]["variation"] for name in ("short", "long"))
        lines.append(f"{host.name:<6} {share:5.0%}   {got:6.1%} ({got / share - 1:+.1%})   {long:20.1%} {short:9.1%}")
    wrong = [f"{h.name} by {s['off']:.0%}" for h, s in zip(spec.hosts, speeds, strict=True) if s.get("off", 0) > 0.02]
    if wrong:
        lines += ["", f"products of bf16 are wrong on {', '.join(wrong)}: train in float32 there (docs/lab.md)"]
    if "links" in found:
        lines += ["", "link   asked            bulk            100 kB          round trip"]
    for link in found.get("links", ()):
        ends = spec.hosts[link["from"]], spec.hosts[link["to"]]
        far = ends[0].behind != ends[1].behind
        mbit = min(ends[0].mbit, ends[1].mbit, *([spec.trunk_mbit] if far else []))
        delay_ms = 2 * (ends[0].delay_ms + ends[1].delay_ms + far * spec.trunk_delay_ms)
        want = "the machine's" if gpu else f"{mbit:4.0f} Mbit/s {delay_ms:g} ms"
        rates = f"{link['bulk_mbit']:6.0f} Mbit/s {link['small_mbit']:8.0f} Mbit/s"
        lines.append(f"{ends[0].name} → {ends[1].name}  {want:<15} {rates} {link['round_trip_s'] * 1e3:8.2f} ms")
    if "all_reduces_s" in found:
        times = ", ".join(f"{seconds * 1e3:.1f}" for seconds in found["all_reduces_s"])
        lines += ["", f"all-reduce of {found['bytes'] / 1e6:g} MB: {times} ms"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("lab", nargs="?", choices=tuple(SPECS))
    parser.add_argument("--list", action="store_true", help="what labs there are")
    parser.add_argument("--clean", action="store_true", help="remove what a killed run left behind")
    parser.add_argument("--check", action="store_true", help="measure hosts and links against what was asked for")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--fast-start", action="store_true", help="full speed until every rank called start_line()")
    parser.add_argument("--nccl", default="", metavar="PATH", help="a libnccl.so.2 to load, for labs that talk over it")
    own, script = sys.argv[1:], []
    if "--" in own:
        own, script = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    if options.list:
        for spec in SPECS.values():
            print(f"{spec.name:<14} {spec.about}")
        return 0
    if options.clean:
        print("\n".join(f"removed {name}" for name in clean()) or "nothing to remove")
        return 0
    if options.lab is None or (not script and not options.check):
        parser.print_usage()
        return 2
    spec = SPECS[options.lab]
    if options.nccl:
        os.environ[NCCL_LIBRARY] = options.nccl
    with build(spec) as lab:
        if options.check:
            print(check(lab))
            return 0
        done = lab.run(
            script,
            timeout_s=options.timeout,
            fast_start=options.fast_start,
            on_line=lambda host, line: print(f"{host}| {line}", flush=True),
        )
    for one in done:
        if one.timed_out:
            print(f"{one.host}: stopped after {options.timeout:g} s")
    return max(abs(one.returncode) for one in done)


if __name__ == "__main__":
    raise SystemExit(main())
