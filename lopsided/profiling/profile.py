"""Profiling as a whole: which graphs, on which processes, and what was found as plain data.

In: `ProfileRequest`: graphs, or those of a standard set. Out: a `Measurement`.

By torchrun every process calls `take_profile`. By itself one machine profiles itself: `profile_here` does it in this
process where there is one device, and starts a worker for each otherwise.

Measurements are remembered: the same model on the same hardware is measured once (`measure_once`). A measurement is
kept in a file named by a digest of all that it depends on and that can be told without measuring: the hardware of every
rank, how many processes sit where, versions, the graph. What cannot be told (a slower link, a busier host) is found out
in a fraction of a second: a product on every rank and a collective among all must take about as long as the file says.
Files may be old, damaged or gone; then it is measured anew. `LOPSIDED_CACHE=0` turns this off.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from lopsided.capturing.capture_graph import capture
from lopsided.capturing.retype import in_dtype
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.cluster_file import CLUSTER_FILE, parse_cluster
from lopsided.cluster.collectives import Network
from lopsided.codec import read_text
from lopsided.comm.worker_pool import WorkerPool
from lopsided.comm.world import begin
from lopsided.errors import LopsidedError
from lopsided.ir.graph import Graph
from lopsided.models.by_name import load
from lopsided.profiling.kinds import seat_of
from lopsided.profiling.links import ControlGroup, occurrence
from lopsided.profiling.measure import Measurement, Progress, measure, take_measurement
from lopsided.profiling.noise import quota_of_processors, typical
from lopsided.profiling.op_times import Speeds, measure_speeds
from lopsided.profiling.overhead import MEASURABLE_OPTIMIZERS
from lopsided.profiling.topology import council_of, talkers_of

STANDARD = (
    "gpt2:layers=1,width=256,heads=4,seq=128,vocab=2000,batch=16",
    "gpt2:layers=1,width=512,heads=8,seq=128,vocab=2000,batch=8",
    "vgg19:width=16,ffn=256,classes=100,batch=16",
)
"""Small models whose calls most models make: products, attention, norms, convolutions."""

_POLL_S = 0.2
_PATIENCE_S = 3600.0


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What to profile: the calls of these graphs, products in these dtypes too, steps of these optimizers."""

    graphs: tuple[Graph, ...]
    dtypes: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = MEASURABLE_OPTIMIZERS
    budget_s: float = 60.0


def standard(dtype: str | None, batch: int | None) -> ProfileRequest:
    """What to profile for whatever model will come: in this dtype, or in those that people train in."""
    on_gpu = torch.cuda.is_available()
    graphs = [capture(*load(spec, batch=batch)) for spec in STANDARD]
    if dtype:
        return ProfileRequest(tuple(in_dtype(graph, dtype) for graph in graphs))
    if on_gpu:
        graphs += [in_dtype(graph, "bf16") for graph in graphs]
    return ProfileRequest(tuple(graphs), ("f32", "bf16", "f16") if on_gpu else ("f32", "bf16"))


def take_profile(wanted: ProfileRequest, progress: Progress = lambda done, total: None) -> Measurement:
    """Rank 0's measurement, the same in every process of the world. All of them call this."""
    device = begin()
    return take_measurement(
        wanted.graphs,
        device,
        optimizers=wanted.optimizers,
        dtypes=wanted.dtypes,
        budget_s=wanted.budget_s,
        progress=progress,
    )


def is_one_of_many() -> bool:
    """Whether torchrun started this process, beside others or alone."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Whether this is the process that tells."""
    return not dist.is_initialized() or dist.get_rank() == 0


