"""No rank hangs in silence: every rank tells where it is, and who fails tells why.

In: a `World` and the store through which its processes found each other. Out: `Watchdog`. A thread posts this rank's
`Position` every second; the main thread only writes attributes. When a collective fails, `explain` reads the others'
positions and names the rank that failed, died, left, or is elsewhere. A handshake at the start of a step finds ranks
that do not do the same before they wait for each other; so does one at the start of any other call that all ranks must
make (`call`).

A rank that is slow is alive: its thread posts while the main thread computes, compiles or loads. A rank whose thread is
silent for `SILENT_S` is stuck, unless its process is seen to compute (a call into a library may keep all of its
threads). A second thread needs no store, which may itself be silent: it ends a process that waits for one that is lost.

    posted            by whom                                     read by
    at/RANK           its thread, every second                    explain; the rank before it, every second
    failed            the first to know: an uncaught exception,   every thread, every second; explain
                      or whoever finds that a rank is silent
    seen/RANK         its thread, once it knows the failure       rank 0, whose process may hold the store and
    gone/RANK         a rank that leaves                          stays a moment, so that all can read
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import logging
import os
import re
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from lopsided.comm.uncaught import within
from lopsided.comm.world import World, default_store, no_longer_watched_by, odd_ones, watched_by
from lopsided.errors import LopsidedError, RankError, WorldError

_log = logging.getLogger("lopsided")

SILENT_S = 20.0
"""How long a rank may say nothing before it is taken for dead: one that waits for it has ended after half a minute."""

_MOST_S = 4.5  # that an explanation takes
_COMPUTES = 0.02  # of a processor, on a machine however busy: such a process is not stuck
_BEATS = 3  # that are missed by a rank that is called silent
_GRACE_S = 10.0  # for the main thread to notice by itself what the thread knows
_WORDS = 3  # of 8 bytes, for the name of a call
_NOTES = 3  # numbers that a rank tells of itself with a handshake
_LEAVE_S = 3.0  # that a rank takes at most to tell that it fails or leaves, and rank 0 stays for others that leave
_STAY_S = 10.0  # that rank 0 stays at most for others to read why it failed
_CONTENT = re.compile(r" holding [0-9a-f]{8}")
_numbers = itertools.count()

FORWARD = "a forward pass"
"""The call that a handshake is about, unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is. Times are of its own clock."""

    beat: int
    now_s: float
    step: int
    waiting_for: str  # "" while in the training script
    since_s: float
    ended: str = ""
    process: str = ""  # its number, and where that counts
    work: str = ""  # what it does itself; "" for the training script

    def text(self) -> str:
        told = [self.beat, self.now_s, self.step, self.waiting_for, self.since_s, self.ended, self.process, self.work]
        return json.dumps(told)

    @staticmethod
    def parse(text: str) -> Position:
        beat, now_s, step, waiting_for, since_s, *words = json.loads(text)
        return Position(int(beat), float(now_s), int(step), str(waiting_for), float(since_s), *map(str, words))

    @property
    def lasted_s(self) -> float:
        return max(self.now_s - self.since_s, 0.0)

    def __str__(self) -> str:
        doing = f"waiting for {self.waiting_for}" if self.waiting_for else self.work or "in the training script"
        return f"step {self.step}: {doing}"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the run cannot go on: said once, by the first to know."""

    culprit: int
    reason: str
    do: str = ""  # is not posted

    def text(self) -> str:
        return json.dumps([self.culprit, self.reason])

    @staticmethod
    def parse(text: str) -> Failure:
        culprit, reason = json.loads(text)
        return Failure(int(culprit), str(reason))


