"""Starting a run: the line for torchrun that a plan asks for.

In: the path of a plan, a script with its arguments, and, of a plan over several nodes, which node this machine is.
Out: the words for `torch.distributed.run`, and the run itself, whose agent this process becomes: signals reach it, and
its exit status is the command's. Ctrl-C is left to `lopsided.interrupts`, for the agent would hand it on to the
scripts, each of which would show a traceback, and wait for them.

The plan's own numbers come first in the line and the user's options for torchrun behind them, where they win.
"""

from __future__ import annotations

import difflib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lopsided import interrupts
from lopsided.cluster.cluster import Cluster
from lopsided.errors import InputError, shown
from lopsided.planner.plan_data import Plan
from lopsided.runtime.agreement import PLAN_VARIABLE
from lopsided.runtime.checkpoint.memory_folder import kept_for_children

MODULE = "lopsided.runtime.torchrun"

RESTARTS = 100
"""How often an elastic run is started again, unless torchrun is told otherwise."""

_PORT = 29500
_ADDRESS = ("--master-addr", "--rdzv-endpoint")
_MEETING = (*_ADDRESS, "--master-port", "--rdzv-backend", "--rdzv-id", "--rdzv-conf", "--node-rank", "--standalone")
_NO_FILE = ("-m", "--module", "--no-python")  # the script is not the path of a Python file


def torchrun_options() -> dict[str, bool]:
    """Every option of torchrun, and whether a value follows it."""
    # Takes a second: only this command needs it.
    from torch.distributed.run import get_args_parser

    actions = get_args_parser()._actions
    return {name: action.nargs != 0 for action in actions for name in action.option_strings}


def launch_words(
    plan: Plan,
    script: str,
    arguments: Sequence[str],
    *,
    node: str = "",
    master: str = "",
    options: Sequence[str] = (),
    elastic: bool = False,
) -> list[str]:
    """What follows `torchrun` in the line. `options` are the user's for torchrun. An `elastic` run is started again
    when a process is lost, and its nodes may come and go."""
    named = {word.partition("=")[0].replace("_", "-") for word in options if word.startswith("-")}
    if not named & {*_NO_FILE}:
        _check_script(script)
    on = plan.on
    words: list[str] = []
    if elastic:
        return [*_elastic_words(on, named, node, master), *options, script, *arguments]
    if node or (on.nodes > 1 and "--nproc-per-node" not in named):
        words += _node_words(on, node, met=bool(master or named & {*_ADDRESS}))
    else:
        words += ["--nproc-per-node", str(on.devices)]
    if master:
        words += _master_words(master)
    elif (on.nodes == 1 or not node) and not named & {*_MEETING, "--nnodes"}:
        # A free port: two runs on one machine do not meet.
        words.append("--standalone")
    return [*words, *options, script, *arguments]


def _elastic_words(on: Cluster, named: set[str], node: str, master: str) -> list[str]:
    """Started again as often as need be; with several nodes, each goes on with those that are there."""
    words = [] if "--max-restarts" in named else ["--max-restarts", str(RESTARTS)]
    words += [] if "--start-method" in named else ["--start-method", "forkserver"]
    if on.nodes == 1 or ("--nproc-per-node" in named and not named & {*_MEETING, "--nnodes"} and not master):
        words += [] if "--nproc-per-node" in named else ["--nproc-per-node", str(on.devices)]
        return words + ([] if named & {*_MEETING, "--nnodes"} else ["--standalone"])
    if not node and "--nproc-per-node" not in named:
        _node_words(on, node, met=True)  # which says what is missing
    words += [] if "--nnodes" in named else ["--nnodes", f"1:{on.nodes}"]
    if node:
        fixed = _node_words(on, node, met=bool(master or named & {*_ADDRESS}))
        words += fixed[fixed.index("--nproc-per-node") :] if "--nproc-per-node" not in named else []
    if master:
        # Nodes that may come and go find each other at a store; who comes first is not known.
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", ":".join(_master_words(master)[1::2])]
    return words


def start(plan_file: str | Path, words: Sequence[str]) -> NoReturn:
    """Be the agent of the run, until it ends."""
    os.environ[PLAN_VARIABLE] = str(Path(plan_file).resolve())
    _be_agent(words)


def start_own(processes: int, words: Sequence[str]) -> NoReturn:
    """This very command in so many processes on this machine."""
    _be_agent(["--standalone", "--nproc-per-node", str(processes), "-m", "lopsided", *words])


def _be_agent(words: Sequence[str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    if any(word.partition("=")[0].replace("_", "-") == "--nnodes" for word in words):
        # Nodes that come and go count no attempt: each round has a store of its own.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # The agent leaves what it writes beside the scripts' output among the temporary files.
    folder = tempfile.mkdtemp(prefix="lopsided-")
    in_memory = kept_for_children()
    interrupts.folders |= {folder, str(in_memory)}
    tempfile.tempdir = folder
    # Takes a second: only a command that runs something needs it.
    from lopsided.runtime import torchrun

    try:
        status = torchrun.main([*_left_to_us(), *words])
    finally:
        for made in (folder, in_memory):
            shutil.rmtree(made, ignore_errors=True)
    sys.exit(status)


def _left_to_us() -> list[str]:
    """All signals but that of Ctrl-C are the agent's."""
    option = "--signals-to-handle"
    return [option, "SIGTERM,SIGHUP,SIGQUIT"] if option in torchrun_options() else []


def _check_script(script: str) -> None:
    path = Path(script)
    if path.is_file():
        return
    what = f"{shown(script)} is a directory" if path.is_dir() else f"there is no script {shown(script)}"
    do = "name the script that trains, after the plan; options of its own come behind it"
    raise InputError(what, where=str(path.absolute()), do=do)


def _node_words(on: Cluster, node: str, *, met: bool) -> list[str]:
    names = on.node_names
    sizes = {name: sum(device.split("/")[0] == name for device in on.device_names) for name in names}
    listed = ", ".join(f"{name} {sizes[name]}" for name in names[:8]) + (", ..." if len(names) > 8 else "")
    if not node:
        raise InputError(
            f"the plan has {len(names)} nodes, and which one this is was not said",
            where=f"nodes, and how many devices each has: {listed}",
            do=f"on each, run it with --node NAME --master HOST:PORT, where HOST is {names[0]}; to try it on one "
            f"machine, with --nproc-per-node {on.devices}",
        )
    if node not in sizes:
        close = difflib.get_close_matches(node, names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(
            f"no node {shown(node)} takes part in the plan",
            where="--node",
            do=f"{hint}those that do, and with how many devices: {listed}",
        )
    if len(names) > 1 and not met:
        raise InputError(
            "where the nodes meet was not said",
            where=f"--node {node}",
            do=f"add --master HOST:PORT, the same on every node; HOST is {names[0]}",
        )
    number = names.index(node)
    return ["--nnodes", str(len(names)), "--node-rank", str(number), "--nproc-per-node", str(sizes[node])]


def _master_words(master: str) -> list[str]:
    host, colon, port = master.rpartition(":")
    if not colon or master.endswith("]"):  # no port; an IPv6 address has colons of its own, in brackets
        host, port = master, str(_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(
            f"{shown(master)} is not an address", where="--master", do=f"write HOST:PORT, for instance 10.0.0.1:{_PORT}"
        )
    return ["--master-addr", host.strip("[]"), "--master-port", port]
