"""Models in plain PyTorch with their sizes as parameters: what the benchmarks and tests train.

`build("bert", layers=24)` gives a module and a batch; `module(**batch)` is a scalar loss. Under
`with torch.device("meta")` both have shapes and no memory. `SMALL` names a version of each that runs in tens
of milliseconds, in sizes that do not divide evenly. A size whose default is 0 follows the width.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable

from lopsided.errors import ModelError
from lopsided.models.zoo.bert import bert, bert_moe
from lopsided.models.zoo.gpt2 import gpt2
from lopsided.models.zoo.llama import llama
from lopsided.models.zoo.mlp import mlp
from lopsided.models.zoo.parts import Batch, Built
from lopsided.models.zoo.t5 import t5
from lopsided.models.zoo.unet import unet
from lopsided.models.zoo.vision import resnet50, vgg19, vit

__all__ = ["SMALL", "ZOO", "Batch", "Built", "Size", "build", "sizes"]

Size = bool | int | float | str

ZOO: dict[str, Callable[..., Built]] = {
    "mlp": mlp,
    "vgg19": vgg19,
    "vit": vit,
    "resnet50": resnet50,
    "unet": unet,
    "bert": bert,
    "bert-moe": bert_moe,
    "gpt2": gpt2,
    "llama": llama,
    "t5": t5,
}

SMALL: dict[str, str] = {
    "mlp": "mlp:layers=3,width=24,classes=7,batch=7",
    "vgg19": "vgg19:width=4,ffn=20,classes=7,batch=5",
    "vit": "vit:layers=2,width=24,heads=3,ffn=40,image=12,classes=7,batch=5",
    "resnet50": "resnet50:blocks=1-1-2,width=6,image=35,classes=7,batch=5",
    "unet": "unet:layers=1,width=12,factors=1-2,heads=3,groups=4,image=10,batch=5",
    "bert": "bert:layers=2,width=24,heads=3,ffn=40,seq=11,vocab=61,batch=5",
    "bert-moe": "bert-moe:layers=2,width=24,heads=3,ffn=40,seq=11,vocab=61,experts=5,batch=5",
    "gpt2": "gpt2:layers=2,width=32,heads=4,seq=10,vocab=61,batch=7",
    "llama": "llama:layers=2,width=48,heads=6,kv_heads=3,ffn=56,seq=10,vocab=61,batch=5",
    "t5": "t5:layers=2,width=24,heads=3,ffn=40,seq=11,target_seq=7,vocab=61,buckets=8,batch=5",
}


def sizes(name: str) -> dict[str, Size]:
    """What can be overridden in a zoo model, with its defaults."""
    if name not in ZOO:
        raise ModelError(
            f"there is no zoo model {name!r}{close_to(name, ZOO)}",
            where=f"model {name!r}",
            do=f"choose one of {', '.join(ZOO)}, or name your own as file.py:function",
        )
    return {key: parameter.default for key, parameter in inspect.signature(ZOO[name]).parameters.items()}


def build(name: str, **overrides: Size) -> Built:
    """A zoo model and a batch for it, with the sizes in `overrides` in place of the defaults."""
    defaults = sizes(name)
    for key, value in overrides.items():
        if key not in defaults:
            raise ModelError(
                f"{name} has no size {key!r}{close_to(key, defaults)}",
                where=f"model {name!r}",
                do=f"choose among {', '.join(f'{k}={v}' for k, v in defaults.items())}",
            )
        check_range(name, key, value, defaults[key])
    # Sizes beyond memory fail in torch, those beyond 64 bits in torch or in Python, each with its own exception.
    try:
        return ZOO[name](**overrides)
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{name} with these sizes cannot be built: {said}",
            where=f"model {name!r} with {', '.join(f'{k}={v}' for k, v in overrides.items()) or 'its defaults'}",
            do='choose smaller sizes, or build it under torch.device("meta") where shapes are enough',
        ) from error


def check_range(name: str, key: str, value: Size, default: Size) -> None:
    """Refuse sizes below one and fractions outside [0, 1), whichever the default shows `key` to be."""
    if isinstance(default, str | bool) or isinstance(value, str):
        return
    fraction = isinstance(default, float) and default < 1
    low = min(default, 1)  # 0 as a default means: follow the width
    if fraction and not 0 <= value < 1:
        raise ModelError(f"{key}={value} is not a fraction", where=f"model {name!r}", do=f"choose 0 <= {key} < 1")
    if not fraction and not value >= low:
        raise ModelError(f"{key}={value} is too small", where=f"model {name!r}", do=f"choose {key} from {low} up")


def close_to(word: str, words: Iterable[str]) -> str:
    """ "; did you mean ...?", or nothing where no word comes close."""
    found = difflib.get_close_matches(word, list(words), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(found)}?" if found else ""
