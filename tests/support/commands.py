"""The command line in this process: what it prints, and its exit status."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

import pytest

from lopsided.cli.app import main


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def lopsided(*arguments: str) -> Done:
    """The command in this process: another one would spend seconds on importing."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", ["lopsided", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
    code = end.value.code
    return Done(code if isinstance(code, int) else 0, stdout.getvalue(), stderr.getvalue())
