"""Your own model on unequal devices: is it the same as on one?

python examples/01_verify_your_model.py
lopsided verify examples/01_verify_your_model.py:recommender     # the same from the command line
"""

import torch
from torch import Tensor, nn

import lopsided


class Recommender(nn.Module):
    """Two towers, a dot product, a loss over in-batch negatives: nothing the zoo has."""

    def __init__(self, users: int = 300, items: int = 500, width: int = 24) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.tower = nn.Sequential(nn.Linear(width, 48), nn.BatchNorm1d(48), nn.GELU(), nn.Linear(48, width))
        self.temperature = nn.Parameter(torch.tensor(0.1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u = nn.functional.normalize(self.tower(self.user(user)), dim=-1)
        i = nn.functional.normalize(self.item(item), dim=-1)
        scores = u @ i.T / self.temperature
        return nn.functional.cross_entropy(scores, torch.arange(len(user)), label_smoothing=0.05)


def recommender() -> tuple[nn.Module, dict[str, Tensor]]:
    return Recommender(), {"user": torch.randint(0, 300, (11,)), "item": torch.randint(0, 500, (11,))}


if __name__ == "__main__":
    torch.manual_seed(0)
    model, batch = recommender()
    result = lopsided.verify(model, batch, shares=(0.6, 0.3, 0.1), programs=25)
    print(f"{len(result.trials)} random programs, worst relative error {result.worst.error:.1e} ({result.worst.where})")
    print("conversions used:", dict(result.conversions))
    assert result.passed
