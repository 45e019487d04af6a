"""`transformers.Trainer` on devices that are not alike: one import is another.

    torchrun --nproc-per-node 2 examples/06_trainer.py          # the processes are measured and a plan is made

Run alone (`python examples/06_trainer.py`) it trains on one device. Needs `pip install lopsided[trainer]`.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from lopsided.integrations.trainer import Trainer  # instead of: from transformers import Trainer


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    """Numbers that go up by one, from anywhere."""
    starts = torch.randint(0, 64, (count, 1), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(16)) % 64]


def main(folder: str) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=8,  # times the number of processes is the global batch, as under DDP
        gradient_accumulation_steps=2,
        max_steps=30,
        learning_rate=1e-2,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=15,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),  # or processes would not know of each other
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=sentences(256),
        eval_dataset=sentences(50),
        parallel={"measure_s": 3},  # or plan="plan.json", or cluster="cluster.toml"
    )
    trainer.train()
    trainer.save_model()  # an ordinary model, written by rank 0
    if trainer.is_world_process_zero():
        print(f"loss {trainer.state.log_history[-1]['train_loss']:.3f}; saved to {folder}")
        print(GPT2LMHeadModel.from_pretrained(folder).config.n_embd)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
