"""Printed forms, compared with files. `UPDATE_GOLDEN=1 pytest tests/test_golden.py` writes them anew."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lopsided
from lopsided.models.by_name import load

GOLDEN = Path(__file__).parent / "golden"


class Block(nn.Module):
    """An embedding, attention with a fused projection, a norm and a tied head: small, with one of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv, self.norm = nn.Embedding(11, 8), nn.Linear(8, 24), nn.LayerNorm(8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(h).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = self.norm(h + mixed.transpose(1, 2).flatten(2))
        logits = h @ self.tokens.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=0)


def block_graph() -> lopsided.Graph:
    x = torch.randint(0, 11, (5, 6))
    return lopsided.capture(Block(), {"x": x, "y": x.clone()})


def rule_lines(graph: lopsided.Graph) -> str:
    book = lopsided.derive_rules(graph)
    lines = []
    for node in graph.nodes:
        lines += [f"%{node.name} = {node.op}", *(f"    {rule}" for rule in book.rules[node.name])]
    return "\n".join(lines) + "\n"


PRINTED = {
    "block.graph": lambda: block_graph().text(sources=False),
    "block.rules": lambda: rule_lines(block_graph()),
    "block.program": lambda: str(lopsided.random_program(lopsided.derive_rules(block_graph()), random.Random(3))),
    "mlp.rules": lambda: rule_lines(lopsided.capture(*load("mlp:layers=2,width=12,classes=5,batch=7"))),
}


@pytest.mark.parametrize("name", PRINTED)
def test_prints_as_before(name: str) -> None:
    printed, path = PRINTED[name](), GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(printed)
    assert printed == path.read_text(), f"if the change is meant: UPDATE_GOLDEN=1 pytest {Path(__file__).name}"