def blame(
    mine: Position, others: Mapping[int, Position | None], silent: Mapping[int, float], names: Mapping[int, str]
) -> tuple[str, str]:
    """What keeps this rank waiting, and what to do: from where the others are and how long some have been silent."""
    for rank, seconds in silent.items():
        return (
            f"{names[rank]} died or was stopped: silent for {seconds:.0f} s, last seen at {others[rank]}",
            "look for the end of its output; a process that is killed was often out of memory",
        )
    for rank, there in others.items():
        if there is not None and there.ended:
            return (
                f"{names[rank]} {there.ended} after step {there.step}, and this rank is at {mine}",
                "give every rank as many batches, and the same steps",
            )
    for rank, there in others.items():
        if there is None:
            return f"{names[rank]} has not begun", "see what it does before its model is made parallel"
        if there.waiting_for and (there.step, there.waiting_for) != (mine.step, mine.waiting_for):
            return (
                f"ranks do not run the same steps: {names[rank]} is at {there}, for {there.lasted_s:.0f} s, "
                f"and this rank at {mine}",
                "look for what one rank does and others do not: an `if rank == 0` around a step, an own evaluation",
            )
        if not there.waiting_for:
            return (
                f"{names[rank]} is at {there}, for {there.lasted_s:.0f} s, and this rank at {mine}",
                "see what it does there; give timeout_s more, if it may take so long",
            )
    return f"all ranks are at {mine}: the network between them is broken or slow", "look at the network's state"


def reason_of(error: BaseException, trace: TracebackType | None) -> str:
    """An exception on one line, with the line of the user's script.

    >>> reason_of(ValueError("too small"), None)
    'ValueError: too small'
    """
    what = error.what if isinstance(error, LopsidedError) else str(error)
    line = next((line.strip() for line in what.splitlines() if line.strip()), "")
    said = f"{type(error).__name__}: {line[:300]}" if line else type(error).__name__
    frames = traceback.extract_tb(trace)
    library = str(Path(__file__).parents[1])
    theirs = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith((library, "<"))]
    place = (theirs or list(frames))[-1:]
    return said + "".join(f" at {os.path.basename(frame.filename)}:{frame.lineno}" for frame in place)


def _odd_one(told: Mapping[int, Mapping[str, str]]) -> int:
    """A rank that does not do what most do."""
    does = {rank: json.dumps(facts) for rank, facts in told.items()}
    usual = max(does.values(), key=[*does.values()].count)
    return next((rank for rank, text in does.items() if text != usual), next(iter(does)))


