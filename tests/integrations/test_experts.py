"""Mixtures of experts of `transformers`, as they come, on three unequal processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lopsided
from lopsided.comm.worker_pool import WorkerPool
from tests.support.jobs import cluster_of

pytest.importorskip("transformers")

SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}


def mixture(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    return getattr(transformers, f"{name}ForCausalLM")(config)


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 61, (12, 4), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def trained() -> list[tuple[float, bool]]:
    """The worst difference to one device's losses in three steps, and whether some expert is in pieces."""
    found = []
    for name in MODELS:
        alone = mixture(name)
        pm = lopsided.parallelize(mixture(name), batch_of(0), cluster=cluster_of(3, [4e6, 8e6, 12e6]))
        ours, theirs = (torch.optim.AdamW(model.parameters(), 1e-2) for model in (pm, alone))
        worst = 0.0
        for step in range(3):
            loss, expected = pm(**batch_of(step)).loss, alone(**batch_of(step)).loss
            loss.backward()
            expected.backward()
            worst = max(worst, abs(loss.item() - expected.item()))
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        found.append((worst, any(piece.is_cut for key, piece in pm.pieces.items() if "experts" in key)))
    return found


def test_experts_are_trained_as_on_one_device(three: WorkerPool) -> None:
    for found in three.run(trained):
        assert max(worst for worst, _ in found) < 1e-5
        assert all(in_pieces for _, in_pieces in found)