def profile_here(
    wanted: ProfileRequest, processes: int = 0, progress: Progress = lambda done, total: None
) -> Measurement:
    """Profile this machine: every GPU, or the CPU; or so many processes."""
    many = processes or max(torch.cuda.device_count(), 1)
    if many == 1:
        return take_profile(wanted, progress)
    threads = max((os.cpu_count() or 1) // many, 1) if not torch.cuda.is_available() else 1
    with WorkerPool(many, threads=threads, timeout_s=_PATIENCE_S) as pool:
        told = Path(pool.folder) / "progress"
        with _followed(told, progress):
            found: Measurement = pool.run(_in_worker, wanted, str(told))[0]
    return found


def _in_worker(wanted: ProfileRequest, told: str) -> Measurement:
    def tell(done: int, total: int) -> None:
        if dist.get_rank() == 0:
            Path(told).write_text(f"{done} {total}")

    return take_profile(wanted, tell)


class _followed:
    """Hands on what a worker writes about its progress, as long as this is entered."""

    def __init__(self, told: Path, progress: Progress) -> None:
        self._told, self._progress, self._over = told, progress, threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._over.wait(_POLL_S):
            words = self._told.read_text().split() if self._told.is_file() else []
            if len(words) == 2:  # else it is being written
                self._progress(int(words[0]), int(words[1]))


def in_percent(advance: Callable[[], None]) -> Progress:
    """Progress for a bar of a hundred steps, whatever the number of parts."""
    shown = 0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        while shown < 100 * done // total:
            advance()
            shown += 1

    return progress


CACHE_VARIABLE = "LOPSIDED_CACHE"

_FORMAT = 1
_OLD_S = 30 * 24 * 3600.0
_LOOK_S = 0.05
_LOOK_BYTES = 2**20
_LOOKS = 5
# Looks before something is said to have changed: one may fall on a busy moment.
_GLANCES = 3
# A device 1.4 times as fast or as slow, or a link twice, is not the hardware it was.
_SPEED_OFF, _LINK_OFF = 1.4, 2.0
_MORE = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

_MEASURED_AS = 6
"""Raised when what is measured changes: what was remembered before says nothing then."""


def cache_folder() -> Path | None:
    """Where measurements are kept; None where they are not."""
    if os.environ.get(CACHE_VARIABLE, "1") == "0":
        return None
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "lopsided" / "clusters"
    except RuntimeError:  # there is no home
        return None


def measure_once(
    graph: Graph,
    device: torch.device,
    *,
    optimizers: Sequence[str] = (),
    budget_s: float = 20.0,
    progress: Progress = lambda done, total: None,
    told: Callable[[str], object] = lambda what: None,
    cache: bool = True,
) -> Cluster:
    """`measure`, or what it gave the last time. All processes call this, with the same `cache`.

    `told` hears which of the two, and why.
    """
    folder = cache_folder() if cache else None
    seconds = f"measuring the devices for about {budget_s:g} s"
    council = council_of(None)
    facts = council.hear((_facts(device), folder is not None))
    if not all(is_on for _, is_on in cast(list[tuple[object, bool]], facts)):
        told(seconds)
        return measure(graph, device, optimizers=optimizers, budget_s=budget_s, progress=progress)
    name = digest([_MEASURED_AS, list(facts), torch.__version__, graph.fingerprint, list(optimizers), budget_s])
    # Rank 0's file: the others' homes may be other ones.
    text, *_ = council.hear(read(folder, name) if folder is not None else "")
    found = _parsed(cast(str, text))
    known = found is not None and found.devices == len(facts)
    if found is not None and known and _holds(found, device, council):
        told(f"the devices are as they were measured before ({CACHE_VARIABLE}=0 measures anew)")
        return found
    told(f"{seconds}: they are not as fast as they were before" if known else seconds)
    cluster = measure(graph, device, optimizers=optimizers, budget_s=budget_s, progress=progress)
    if folder is not None and council.rank == 0:
        keep(folder, name, cluster.text())
    return cluster


def _facts(device: torch.device) -> list[object]:
    """What one process can tell of itself that its speed depends on."""
    seat = seat_of(device, Speeds((), 0.0, 0.0))
    backend = dist.get_backend() if dist.is_initialized() else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        platform.node(),
        seat.hardware,
        seat.gpu,
        torch.get_num_threads(),
        cores,
        quota_of_processors(),
        backend,
        str(seat.nccl),
        [os.environ.get(name, "") for name in _MORE],
    ]


def digest(facts: object) -> str:
    return hashlib.sha256(json.dumps([_FORMAT, facts]).encode()).hexdigest()[:32]


# Files


def read(folder: Path, name: str) -> str:
    """The text of a file that is there and not old; "" otherwise."""
    path = folder / f"{name}.toml"
    try:
        return read_text(path, CLUSTER_FILE) if time.time() - path.stat().st_mtime <= _OLD_S else ""
    except (OSError, ValueError, LopsidedError):
        return ""


def keep(folder: Path, name: str, text: str) -> None:
    """All of it or nothing. Where it cannot be written it is not kept."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(prefix=f"{name}.", suffix=".part", dir=folder)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(made, folder / f"{name}.toml")
        except OSError:
            os.unlink(made)
            raise


def _parsed(text: str) -> Cluster | None:
    try:
        return parse_cluster(text, "a remembered measurement") if text else None
    except LopsidedError:
        return None


# Is it still so?


def _holds(cluster: Cluster, device: torch.device, council: ControlGroup) -> bool:
    """Whether a short look at every device and at the links agrees with the file; the same answer on all ranks."""
    kind = cluster.device_kinds[council.rank]
    dtype = kind.flops_per_s[0][0]
    for _ in range(_GLANCES):
        council.gather()
        now = dict(measure_speeds((dtype,), device, _LOOK_S).flops_per_s)[dtype]
        off = council.slowest(max(now / kind.flops(dtype), kind.flops(dtype) / now))
        if off <= _SPEED_OFF:
            break
    else:
        return False
    if council.group is None:
        return True
    talkers = talkers_of(cluster, device, council)
    flat = torch.zeros(_LOOK_BYTES // 4, device=device)

    def talk() -> torch.Tensor:
        return talkers.communicator.all_reduce(flat, what="a look at the links", algorithm="ring").wait()

    talk()
    said = next(way for way in Network(cluster).ways("all_reduce") if way.implementation == "ring").seconds(_LOOK_BYTES)
    for _ in range(_GLANCES):
        took = typical(council.mean([occurrence(talk, talkers)[1] for _ in range(_LOOKS)]))
        if max(took / said, said / took) <= _LINK_OFF:
            return True
    return False
