"""Adapters on devices that are not alike: QLoRA, with the frozen weights in four bits and in pieces.

    torchrun --nproc-per-node 2 examples/08_lora.py             # the processes are measured and a plan is made

Run alone (`python examples/08_lora.py`) it trains on one device. Needs `pip install lopsided[peft]`.
"""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import lopsided
from lopsided.integrations.quantized import quantize_frozen

BATCH = 16  # of all devices together


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    """Numbers that go up by one, from anywhere."""
    starts = torch.randint(0, 64, (count, 1), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(16)) % 64]


def main(folder: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        vocab_size=64,
        num_attention_heads=4,
        use_cache=False,
    )
    base = LlamaForCausalLM(config)  # yours is from_pretrained(...)
    base.gradient_checkpointing_enable({"use_reentrant": False})  # weights are made of their codes again going backward
    base.train()
    model = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    quantize_frozen(model, "nf4")  # after the adapters: what is frozen now

    loader = DataLoader(sentences(256), batch_size=BATCH, shuffle=True)
    pm = lopsided.parallelize(model, next(iter(loader)), measure_s=3)
    optimizer = torch.optim.AdamW([p for p in pm.parameters() if p.requires_grad], lr=1e-2)
    for epoch in range(4):
        for batch in lopsided.shard(loader, pm):
            loss = pm(**batch).loss
            loss.backward()
            lopsided.clip_grad_norm_(pm, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if pm.world.rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    pm.save_pretrained(folder)  # every process calls it, and rank 0 writes the adapter
    if pm.world.rank == 0:
        codes = sum(p.numel() for p in model.parameters() if p.dtype == torch.uint8)
        print(f"{codes:,} bytes of codes here; saved {sorted(path.name for path in Path(folder).iterdir())}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
