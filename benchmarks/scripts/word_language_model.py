"""pytorch/examples word_language_model: an LSTM whose hidden state goes from batch to batch, batches in the second dim,
clipping, and SGD written by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import lopsided
from scripts import CLUSTER

WORDS, WIDTH, BATCH, LENGTH = 20, 12, 6, 5
Hidden = tuple[Tensor, Tensor]


class RNNModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, 2)
        self.decoder = nn.Linear(WIDTH, WORDS)

    def forward(self, input: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        output, hidden = self.rnn(self.encoder(input), hidden)
        return F.log_softmax(self.decoder(output).view(-1, WORDS), dim=1), hidden

    def init_hidden(self, rows: int) -> Hidden:
        weight = next(self.parameters())
        return weight.new_zeros(2, rows, WIDTH), weight.new_zeros(2, rows, WIDTH)


def batchify(steps: int) -> Tensor:
    words = torch.randint(WORDS, (BATCH, steps * LENGTH + 1), generator=torch.Generator().manual_seed(4))
    return words.t().contiguous()


def get_batch(source: Tensor, i: int) -> tuple[Tensor, Tensor]:
    return source[i : i + LENGTH], source[i + 1 : i + 1 + LENGTH].reshape(-1)


def repackage_hidden(hidden: Hidden) -> Hidden:
    return hidden[0].detach(), hidden[1].detach()


def with_ddp(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    train_data, lr = batchify(steps), 2.0
    criterion = nn.NLLLoss()
    model = RNNModel()
    hidden = model.init_hidden(BATCH)
    model = DDP(model)
    model.train()
    for i in range(0, train_data.size(0) - 1, LENGTH):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        losses.append(loss.item())
    return losses


def with_lopsided(steps: int) -> list[float]:
    torch.manual_seed(1)
    losses: list[float] = []
    train_data, lr = batchify(steps), 2.0
    criterion = nn.NLLLoss()
    model = RNNModel()
    hidden = model.init_hidden(BATCH)
    data, targets = get_batch(train_data, 0)
    loss_fn = lambda output, targets: criterion(output[0], targets)  # noqa: E731
    model = lopsided.parallelize(model, (data, hidden, targets), cluster=CLUSTER, loss_fn=loss_fn)
    model.train()
    for i in range(0, train_data.size(0) - 1, LENGTH):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = model.loss_fn((output, hidden), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        losses.append(loss.item())
    return losses
