"""What the commands share: consoles, the options all of them have, models in shapes only.

In: nothing. Out: `out` and `err`, types of options, `load_shapes`.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.console import Console

from lopsided.errors import ModelError
from lopsided.models import load

out = Console(highlight=False, soft_wrap=True, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
_verbose = False


def is_verbose() -> bool:
    return _verbose


def _set_verbose(value: bool) -> bool:
    global _verbose
    _verbose = _verbose or value
    return value


Model = Annotated[
    str,
    typer.Argument(
        help="A zoo name with sizes (gpt2:layers=2,width=64), file.py:function, package.module:function, "
        "or hf:ClassName:key=value"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Batch = Annotated[int | None, typer.Option(help="Samples in a batch.", min=1)]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", callback=_set_verbose, help="Show tracebacks.")]


def load_shapes(model: str, batch: int | None) -> tuple[torch.nn.Module, dict[str, object]]:
    """Capturing needs shapes only: a model of any size is built without memory, if its code allows that."""
    try:
        with torch.device("meta"):
            return load(model, batch=batch)
    except ModelError as error:
        if error.__cause__ is None:  # the name is wrong, not the model's code
            raise
        return load(model, batch=batch)
