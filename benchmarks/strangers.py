"""Files of strangers: damaged, twisted and huge ones, a few kinds of change each. Writes results/strangers.json.

python benchmarks/strangers.py [--files 10000] [--seed 0] [--only plan,cluster,run,checkpoint]

Of each format so many files are made of a good one and read by this library's own readers. A reader either gives an
object or refuses with an error of ours; what is counted is everything else:

    traceback    another exception than a LopsidedError
    hang         a file that takes longer than `MOST_S` of a processor, or a minute of whatever kind, by an alarm
    memory       a file for which a process holds more than a gigabyte beyond what it held before

A file is changed by one to three of: bytes flipped, cut or repeated; and, of the values in it, types swapped, huge
numbers, deep nesting, names with markup, control characters and `..`, keys dropped or added. Of checkpoints every file
is changed in turn, or replaced by a link, a folder or a pipe.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from types import FrameType
from typing import Any

import record

from lopsided.calibration.run_record import load_run
from lopsided.cluster.cluster_file import load_cluster
from lopsided.errors import LopsidedError
from lopsided.planner.plan_file import load_plan
from lopsided.runtime.checkpoint.checkpoint import convert

OLDER = Path(__file__).parents[1] / "tests" / "older_files"
MOST_S, MOST_WAIT_S = 10, 60
MOST_BYTES = 2**30

NASTY: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    2**63,
    10**400,
    -(10**30),
    1e308,
    float("nan"),
    float("inf"),
    "",
    "..",
    "../../etc/passwd",
    "/dev/zero",
    "[bold]x[/bold]",
    "<script>alert(1)</script>",
    "\x1b[2J",
    "a\nb",
    "\x00",
    "\ud800",
    "ä" * 100_000,
    [],
    {},
    [[]],
    {"": {}},
    '%x: f32[2] = input "x"',
    "S0",
    "1e999",
    [0] * 10_000,
)


class TooLong(Exception):
    """A reader did not come back in time."""


def changed_bytes(data: bytes, dice: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(max(len(made), 1))
        how = dice.choice((0, 0, 0, 1, 2, 3, 4))
        if how == 0 and made:
            made[at] ^= 1 << dice.randrange(8)
        elif how == 1:
            del made[at : at + dice.randint(1, 2000)]
        elif how == 2:
            made[at:at] = made[at : at + dice.randint(1, 200)] * dice.choice((1, 2, 500))
        elif how == 3:
            made[at:at] = dice.choice(
                (b"[" * 50_000, b"9" * 10_000, b"\x00", b'"', b"{", b"\xff\xfe", b"\n\n", b"..", b"1e400")
            )
        elif made:
            made[at] = dice.randrange(256)
    return bytes(made)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where values are in a tree of JSON."""
    found = [path] if path else []
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        found += places(each, (*path, key))
    return found


def changed_values(value: Any, dice: random.Random) -> Any:
    made = copy.deepcopy(value)
    for _ in range(dice.randint(1, 3)):
        path = dice.choice(places(made))
        owner = made
        for key in path[:-1]:
            owner = owner[key]
        how = dice.randrange(5)
        if how == 0:
            del owner[path[-1]]
        elif how == 1 and isinstance(owner, dict):
            owner[dice.choice(("x", "", "[red]", "..", "\x1b[1m"))] = owner.pop(path[-1])
        elif how == 2:
            owner[path[-1]] = copy.deepcopy(made if dice.random() < 0.2 else owner)
        elif how == 3 and isinstance(owner[path[-1]], list):
            owner[path[-1]] = owner[path[-1]] * dice.choice((0, 2, 50))
        else:
            owner[path[-1]] = copy.deepcopy(dice.choice(NASTY))  # which later changes may change
        if not places(made):
            return made
    return made


def changed_lines(data: bytes, dice: random.Random) -> bytes:
    """Of TOML: another value behind an equals sign, or a line twice, elsewhere or gone."""
    lines = data.decode().splitlines()
    at = dice.randrange(len(lines))
    key, equals, _ = lines[at].partition("=")
    how = dice.randrange(4)
    if equals and how < 2:
        lines[at] = f"{key}= {json.dumps(dice.choice(NASTY))}"
    elif how == 2:
        lines.insert(dice.randrange(len(lines)), lines.pop(at))
    else:
        lines.insert(at, lines[at])
    return "\n".join(lines).encode(errors="surrogatepass")


