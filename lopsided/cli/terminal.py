"""What the commands share: consoles, a bar, the options all of them have, models in shapes only.

In: nothing. Out: `out` and `err`, `say` and `print_json`, `progress_bar`, types of options and checks, `load_shapes`.

What reads the output may go away (`| head`), may not know our characters (an ASCII locale) and may be full: the first
ends the program quietly (`on_broken_pipe`), the second gets the nearest it has (`spell_out`), the third is told by
`main` once nothing more is written (`stop_writing`).
"""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lopsided.errors import InputError, ModelError, shown
from lopsided.ir.graph import DTYPES
from lopsided.models.by_name import load
from lopsided.report.table import bytes_text

BROKEN_PIPE = 141
"""The status that shells give a program whose reader has gone."""

_SPELLED = {"µ": "u", "×": "x", "→": "->", "…": "...", "–": "-", "█": "#", "░": ".", "∂": "d", "≤": "<=", "·": "*"}


def stop_writing() -> None:
    """What is still to be written goes nowhere: else Python would try again when it ends, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            try:
                os.dup2(nowhere, stream.fileno())
            except (OSError, ValueError):  # a stream without a file
                continue


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        self.quiet = True
        stop_writing()
        raise SystemExit(BROKEN_PIPE)


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_SPELLED.get(c, "?") for c in error.object[error.start : error.end]), error.end


def spell_out() -> None:
    """Print on terminals and into files that do not know all characters: `us` for `µs`, `?` for what has no letter."""
    codecs.register_error("spelled", _spelled)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="spelled")


out = _Terminal(highlight=False, soft_wrap=True, emoji=False)
err = _Terminal(stderr=True, highlight=False, soft_wrap=True, emoji=False)
_verbose = False


def say(line: str, style: str = "") -> None:
    """A line as it is: what strangers' files say can neither be markup nor move the cursor."""
    plain = "".join(c if c.isprintable() or c == "\n" else "?" for c in line)
    out.print(escape(plain), style=style or None)


def say_all(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)


def print_json(told: Mapping[str, object]) -> None:
    """JSON keeps every character: what the encoding does not know is escaped."""
    out.print_json(json.dumps(told), ensure_ascii=not out.encoding.lower().startswith("utf"))


def say_written(path: str, size: int, as_json: bool, **more: object) -> None:
    """That a file was written, and how large it is."""
    if as_json:
        print_json({**more, "file": path, "bytes": size})
    else:
        say(f"written to {path}, {bytes_text(size)}")


def check_dtype(dtype: str | None) -> None:
    """Before the model is captured, which takes time."""
    floats = {name: str(kind).removeprefix("torch.") for name, kind in DTYPES.items() if kind.is_floating_point}
    if dtype is None or dtype in floats:
        return
    meant = [name for name, words in floats.items() if dtype.lower().removeprefix("torch.") in (words, name)]
    meant = meant or {"half": ["f16"], "float": ["f32"], "double": ["f64"]}.get(dtype.lower(), [])
    hint = f"did you mean {meant[0]}? " if meant else ""
    raise InputError(
        f"there is no floating dtype {shown(dtype)}", where="--dtype", do=f"{hint}choose from {', '.join(floats)}"
    )


@contextmanager
def progress_bar(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, nothing elsewhere."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # A file of its own: the one behind stderr may be turned elsewhere meanwhile.
    with (
        os.fdopen(os.dup(2), "w") as file,
        Progress(
            *columns,
            console=Console(file=file, highlight=False),
            transient=True,
            disable=quiet or not err.is_terminal,
        ) as bar,
    ):
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def begin_quietly() -> None:
    """A command shows tracebacks if it is told to, whatever a command before it in this process was told."""
    global _verbose
    _verbose = False


def is_verbose() -> bool:
    return _verbose


def _set_verbose(value: bool) -> bool:
    global _verbose
    _verbose = _verbose or value
    return value


PlanFile = Annotated[str, typer.Argument(help="A file that `lopsided plan -o` wrote.")]
Model = Annotated[
    str,
    typer.Argument(
        help="A zoo name with sizes (gpt2:layers=2,width=64), file.py:function, package.module:function, "
        "or hf:ClassName:key=value; a list is written [1,2]"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite a file of another kind, too.")]
Batch = Annotated[int | None, typer.Option(help="Samples in a batch.", min=1)]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", callback=_set_verbose, help="Show tracebacks.")]


# So many parameters take less than a gigabyte, and are built in a second or two.
_SMALL = 200_000_000


def load_shapes(model: str, batch: int | None) -> tuple[torch.nn.Module, object]:
    """Capturing needs shapes only: a large model is built without memory, if its code allows that.

    A small one is built for real. What some models compute while they are captured differs on `meta` (the first token
    of a decoder, a cache), and their plan should be for what will be trained.
    """
    try:
        with torch.device("meta"):
            module, data = load(model, batch=batch)
    except ModelError as error:
        if error.__cause__ is None:  # the name is wrong, not the model's code
            raise
        return load(model, batch=batch)
    if sum(parameter.numel() for parameter in module.parameters()) < _SMALL:
        return load(model, batch=batch)
    return module, data
