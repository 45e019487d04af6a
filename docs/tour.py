"""A tour of Lopsided that runs: `python docs/tour.py`.

It builds the whole idea in seven steps, on a model small enough to see: what a device holds, how one line of index
algebra becomes rules, how rules and conversions make a program, and why the program computes what one device does.
"""

import random

import torch
from torch import nn

import lopsided
from lopsided.ir.notation import bind, derive, parse_line
from lopsided.ir.placement import I, P, R, S, cut
from lopsided.ops.simulated_devices import convert

torch.manual_seed(0)


def title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


title("1  Unequal pieces")
# Three devices, one as fast as the two others together. Seven rows cannot be cut 3.5, 2.1, 1.4, so they are cut
# to the nearest whole rows; a device with a share of 0 gets none.
shares = (0.5, 0.3, 0.2)
print(
    "7 rows:",
    cut(7, shares),
    "  20 rows:",
    cut(20, shares),
    "  with an idle device:",
    cut(7, (0.6, 0.4, 0.0)),
)

title("2  What a device holds")
# I: the whole value, and the whole gradient.      R: the whole value, but only a part of the gradient's sum.
# P: a term of a sum.                              S: a piece along a dim.
rows = torch.arange(14.0).reshape(7, 2)
pieces = convert([rows, rows, rows], I, S(0), rows.shape, shares)
print("I → S0 gives pieces of", [list(piece.shape) for piece in pieces])
terms = convert(pieces, S(0), P, rows.shape, shares)
print("S0 → P gives terms whose sum is the value:", bool((sum(terms[1:], terms[0]) == rows).all()))
# Every conversion has a transpose. I → R does nothing going forward, and sums the gradient going back: that one
# line is all there is to data parallelism.
weights = [torch.ones(2, requires_grad=True) for _ in shares]
used = convert(weights, I, R, (2,), shares)
loss = sum(((piece @ w).sum() for piece, w in zip(pieces, used, strict=True)), torch.zeros(()))
loss.backward()
print("every device has the whole gradient:", [w.grad.tolist() for w in weights if w.grad is not None])

title("3  One line per op")
# linear(x, w, b): x has any leading dims and an index i, w has o and i, b has o. Lower case may be cut, absent on
# the right is summed, `*` is linear in each factor, `+` is a summand.
line = parse_line("... i * o i + o -> ... o")
for rule in derive(bind(line, [(7, 6), (4, 6), (4,)], [(7, 4)])):
    print("  ", rule)
# S0, R, R → S0 is data parallelism; R, S0, S0 → S1 and S1, S1, P → P are the two halves of tensor parallelism;
# [sfb] broadcasts the factors of a gradient instead of the gradient.


class Net(nn.Module):
    """The model as written for one device."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.up(x)))
        return nn.functional.cross_entropy(self.down(hidden), target)


title("4  Capture")
model = Net().double()
batch = {"x": torch.randn(7, 6).double(), "target": torch.randint(0, 4, (7,))}
graph = lopsided.capture(model, batch)
print(graph.text(sources=False))

title("5  A program")
# A program picks a rule for every node, and converts where they do not fit together. This one is random: the cuts
# change from op to op for no reason at all, and still it must come out right.
book = lopsided.derive_rules(graph)
program = lopsided.random_program(book, random.Random(1))
lopsided.check_program(program, book)
print(program)

title("6  The same as one device")
alone = lopsided.simulate(lopsided.one_device(graph), model, batch, (1.0,))
together = lopsided.simulate(program, model, batch, shares)
print("loss alone    ", alone.loss.item())
print("loss together ", together.loss.item())
for name, gradient in alone.gradients.items():
    difference = (gradient - together.gradients[name]).abs().max().item()
    print(f"gradient of {name:<12} differs by {difference:.1e}")
    assert difference < 1e-12
for name, buffer in alone.buffers.items():
    assert torch.allclose(buffer, together.buffers[name], rtol=1e-12), name
print("batch norm's running statistics are those of the whole batch, however it was cut")

title("7  The best program")
# Random programs are right, and slow. The planner prices every rule and conversion on a cluster, searches for the
# cheapest program with a proof, balances the shares, and compares with what everyone knows.
home = lopsided.load_cluster("3090+3060")
with torch.device("meta"):
    wide = nn.Sequential(nn.Linear(4096, 16384), nn.ReLU(), nn.Linear(16384, 4096))
    rows = {"input": torch.randn(512, 4096)}
plan = lopsided.plan(wide, rows, home, loss_fn=lambda out, batch: out.square().sum())
print(plan.program)
print("shares", {device: round(plan.share_of(device), 3) for device in home.device_names})
print(f"a step of {plan.step_s * 1e3:.2f} ms; the best classic: {min(b.step_s for b in plan.baselines) * 1e3:.2f} ms")
assert all(plan.step_s <= baseline.step_s for baseline in plan.baselines if baseline.fits)
