"""Processor shares by control groups, version 1 or 2.

In: a name and a share of cores. Out: a folder of the control group file system; processes are put into it by writing to
it, and found in it when it is removed. The one idea: only folders that were made here are written to or removed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpu,cpuacct"), Path("/sys/fs/cgroup"))
_PATIENCE_S = 10.0


def root() -> tuple[Path | None, str]:
    """Where folders can be made, or why nowhere."""
    for folder in ROOTS:
        if (folder / "cpu.cfs_quota_us").exists() or (folder / "cpu.cfs_period_us").exists():
            return (folder, "") if os.access(folder, os.W_OK) else (None, f"{folder} cannot be written to")
        if (folder / "cgroup.subtree_control").exists():
            # To turn it on here would change every other group of the machine.
            if "cpu" not in (folder / "cgroup.subtree_control").read_text().split():
                return None, f"the cpu controller is not handed down in {folder}/cgroup.subtree_control"
            return (folder, "") if os.access(folder, os.W_OK) else (None, f"{folder} cannot be written to")
    return None, "there is no cpu control group"


def make(parent: Path, names: Sequence[str]) -> None:
    """A folder with one for each of `names` in it."""
    parent.mkdir()
    if (parent / "cgroup.subtree_control").exists():
        (parent / "cgroup.subtree_control").write_text("+cpu")
    for name in names:
        (parent / name).mkdir()


def limit(group: Path, cores: float | None, period_us: int) -> None:
    """At most `cores` seconds of processor time a second, handed out anew every period; None for no limit."""
    quota_us = None if cores is None else round(cores * period_us)
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{'max' if quota_us is None else quota_us} {period_us}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.cfs_quota_us").write_text(str(-1 if quota_us is None else quota_us))


def pin(group: Path, cores: Sequence[int]) -> None:
    """Every thread in the group on these cores."""
    threads = group / "tasks"
    for line in (threads if threads.exists() else group / "cgroup.threads").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(line), cores)


def kill(group: Path) -> None:
    """End whoever is left in the group. Only what was started in it can be there."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until and group.is_dir():
        inside = (group / "cgroup.procs").read_text().split()
        if not inside:
            return
        for pid in map(int, inside):
            # 0 is a process that this one cannot see; to kill it would kill all of this one's group.
            if pid > 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def remove(parent: Path) -> None:
    """The folder that `make` made, with whoever is in it."""
    if not parent.is_dir():
        return
    for group in [*(path for path in parent.iterdir() if path.is_dir()), parent]:
        kill(group)
        until = time.monotonic() + _PATIENCE_S
        while group.is_dir():
            try:
                group.rmdir()
            except OSError:  # a process that was killed is still on its way out
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