def changed(data: bytes, dice: random.Random) -> bytes:
    if dice.random() < 0.5:
        return changed_bytes(data, dice)
    if not data.startswith(b"{"):
        return changed_lines(data, dice)
    try:
        return json.dumps(changed_values(json.loads(data), dice), ensure_ascii=dice.random() < 0.5).encode(
            errors="surrogatepass"
        )
    except (ValueError, RecursionError):
        return changed_bytes(data, dice)


@dataclass(frozen=True)
class Format:
    """`make` writes a stranger's file or folder and returns its path; `read` is what a command does with it."""

    make: Callable[[Path, random.Random], Path]
    read: Callable[[Path], object]


def file_of(name: str) -> Callable[[Path, random.Random], Path]:
    good = (OLDER / name).read_bytes()

    def make(folder: Path, dice: random.Random) -> Path:
        path = folder / name
        kind = dice.random()
        if kind < 0.01:
            path.symlink_to(dice.choice(("/dev/null", str(path), "/etc/shadow", "..")))
        elif kind < 0.02:
            path.mkdir()
        else:
            path.write_bytes(changed(good, dice))
        return path

    return make


def checkpoint(folder: Path, dice: random.Random) -> Path:
    path = folder / "step-00000002"
    shutil.copytree(OLDER / "checkpoint" / "step-00000002", path)
    for _ in range(dice.randint(1, 2)):
        victim = dice.choice(sorted(path.iterdir()))
        kind = dice.random()
        if kind < 0.03 and not victim.is_dir():
            victim.unlink()
            if kind < 0.01:
                victim.symlink_to(dice.choice(("/dev/zero", str(victim), "/etc/shadow")))
            elif kind < 0.02:
                os.mkfifo(victim)
            else:
                victim.mkdir()
        elif victim.is_file() and not victim.is_symlink():
            data = victim.read_bytes()
            victim.write_bytes(changed(data, dice) if victim.suffix == ".json" else changed_bytes(data, dice))
    return folder


FORMATS = {
    "plan": Format(file_of("plan.json"), load_plan),
    "cluster": Format(file_of("cluster.toml"), lambda path: load_cluster(str(path))),
    "run": Format(file_of("run.json"), load_run),
    "checkpoint": Format(checkpoint, lambda path: convert(path, path / "model.safetensors")),
}


def alarm(number: int, frame: FrameType | None) -> None:
    raise TooLong


def most_held_bytes(*, anew: bool = False) -> int:
    """The most that this process has held since it was asked anew."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def tried(name: str, files: int, seed: int) -> dict[str, Any]:
    one = FORMATS[name]
    counts: Counter[str] = Counter()
    examples: list[str] = []
    longest_s, most = 0.0, (0, -1)
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, alarm)
    for number in range(files):
        dice = random.Random(f"{seed} {number}")
        with tempfile.TemporaryDirectory(prefix="lopsided-strangers-") as folder:
            path = one.make(Path(folder), dice)
            began_s, held = time.process_time(), most_held_bytes(anew=True)
            signal.alarm(MOST_WAIT_S)
            signal.setitimer(signal.ITIMER_PROF, MOST_S)
            try:
                one.read(path)
                outcome = "read"
            except LopsidedError:
                outcome = "refused"
            except TooLong:
                outcome = "hangs"
            except Exception:
                outcome = "tracebacks"
                if len(examples) < 5:
                    examples.append(f"file {number}: {traceback.format_exc(limit=-3)}")
            finally:
                signal.alarm(0)
                signal.setitimer(signal.ITIMER_PROF, 0)
            most = max(most, (most_held_bytes() - held, number))
            longest_s = max(longest_s, time.process_time() - began_s)
        counts[outcome] += 1
    return {
        "files": files,
        **{name: counts[name] for name in ("read", "refused", "tracebacks", "hangs")},
        "above_1_GiB": int(most[0] > MOST_BYTES),
        "most_memory_bytes": most[0],
        "most_memory_file": most[1],
        "longest_s": round(longest_s, 3),
        "examples": examples,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--files", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default=",".join(FORMATS))
    given = options.parse_args()
    names, found = given.only.split(","), {}
    # A process each: what one format's files have taken of memory hides nothing of another's.
    with ProcessPoolExecutor(len(names), multiprocessing.get_context("fork")) as pool:
        for name, one in zip(names, pool.map(tried, names, repeat(given.files), repeat(given.seed)), strict=True):
            told = "  ".join(f"{key} {value}" for key, value in one.items() if key != "examples")
            print(f"{name:<11}", told, *one["examples"], sep="\n", flush=True)
            found[name] = one
    print(record.write("strangers", {"formats": found, "seed": given.seed}))


if __name__ == "__main__":
    main()
