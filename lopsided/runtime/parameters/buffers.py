"""The buffers of a model in training: read before a forward pass, given their new values after it.

In: a module. Out: `Buffers`. A network with fifty batch norms has more buffers than some have ops, so where each lives
is found once, and all that are alike are copied in one go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn


class Buffers:
    """Buffers by name; a name that a shared module has elsewhere will do."""

    def __init__(self, model: nn.Module) -> None:
        # Dictionaries, not tensors: a buffer may be replaced. And not modules: one of them holds this.
        self._homes = {
            f"{path}.{key}" if path else key: (module._buffers, key)
            for path, module in model.named_modules(remove_duplicate=False)
            for key in module._buffers
        }

    def __getitem__(self, name: str) -> Tensor:
        home, key = self._homes[name]
        buffer: Tensor = home[key]
        return buffer

    def copies(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Copies of the buffers as they are now, whatever becomes of them."""
        found = {name: self[name] for name in names}
        made = {name: torch.empty_like(buffer) for name, buffer in found.items()}
        _copy_all([(made[name], found[name]) for name in found])
        return made

    def update(self, values: Mapping[str, Tensor]) -> None:
        _copy_all([(self[name], value) for name, value in values.items()])


def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    alike: dict[object, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for to, source in pairs:
        alike[to.dtype, source.dtype].append((to, source))
    with torch.no_grad():
        for group in alike.values():
            torch._foreach_copy_([to for to, _ in group], [source for _, source in group])
