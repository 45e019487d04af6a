"""QLoRA of an 8B Llama, planned on two desktop GPUs. Writes results/qlora.json; docs/libraries.md has its figures.

python benchmarks/qlora.py

Random weights on `meta`, frozen ones in NF4, adapters of rank 8 at every linear layer, gradient checkpointing, four
sequences of 1,024 tokens.
"""

from __future__ import annotations

import time
from typing import Any

import record
import torch

import lopsided
from lopsided.integrations.quantized import quantize_frozen
from lopsided.planner.plan_data import Plan

CLUSTER = "3090+3060"
LAYERS = 32


def llama_8b(layers: int = LAYERS) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model with so many of its layers, and a batch."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": layers, "vocab_size": 128256}
    with torch.device("meta"):
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "use_cache": False}
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(torch.bfloat16)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        how: dict[str, Any] = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        model = get_peft_model(model, LoraConfig(r=8, **how), low_cpu_mem_usage=True)
        ids = torch.zeros(4, 1024, dtype=torch.long)
    return quantize_frozen(model), {"input_ids": ids, "labels": ids}


def figures(plan: Plan) -> dict[str, Any]:
    return {
        "devices": list(plan.devices),
        "step_s": plan.step_s,
        "memory_gib": [used / 2**30 for used in plan.memory_bytes],
        "shares": [float(share) for share in plan.shares.work],
        "baselines_s": {one.name: one.step_s for one in plan.baselines if one.fits},
    }


def sentence(found: dict[str, Any]) -> str:
    """As it stands in docs/libraries.md."""
    first, second = (f"{used:.1f}" for used in found["memory_gib"])
    return f"{found['step_s']:.1f} s a step by the plan, {first} of 24 and {second} of 12 GiB"


def main() -> None:
    model, batch = llama_8b()
    began = time.perf_counter()
    found = figures(lopsided.plan(model, batch, CLUSTER))
    print(sentence(found))
    print(record.write("qlora", {"cluster": CLUSTER, "layers": LAYERS, **found, "took_s": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
