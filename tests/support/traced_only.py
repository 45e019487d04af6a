"""Functions of compiled stretches without their kernels: traced, differentiated and cut in two, and then run op by op.

That is all but what Inductor's code generation does, at a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._inductor import compile_fx

from lopsided.executor import compiled


@contextmanager
def traced_only() -> Iterator[dict[object, object]]:
    """In here nothing is generated. Gives what is made of functions."""
    real = compile_fx.compile_fx

    def op_by_op(graph: fx.GraphModule, operands: Sequence[torch.Tensor], **how: Any) -> Any:
        return make_boxed_func(graph.forward)

    def without_kernels(graph: fx.GraphModule, operands: list[Any], **how: Any) -> Callable[..., Any]:
        # Kept on disk these would be taken for what Inductor makes.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return real(graph, operands, inner_compile=op_by_op, **how)  # type: ignore[return-value]

    made: dict[object, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_FUNCTIONS", made)
        patch.setattr(compile_fx, "compile_fx", without_kernels)
        yield made
