"""Commands that tests start beside themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PATIENCE_S = 110


class Started(subprocess.Popen[str]):
    """A command whose output is taken together, and which is ended if the test leaves early."""

    def __init__(self, folder: Path, *words: object) -> None:
        command = [sys.executable, "-m", *map(str, words)]
        environment = {name: value for name, value in os.environ.items() if name != "LOPSIDED_PLAN"}
        super().__init__(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=environment
        )

    def end(self) -> str:
        try:
            return self.communicate(timeout=PATIENCE_S)[0]
        except subprocess.TimeoutExpired:
            self.terminate()  # torchrun then ends its workers
            raise AssertionError(f"did not end\n{self.communicate()[0]}") from None
