"""torchrun, without its own account of a run that failed: the processes have told why.

In: the words of torchrun's line. Out: the run, and its exit status. Processes that could not tell, because a signal
ended them, are named.
"""

from __future__ import annotations

import logging
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

_log = logging.getLogger("lopsided")

_FIRST_SIGNAL = "SIGTERM"  # by which torchrun ends the others


def main(words: list[str]) -> int:
    """The exit status of a run: 0, or that of the first process that failed."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run.main(words)
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            if failure.exitcode < 0 and failure.signal_name() != _FIRST_SIGNAL:
                _log.critical("rank %d was ended by %s%s", rank, failure.signal_name(), _hint(failure))
        return max(error.get_first_failure()[1].exitcode, 1)
    return 0


def _hint(failure: ProcessFailure) -> str:
    return ": a process that is killed was often out of memory" if failure.signal_name() == "SIGKILL" else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
