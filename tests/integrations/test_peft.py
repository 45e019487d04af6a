"""PEFT on three unequal processes: adapters beside frozen weights that are stored in pieces, plain and in four bits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lopsided
from lopsided.capturing.capture_graph import capture
from lopsided.comm.worker_pool import WorkerPool
from lopsided.integrations.quantized import QuantizedLinear, quantize_frozen
from lopsided.ir.placement import I
from lopsided.schedule.cost import optimizer_named
from lopsided.schedule.memory import stored
from tests.support.classifier import NONE_FOR_ONE, SHARES, plan_for
from tests.support.data import farthest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import qlora  # noqa: E402

pytest.importorskip("peft")

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 61}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}


def adapted(dora: bool = False, form: str = "", device: str = "cpu") -> Any:
    """A small Llama with adapters, its frozen weights in a form, checkpointed as QLoRA is."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        how: dict[str, Any] = {"target_modules": "all-linear", "use_dora": dora, "init_lora_weights": False}
        model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM", **how))
    return quantize_frozen(model, form) if form else model  # type: ignore[arg-type]


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 61, (10, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def trained(folder: str, dora: bool, form: str, none_for_one: bool) -> tuple[float, bool, bool]:
    """The worst difference to one device's losses; whether frozen weights were left alone, and lie in pieces."""
    alone, model = adapted(dora, form), adapted(dora, form)
    plan = plan_for(model, batch_of(0), "zero", NONE_FOR_ONE if none_for_one else SHARES)
    pm = lopsided.parallelize(model, batch_of(0), plan=plan)
    ours, theirs = (torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-2) for m in (pm, alone))
    worst = 0.0
    for step in range(4):
        loss, expected = pm(**batch_of(step)).loss, alone(**batch_of(step)).loss
        loss.backward()
        expected.backward()
        worst = max(worst, abs(loss.item() - expected.item()))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    frozen = [(n, p) for n, p in pm.named_parameters() if not p.requires_grad]
    untouched = all(p.grad is None and p not in ours.state for _, p in frozen)
    pm.module.save_pretrained(folder)
    if pm.world.rank == 0:
        alone.save_pretrained(f"{folder}/alone")
    return worst, untouched, all(pm.pieces[n].is_cut for n, p in frozen if p.dim() > 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("dora", "form", "none_for_one"),
    [(False, "", False), (True, "", True), (False, "nf4", True), (True, "int8", False)],
    ids=["lora", "dora", "qlora-nf4", "dora-int8"],
)
def test_adapters_are_trained_as_on_one_device(
    three: WorkerPool, tmp_path: Path, dora: bool, form: str, none_for_one: bool
) -> None:
    for worst, untouched, in_pieces in three.run(trained, str(tmp_path), dora, form, none_for_one):
        assert worst < 1e-5
        assert untouched
        assert in_pieces
    from safetensors.torch import load_file

    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (tmp_path, tmp_path / "alone"))
    assert ours.keys() == theirs.keys()
    assert all("lora" in name for name in ours)
    assert farthest(theirs, ours) < 1e-4


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_codes_stand_for_the_weight(form: str) -> None:
    linear = torch.nn.Linear(128, 6, dtype=torch.float64).requires_grad_(False)
    made = quantize_frozen(torch.nn.Sequential(linear), form)[0]  # type: ignore[arg-type, index]
    assert isinstance(made, QuantizedLinear)
    error = (made.weight - linear.weight).abs().reshape(6, 2, 64)
    largest = linear.weight.abs().reshape(6, 2, 64).amax(-1, keepdim=True)
    # Half of the widest gap between two values of the form.
    assert (error <= largest * (0.152 if form == "nf4" else 0.5 / 127) * (1 + 1e-6)).all()
    stored = made.codes.numel() * made.codes.element_size()
    assert stored == 6 * 128 // (2 if form == "nf4" else 1)
    assert torch.allclose(made(torch.eye(128, dtype=torch.float64)), made.weight.T + linear.bias)


def test_what_is_trained_or_shared_is_not_quantized() -> None:
    from torch import nn

    shared = nn.Linear(64, 64).requires_grad_(False)
    tied = nn.Linear(64, 64).requires_grad_(False)
    tied.weight = shared.weight
    model = nn.ModuleList([shared, tied, nn.Linear(64, 4), nn.Linear(60, 4).requires_grad_(False)])
    assert all(type(module) is nn.Linear for module in quantize_frozen(model))  # type: ignore[union-attr]
    with pytest.raises(lopsided.LopsidedError, match="no form 'fp3'"):
        quantize_frozen(model, "fp3")  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [1, pytest.param(32, marks=pytest.mark.slow)])
def test_a_qlora_of_8b_is_planned_at_its_size(layers: int) -> None:
    model, batch = qlora.llama_8b(layers)
    graph = capture(model, batch)
    adamw = optimizer_named("adamw")
    held = {"frozen": 0, "trained": 0}
    for leaf in graph.parameters:
        for holding in stored(leaf, I, adamw):
            held["trained" if leaf.value.grad else "frozen"] += holding.bytes
    parameters = [*model.parameters()]
    of = lambda trains: sum(p.numel() * p.element_size() for p in parameters if p.requires_grad == trains)  # noqa: E731
    assert held["frozen"] == of(False)  # no gradient, and no state of the optimizer
    assert held["trained"] > 3 * of(True)
    blocks = sum(p.numel() for p in parameters if p.dtype == torch.uint8)
    assert blocks == layers * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) // 2
    plan = lopsided.plan(model, batch, qlora.CLUSTER)
    assert all(used < room << 30 for used, room in zip(plan.memory_bytes, (24, 12), strict=True))


def test_the_figures_in_the_docs_are_those_of_the_plan() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "qlora.json").read_text())
    assert qlora.sentence(measured) in " ".join((ROOT / "docs" / "libraries.md").read_text().split())
