"""Every exception Lopsided raises on purpose.

LopsidedError                  what went wrong, where, and what to do about it
├── InputError                 what the user gave cannot be used (exit status 2 on the command line)
│   ├── ModelError             a model that cannot be named, imported, built or called
│   ├── CaptureError           a model that cannot be captured as one graph
│   ├── NotationError          a rule line that does not parse, or does not fit the op
│   ├── ClusterError           a cluster file or object that cannot be used, a device that is not there
│   ├── SharesError            shares that are negative or do not sum to one
│   ├── GraphError             a graph text or object that is not a legal graph
│   ├── ProgramError           a program text or object that is not a legal program
│   ├── DoesNotFitError        a program that needs more memory than a device has
│   ├── PlanError              a plan file or object that cannot be used
│   ├── RunError               a recorded run that cannot be used
│   ├── WorldError             processes that do not match the plan, or each other
│   ├── BatchError             a batch or a loader that is not what was planned
│   └── CheckpointError        a checkpoint or state dict that cannot be saved, read or applied
│       └── DamagedError       a checkpoint that is not as it was saved: the one before may be
├── TrainingError              a step that cannot go on: a loss that is no number, a parameter that was replaced
├── RankError                  another process failed, or stopped taking part
└── RuleError                  a rule that computes something else than one device would
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LopsidedError(Exception):
    """Says what happened; `where` points at a place, `do` says what to change.

    >>> print(LopsidedError("shares sum to 0.9", where="--shares .5,.4", do="make them sum to 1"))
    shares sum to 0.9
      where   --shares .5,.4
      do      make them sum to 1
    """

    def __init__(self, what: str, *, where: str = "", do: str = "", **facts: str) -> None:
        self.what, self.where, self.do, self.facts = what, where, do, facts
        rows = [("where", where), *facts.items(), ("do", do)]
        super().__init__("\n".join([what, *(f"  {name:<7} {text}" for name, text in rows if text)]))


class InputError(LopsidedError):
    """What the user gave cannot be used."""


class ModelError(InputError):
    """A model that cannot be named, imported, built or called."""


class CaptureError(InputError):
    """A model that cannot be captured as one graph."""


class NotationError(InputError):
    """A rule line that does not parse, or does not fit the op."""


class ClusterError(InputError):
    """A cluster file or object that cannot be used, or a device that it does not have."""


class SharesError(InputError):
    """Shares that are negative or do not sum to one."""


class GraphError(InputError):
    """A graph text or object that is not a legal graph."""


class ProgramError(InputError):
    """A program text or object that is not a legal program."""


class DoesNotFitError(InputError):
    """A program that needs more memory than a device has."""


class PlanError(InputError):
    """A plan file or object that cannot be used, written or compared."""


class RunError(InputError):
    """A recorded run that cannot be used, written or compared."""


class WorldError(InputError):
    """Processes that do not match the plan, or each other."""


class BatchError(InputError):
    """A batch or a loader that is not what was planned."""


class CheckpointError(InputError):
    """A checkpoint or a state dict that cannot be saved, read or applied."""


class DamagedError(CheckpointError):
    """A checkpoint that is not as it was saved."""


class TrainingError(LopsidedError):
    """A step that cannot go on."""


class RankError(LopsidedError):
    """Another process failed, or stopped taking part."""


class RuleError(LopsidedError):
    """A rule that computes something else than one device would."""


def shown(value: object) -> str:
    """A stranger's value in a message: escaped, and short."""
    try:
        text = f"{value:,}" if isinstance(value, float) else repr(value)
    except ValueError:  # Python does not print integers of more than some thousand digits.
        return "too long a number"
    except RecursionError:
        return "a list that nests too deep"
    return text if len(text) <= 60 else text[:57] + "..."


def close_words(word: str, words: Iterable[str]) -> str:
    """A guess at what was meant, as the beginning of what to do; "" where no word is close."""
    found = difflib.get_close_matches(word[:100], list(words), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(found)}? " if found else ""
