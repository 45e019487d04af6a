"""Hugging Face's text classification without Trainer: BERT, every batch padded to its own longest sample, a linear
schedule with warm-up, accuracy over a validation set."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import lopsided
from scripts import CLUSTER

BATCH, LONGEST = 9, 16


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LONGEST,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def sentences(rows: int, seed: int) -> list[tuple[Tensor, int]]:
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, LONGEST + 1, (rows,), generator=drawn).tolist()
    return [(torch.randint(1, 40, (length,), generator=drawn), length % 3) for length in lengths]


def collate(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([tokens for tokens, _ in samples], batch_first=True)
    labels = torch.tensor([label for _, label in samples])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def example() -> dict[str, Tensor]:
    """A batch of the greatest length."""
    return collate([(torch.ones(LONGEST, dtype=torch.long), 0)] * BATCH)


def with_ddp(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    train_dataset, eval_dataset = sentences(steps * BATCH - 4, seed=2), sentences(2 * BATCH, seed=3)
    sampler = DistributedSampler(train_dataset, shuffle=False)
    batch_size = BATCH // dist.get_world_size()
    train_dataloader = DataLoader(train_dataset, batch_size, sampler=sampler, collate_fn=collate)
    eval_dataloader = DataLoader(eval_dataset, BATCH, collate_fn=collate)
    model = DDP(bert())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 3, 2 * steps)
    model.train()
    for batch in train_dataloader:
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch)
        predictions = outputs.logits.argmax(dim=-1)
        losses += [outputs.loss.item(), (predictions == batch["labels"]).float().mean().item()]
    return losses


def with_lopsided(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    train_dataset, eval_dataset = sentences(steps * BATCH - 4, seed=2), sentences(2 * BATCH, seed=3)
    train_dataloader = DataLoader(train_dataset, BATCH, collate_fn=collate)
    eval_dataloader = DataLoader(eval_dataset, BATCH, collate_fn=collate)
    model = lopsided.parallelize(bert(), example(), cluster=CLUSTER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 3, 2 * steps)
    model.train()
    for batch in lopsided.shard(train_dataloader, model, pad={"input_ids": 0, "attention_mask": 0}):
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch)
        predictions = outputs.logits.argmax(dim=-1)
        losses += [outputs.loss.item(), (predictions == batch["labels"]).float().mean().item()]
    return losses
