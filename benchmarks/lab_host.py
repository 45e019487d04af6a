"""Becomes a process on a host of the lab. Started by lab.py, as root, with nothing but the standard library.

In: a control group, a network namespace, a name, a hosts file, cores, a command. Out: nothing; the process turns into
the command. The one idea: everything that makes a host is entered by the process itself before the command starts, so
nothing of the command, not even its start, is seen or run elsewhere.

python lab_host.py CGROUP NETNS HOSTNAME HOSTS_FILE CORES -- COMMAND...        ("-" leaves one of them as it is)
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, doing: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), doing)


def enter_network(path: str) -> None:
    """Move this process into a network namespace."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_libc.setns(handle, CLONE_NEWNET), f"entering {path}")
    finally:
        os.close(handle)


def die_with_the_parent() -> None:
    """If the lab is killed, what it started ends too. (What that started, `--clean` finds in the control group.)"""
    _checked(_libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0), "prctl")


def read_hosts_from(path: str) -> None:
    """Give this process an /etc/hosts of its own; the machine's stays as it is. A name that is not there takes time."""
    _checked(_libc.unshare(CLONE_NEWNS), "mounts of its own")
    _checked(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mounts that are not shared")
    _checked(_libc.mount(path.encode(), b"/etc/hosts", None, MS_BIND, None), "a hosts file of its own")


def become(cgroup: str, netns: str, hostname: str, hosts: str, cores: str, *, command: list[str]) -> None:
    die_with_the_parent()
    if cgroup != "-":
        (Path(cgroup) / "cgroup.procs").write_text(str(os.getpid()))
    if netns != "-":
        enter_network(netns)
    if hostname != "-":
        _checked(_libc.unshare(CLONE_NEWUTS), "a hostname of its own")
        socket.sethostname(hostname)
    if hosts != "-":
        read_hosts_from(hosts)
    if cores != "-":
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    if (cgroup, cores) != ("-", "-"):
        # Whoever wakes up does not push aside who runs. Gloo's thread would: it is woken by data that nobody has asked
        # for yet, and then polls, on the one core, until the thread it pushed aside may run and ask.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.execvp(command[0], command)


if __name__ == "__main__":
    if len(sys.argv) < 8 or sys.argv[6] != "--":
        raise SystemExit(__doc__)
    become(*sys.argv[1:6], command=sys.argv[7:])