class _Neighbour:
    """The rank that this one looks after."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._beat, self._looked_s, self._silent_s, self._spent_s = -1, time.monotonic(), 0.0, 0.0

    def silent_s(self, there: Position, most_s: float) -> float:
        """How long it has been silent. What lies between two looks counts up to `most_s`: this process, or the store,
        may itself have been stopped."""
        passed_s, self._looked_s = time.monotonic() - self._looked_s, time.monotonic()
        spent_s, before_s = _processor_s(there.process), self._spent_s
        self._spent_s = spent_s
        if there.beat != self._beat or spent_s - before_s > _COMPUTES * passed_s:
            self._beat, self._silent_s = there.beat, 0.0
        else:
            self._silent_s += min(passed_s, most_s)
        return self._silent_s


@lru_cache(maxsize=1)
def _where_processes_count() -> str:
    """Processes that say the same can see each other's numbers."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _processor_s(process: str) -> float:
    """Seconds of a processor that a process on this machine has taken; 0 of any other, or where that is not told."""
    number, _, where = process.partition(" ")
    if not where or where != _where_processes_count():
        return 0.0
    try:
        fields = Path(f"/proc/{int(number)}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


class Watchdog:
    """Of one process. All ranks make one, with the same store; `side` is those that take part, for handshakes."""

    def __init__(
        self,
        world: World,
        store: Store,
        timeout_s: float,
        *,
        side: dist.ProcessGroup | None = None,
        every_s: float = 1.0,
    ) -> None:
        self.world, self.timeout_s, self.every_s, self._side = world, timeout_s, every_s, side
        self._pid = os.getpid()
        # Connections of their own: no question that goes unanswered may keep the main thread, or the heartbeat.
        place = f"lopsided/watch/{next(_numbers)}"
        self._beats, self._asks = (PrefixStore(place, store.clone()) for _ in range(2))  # type: ignore[attr-defined]
        self._step, self._main, self._began_s = 0, threading.get_ident(), time.time()
        self._waits: dict[int, tuple[str, float]] = {}  # what threads wait for, and since when
        self._work = ""
        self.waited_s = 0.0  # by the main thread, in all
        self._beat = 0
        self.explains: Callable[[BaseException], BaseException | None] = lambda error: None
        self._failure: Failure | None = None
        self._noticed_s = 0.0
        self._first: Position | None = None  # of rank 0, with which the store may go
        self._neighbour = _Neighbour((world.rank + 1) % world.size)
        self._came_round_s = time.monotonic()
        self._shake: tuple[dist.Work, Tensor, Tensor, dict[str, str]] | None = None
        self._shakes = 0
        self._calls = 0  # of those that bystanders make too
        self.notes: tuple[int, int, int] = (0, 0, 0)  # which this rank tells with every handshake
        self.noted: Tensor | None = None  # a row of each of those that take part, of the last handshake
        self._stopping = threading.Event()
        self._post()
        self._thread = threading.Thread(target=self._run, name="lopsided-watch", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="lopsided-guard", daemon=True).start()
        _keep(self)
        watched_by(self)

    # What the main thread says: attribute writes only

    def at_step(self, step: int) -> None:
        self._step = step

    def entering(self, what: str) -> None:
        """This thread now waits for others, in `what`."""
        self._waits[threading.get_ident()] = (what, time.time())

    def left(self) -> None:
        waited = self._waits.pop(threading.get_ident(), None)
        if threading.get_ident() == self._main:
            self._began_s = time.time()
            self.waited_s += self._began_s - waited[1] if waited is not None else 0.0

    def at_work(self, what: str) -> None:
        """What this rank does itself, from now on; "" for the training script."""
        self._work, self._began_s = what, time.time()

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """In here, amid a wait, this rank is what others may wait for."""
        thread, before = threading.get_ident(), self._work
        waited = self._waits.pop(thread, None)
        self.at_work(what)
        try:
            yield
        finally:
            self.at_work(before)
            if waited is not None:
                self.entering(waited[0])

    @property
    def position(self) -> Position:
        # A backward pass on a GPU waits in a thread of autograd's.
        waits = self._waits.get(self._main) or next(iter(list(self._waits.values())), None)
        what, since_s = waits or ("", self._began_s)
        return Position(self._beat, time.time(), self._step, what, since_s, work=self._work)

    # Why a collective failed

    def explain(self, error: BaseException, what: str) -> RankError:
        """What to raise for a collective that failed or timed out. Takes some seconds and never hangs."""
        mine = self.position
        mine = replace(mine, waiting_for=what)
        said = self._known() or within(_MOST_S, lambda: self._find(mine))
        # The thread may have heard of a failure while the store went.
        reason, do = said if isinstance(said, tuple) else self._known() or self._no_store(mine)
        return RankError(reason, where=f"rank {self.world.rank}, {mine}", do=do, error=reason_of(error, None))

    def _known(self) -> tuple[str, str] | None:
        """What this rank has heard already. It needs no store, which goes with rank 0's process."""
        if (failure := self._failure) is None:
            return None
        return failure.reason, failure.do or f"see the output of rank {failure.culprit}"

    def _find(self, mine: Position) -> tuple[str, str]:
        first = self._positions()
        until = time.monotonic() + _BEATS * self.every_s
        while True:
            self._failure = self._failure or self._posted_failure(self._asks)
            if known := self._known():
                return known
            if time.monotonic() >= until:
                break
            time.sleep(self.every_s / 4)
        second = self._positions()
        silent: dict[int, float] = {}
        for rank, there in second.items():
            before = first[rank]
            if there is not None and before is not None and not there.ended and there.beat == before.beat:
                silent[rank] = max(time.time() - there.now_s, _BEATS * self.every_s)
        reason, do = blame(mine, second, silent, {rank: self._name(rank) for rank in second})
        if silent:
            self._fail(Failure(next(iter(silent)), reason), self._asks)
        return reason, do

    def _no_store(self, mine: Position) -> tuple[str, str]:
        if _torchrun_holds_the_store():
            return "torchrun's process on the first node is gone, and with it the store of positions", "see its output"
        if self._first is not None and self._first.ended:
            return blame(mine, {0: self._first}, {}, {0: self._name(0)})
        seen = f"; it was last seen at {self._first}" if self._first is not None else ""
        return f"{self._name(0)} is gone, and with it the store of positions{seen}", "see the end of its output"

    def _name(self, rank: int) -> str:
        return str(self.world.told[rank]) if self.world.told else f"rank {rank}"

    def _positions(self) -> dict[int, Position | None]:
        """Of all other ranks; None for one that has not posted any."""
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        return {rank: self._position_of(rank, self._asks) for rank in others}

    @staticmethod
    def _position_of(rank: int, store: Store) -> Position | None:
        key = f"at/{rank}"
        # Asked first: to get what is not there would wait for it.
        return Position.parse(store.get(key).decode()) if store.check([key]) else None

    @staticmethod
    def _posted_failure(store: Store) -> Failure | None:
        return Failure.parse(store.get("failed").decode()) if store.check(["failed"]) else None

    def _fail(self, failure: Failure, store: Store) -> None:
        """Post why the run cannot go on, unless somebody has."""
        self._failure = Failure.parse(store.compare_set("failed", "", failure.text()).decode())

    # Handshakes

    def start_handshake(
        self,
        step: int,
        program: str,
        inputs: str,
        reads: str = "",
        optimizers: str = "",
        *,
        training: bool,
        sync: bool,
    ) -> None:
        """Tell the others what this rank is about to do, and return at once. All that take part call it, step by step.

        `program`, `inputs`, `reads` and `optimizers` are texts that must be equal on all ranks, and are shown when they
        are not.
        """
        facts = {
            "call": FORWARD,
            "step": str(step),
            "program": program[:100],
            "inputs": inputs[:1000],
            "what forward reads": reads[:200],
            "optimizers": optimizers[:400],
            "mode": "training" if training else "evaluation",
            "gradients": "synchronised" if sync else "kept (no_sync)",
        }
        numbers = [_number(program + reads), _number(inputs), _number(optimizers)]
        self._tell([step, *numbers, training, sync], facts)

    def call(self, what: str, *, bystanders: bool = True) -> None:
        """A call that every rank must make begins: refuse it if others make another one, or none within the timeout.

        Ranks without a device make it too, unless `bystanders` says that they do not.
        """
        self._tell([self._step, 0, 0, 0, 0, 0], {"call": what, "step": str(self._step)})
        self.finish_handshake()
        if bystanders and self.world.size > len(self.world.ranks):
            self._meet_bystanders(what)

    def _tell(self, numbers: Sequence[int], facts: dict[str, str]) -> None:
        """Start a handshake: equal facts have equal numbers."""
        self.finish_handshake()
        self._step = int(facts["step"])
        if self._side is None or len(self.world.ranks) == 1:
            return
        row = torch.tensor([*_packed(facts["call"]), *numbers, *self.notes])
        heard = torch.empty(len(self.world.ranks), len(row), dtype=torch.int64)
        try:
            work = dist.all_gather(list(heard.unbind()), row, group=self._side, async_op=True)
        except RuntimeError as error:
            raise self.explain(error, facts["call"]) from error
        self._shakes += 1
        self._shake = (work, heard, row, facts)

    def finish_handshake(self) -> None:
        """Refuse to go on if a rank is about to do something else."""
        if self._shake is None:
            return
        (work, heard, row, facts), self._shake = self._shake, None
        what = "the handshake" if facts["call"] == FORWARD else facts["call"]
        self.entering(what)
        try:
            work.wait()
            if _is_same(heard, row):
                self.noted = heard[:, -_NOTES:]
                return
            if not torch.equal(heard[:, :_WORDS], row[:_WORDS].expand(len(heard), -1)):
                # Without another exchange: who makes another call may wait elsewhere.
                self._refuse_calls({rank: _unpacked(row) for rank, row in zip(self.world.ranks, heard, strict=True)})
            told = self._facts_of_all(facts, self._asks)
            difference = self._difference(told)
            self._fail(Failure(_odd_one(told), difference.what), self._asks)
        except RuntimeError as error:
            raise self.explain(error, what) from error
        finally:
            self.left()
        raise difference

    def _look_at_handshake(self) -> None:
        """The others may have refused a step that this rank has begun: its main thread waits for them in vain."""
        shake = self._shake
        if shake is None or not shake[0].is_completed():
            return
        _, heard, row, facts = shake
        if facts["call"] != FORWARD or _is_same(heard, row):
            return
        if torch.equal(heard[:, :_WORDS], row[:_WORDS].expand(len(heard), -1)):
            told = self._facts_of_all(facts, self._beats)
            self._fail(Failure(_odd_one(told), self._difference(told).what), self._beats)

    def _facts_of_all(self, facts: Mapping[str, str], store: Store) -> dict[int, dict[str, str]]:
        """What the ranks are about to do, of those that say so soon: their main threads, or those that watch.

        By the store: a rank that has begun its step takes part in no other exchange.
        """
        place = f"facts/{self._shakes}"
        store.set(f"{place}/{self.world.rank}", json.dumps(facts))
        keys = {rank: f"{place}/{rank}" for rank in self.world.ranks}
        until = time.monotonic() + _BEATS * self.every_s + 1.0
        while time.monotonic() < until and not store.check(list(keys.values())):
            time.sleep(self.every_s / 20)
        return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}

    def _difference(self, told: Mapping[int, dict[str, str]]) -> WorldError:
        odd = odd_ones(told) or "some do another step"
        do = "run the same steps on every rank, with batches of the same shapes (lopsided.shard(loader, pm, pad={...}) "
        do += "fills up samples of different lengths)"
        if odd_ones({k: {"optimizers": one.get("optimizers", "")} for k, one in told.items()}):
            do = "take the same steps with the same learning rate on every rank: what decides (a metric, some rows' "
            do += "loss) must be alike, so make it of lopsided.gather(output)"
        elif not odd_ones({k: one | {"inputs": _CONTENT.sub("", one["inputs"])} for k, one in told.items()}):
            # With the same shapes, what differs is what is in them.
            do = (
                "the batches have the same shapes and differ: give each rank its rows (lopsided.shard(loader, pm)), or "
            )
            do += "all the same whole batch (the same seed before the loader is made and wherever inputs are drawn)"
        where = f"rank {self.world.rank}, step {self._step}"
        return WorldError(f"ranks do not do the same: {odd}", where=where, do=do)

    def _refuse_calls(self, calls: Mapping[int, str]) -> NoReturn:
        """Ranks make different calls, of which some cannot look up from theirs: they are told why it will not end."""
        odd = odd_ones({rank: {"the call": call} for rank, call in calls.items()})
        error = WorldError(
            f"ranks do not do the same: {odd}",
            where=f"rank {self.world.rank}, step {self._step}",
            do="make the call on every rank: look for an `if rank == 0` around it",
        )
        within(_STAY_S, lambda: self._fail(Failure(self.world.rank, error.what), self._asks))
        raise error

    def _meet_bystanders(self, what: str) -> None:
        """Wait for the call on all ranks, also those without a device; they have no group in common with the others."""
        place, self._calls = f"call/{self._calls}", self._calls + 1
        keys = [f"{place}/{rank}" for rank in range(self.world.size)]
        self.entering(what)
        try:
            self._asks.set(keys[self.world.rank], what)
            self._asks.wait(keys, timedelta(seconds=self.timeout_s))
            calls = {rank: self._asks.get(key).decode() for rank, key in enumerate(keys)}
        except RuntimeError as error:
            raise self.explain(error, what) from error
        finally:
            self.left()
        if len({*calls.values()}) > 1:
            self._refuse_calls(calls)

    # The thread

    def _run(self) -> None:
        misses = 0
        while not self._stopping.wait(self.every_s):
            if misses < 3:
                try:
                    self._post()
                    self._look_at_handshake()
                    self._look()
                    misses = 0
                except (RuntimeError, ValueError):
                    misses += 1
                    if misses == 3:
                        self._give_up()
            self._came_round_s = time.monotonic()

    def _guard(self) -> None:
        """Needs no store: where its process is stopped, the other thread waits for an answer."""
        while not self._stopping.wait(self.every_s):
            if time.monotonic() - self._came_round_s > min(self.timeout_s, SILENT_S):
                self._give_up()
            self._end_if_stuck()

    def _give_up(self) -> None:
        """On the store."""
        if self._failure is None:
            self._failure = Failure(0, *self._no_store(self.position))
            self._noticed_s = time.monotonic()

    def _post(self, ended: str = "") -> None:
        here = self.position
        self._beat += 1
        process = f"{os.getpid()} {_where_processes_count()}"
        there = replace(here, beat=self._beat, ended=ended, process=process)
        self._beats.set(f"at/{self.world.rank}", there.text())

    def _look(self) -> None:
        """Has a rank failed? Is the next one alive? (Each looks after one, so that the store is asked little.)"""
        if not _torchrun_holds_the_store():
            self._first = self._position_of(0, self._beats)
        failure = self._failure or self._posted_failure(self._beats)
        if failure is not None:
            if not self._noticed_s:
                self._failure, self._noticed_s = failure, time.monotonic()
                self._beats.set(f"seen/{self.world.rank}", "")
            return
        next_one = self._neighbour
        if next_one.rank == self.world.rank:
            return
        there = self._position_of(next_one.rank, self._beats)
        if there is None:
            return
        if there.ended:
            self._neighbour = _Neighbour((next_one.rank + 1) % self.world.size)
        elif (silent_s := next_one.silent_s(there, _BEATS * self.every_s)) > min(self.timeout_s, SILENT_S):
            name = {next_one.rank: self._name(next_one.rank)}
            reason, _ = blame(self.position, {next_one.rank: there}, {next_one.rank: silent_s}, name)
            self._fail(Failure(next_one.rank, reason), self._beats)

    def _end_if_stuck(self) -> None:
        """End the process, with the reason, if the main thread waits for a rank that will not come.

        It is given time to find out by itself. A group of gloo's does; but a rank that failed may live on for a while
        (in a debugger, in another thread of its), and a wait for a GPU cannot be called off at all.
        """
        failure, now_s = self._failure, time.time()
        lost = failure is not None and failure.culprit != self.world.rank
        for thread, (what, since_s) in list(self._waits.items()):
            waited_s = now_s - since_s
            if lost:
                stuck = min(waited_s, time.monotonic() - self._noticed_s) > _GRACE_S
            else:
                stuck = waited_s > self.timeout_s + _GRACE_S
            if stuck and self._waits.get(thread) == (what, since_s):
                self._end(what, waited_s)

    def _end(self, what: str, waited_s: float) -> None:
        error = TimeoutError(f"no end after {waited_s:.0f} s")
        _log.critical("rank %d ends: %s", self.world.rank, self.explain(error, what))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)

    # The end

    def stop(self) -> None:
        """End the thread. The others are told that this rank no longer takes part."""
        self._leave("stopped")

    def _leave(self, how: str) -> None:
        if self._stopping.is_set() or self._pid != os.getpid():
            return
        _live.remove(self)
        no_longer_watched_by(self)
        self._stopping.set()
        if threading.current_thread() is self._thread:  # which collects garbage, like any other
            return
        # A thread in the store when the interpreter goes would abort the process.
        self._thread.join(_LEAVE_S)
        if self._failure is None and not self._thread.is_alive():
            within(_LEAVE_S, lambda: self._say_goodbye(how))

    def _say_goodbye(self, how: str) -> None:
        self._post(how)
        self._beats.set(f"gone/{self.world.rank}", "")

    def _failed(self, error: BaseException, trace: TracebackType | None) -> None:
        """An exception that ends this process: tell the others why."""
        if self._pid != os.getpid():  # a data loader's worker
            return
        if isinstance(error, RankError):  # which names its culprit
            failure = self._failure or Failure(self.world.rank, error.what)
        else:
            failure = Failure(self.world.rank, f"{self._name(self.world.rank)} failed: {reason_of(error, trace)}")

        def tell() -> None:
            self._fail(failure, self._asks)
            # It needs the store no more.
            for mark in ("seen", "gone"):
                self._asks.set(f"{mark}/{self.world.rank}", "")

        within(_LEAVE_S, tell)

    def _stay(self, mark: str, most_s: float) -> None:
        """With rank 0's process the store may go: it stays until the others have set their mark, or long enough.

        Who failed may be gone without one.
        """
        if self.world.rank > 0 or self._pid != os.getpid() or _torchrun_holds_the_store():
            return
        culprit = self._failure.culprit if self._failure is not None else 0
        marks = [f"{mark}/{rank}" for rank in range(1, self.world.size) if rank != culprit]
        until = time.monotonic() + most_s
        while marks and time.monotonic() < until and within(_LEAVE_S, lambda: self._asks.check(marks)) is False:
            time.sleep(self.every_s / 10)


