"""Samples of different lengths: batches are padded to a few lengths, and one plan serves all of them.

    torchrun --nproc-per-node 2 examples/10_variable_length.py

Run alone (`python examples/10_variable_length.py`) it trains on one device.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import lopsided

BATCH, WORDS = 8, 32


class Tagger(nn.Module):
    """Says of every word whether it is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        hidden = self.layer(self.embedding(words), src_key_padding_mask=tags < 0)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tags.flatten(), ignore_index=-1)


def collate(samples: list[Tensor]) -> dict[str, Tensor]:
    words = pad_sequence(samples, batch_first=True)
    tags = pad_sequence([sample % 2 for sample in samples], batch_first=True, padding_value=-1)
    return {"words": words, "tags": tags}


def main() -> None:
    torch.manual_seed(0)
    lengths = torch.empty(160).log_normal_(2.0, 0.5).long().clamp(3, 24).sort().values.tolist()
    samples = [torch.randint(WORDS, (length,)) for length in lengths]
    loader = DataLoader(samples, batch_size=BATCH, collate_fn=collate)

    pm = lopsided.parallelize(Tagger(), collate(samples[-BATCH:]), batches=loader, measure_s=2)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    for epoch in range(3):
        for batch in lopsided.shard(loader, pm, pad={"words": 0, "tags": -1}):
            loss = pm(**batch)  # the first batch of every length makes a program for it
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if pm.world.rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, lengths {', '.join(map(str, pm.planned_lengths))}")


if __name__ == "__main__":
    main()