@contextmanager
def watched_start(device: torch.device, timeout_s: float) -> Iterator[Callable[[str], None]]:
    """In here the ranks have no plan yet, and are watched all the same: whoever fails or is silent is named.

    Gives what to call with what this rank begins to do.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        yield lambda _: None
        return
    everyone = tuple(range(size))
    watch = Watchdog(World(rank, size, everyone, everyone, device), default_store(), timeout_s)
    try:
        yield watch.at_work
    except RuntimeError as error:
        # Measuring talks in many ways.
        if not _is_of_talking(error):
            raise
        raise watch.explain(error, "the start of training") from error
    finally:
        watch.stop()


def _is_of_talking(error: RuntimeError) -> bool:
    """Whether a collective failed, not the model's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(os.path.dirname(dist.__file__))


# Of the process: one hook for all watches

_live: list[Watchdog] = []
_hooked = False


def _keep(watch: Watchdog) -> None:
    global _hooked
    _live.append(watch)
    if not _hooked:
        _hooked = True
        atexit.register(_at_exit)
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            watches = list(_live)
            error = next((said for each in watches if (said := each.explains(error)) is not None), error)
            for each in watches:
                each._failed(error, trace)
            before(type(error), error, trace)
            for each in watches:
                each._stay("seen", _STAY_S)

        sys.excepthook = hook


def _at_exit() -> None:
    for watch in list(_live):
        failed = watch._failure is not None
        watch._leave("finished")
        if not failed:
            watch._stay("gone", _LEAVE_S)


def _torchrun_holds_the_store() -> bool:
    """It keeps the store in its own process; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_same(heard: Tensor, row: Tensor) -> bool:
    """Whether all are about to do what this rank is; what they note beside it is their own."""
    return torch.equal(heard[:, :-_NOTES], row[:-_NOTES].expand(len(heard), -1))


def _packed(call: str) -> tuple[int, ...]:
    """The name of a call as numbers that can be sent with others.

    >>> _unpacked(torch.tensor(_packed("save_checkpoint")))
    'save_checkpoint'
    """
    return struct.unpack(f"<{_WORDS}q", call.encode()[: 8 * _WORDS].ljust(8 * _WORDS, b"\0"))


def _unpacked(row: Tensor) -> str:
    return struct.pack(f"<{_WORDS}q", *row[:_WORDS].tolist()).rstrip(b"\0").decode(errors="replace")


@lru_cache(maxsize=64)
def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
