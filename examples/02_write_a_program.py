"""Three well-known strategies, written down by hand for one model, and checked against one device.

python examples/02_write_a_program.py
"""

import torch
from torch import Tensor, nn

import lopsided


class Block(nn.Module):
    """A feed-forward block with a squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(torch.relu(self.up(x))), y)


# Weights are whole everywhere (I) and used as R: each device works on its rows, and gradients are summed.
DATA_PARALLEL = """
%up_weight = parameter "up.weight" : I
%up_bias = parameter "up.bias" : I
%down_weight = parameter "down.weight" : I
%down_bias = parameter "down.bias" : I
%x = input "x" : S0
%y = input "y" : S0
%linear = aten.linear.default(%x: S0, %up_weight: I→R, %up_bias: I→R) : S0
%relu = aten.relu.default(%linear: S0) : S0
%linear_1 = aten.linear.default(%relu: S0, %down_weight: I→R, %down_bias: I→R) : S0
%mse_loss = aten.mse_loss.default(%linear_1: S0, %y: S0) : P
return %mse_loss: P→I
"""

# The same work, but weights are stored in pieces and gathered for use, as ZeRO and FSDP do.
ZERO = DATA_PARALLEL.replace('weight" : I', 'weight" : S0').replace("weight: I→R", "weight: S0→R")

# Columns of the first matrix, rows of the second: one sum in the middle, and no gradient to be summed at all.
TENSOR_PARALLEL = """
%up_weight = parameter "up.weight" : S0
%up_bias = parameter "up.bias" : S0
%down_weight = parameter "down.weight" : S1
%down_bias = parameter "down.bias" : I
%x = input "x" : I
%y = input "y" : I
%linear = aten.linear.default(%x: I→R, %up_weight: S0, %up_bias: S0) : S1
%relu = aten.relu.default(%linear: S1) : S1
%linear_1 = aten.linear.default(%relu: S1, %down_weight: S1, %down_bias: I→P) : P
%mse_loss = aten.mse_loss.default(%linear_1: P→I, %y: I) : I
return %mse_loss: I
"""

if __name__ == "__main__":
    torch.manual_seed(0)
    model, batch = Block().double(), {"x": torch.randn(7, 6).double(), "y": torch.randn(7, 6).double()}
    graph = lopsided.capture(model, batch)
    book = lopsided.derive_rules(graph)
    alone = lopsided.simulate(lopsided.one_device(graph), model, batch, (1.0,))
    for name, text in {
        "data parallel": DATA_PARALLEL,
        "ZeRO": ZERO,
        "tensor parallel": TENSOR_PARALLEL,
    }.items():
        program = lopsided.parse_program(text, graph)
        lopsided.check_program(program, book)
        together = lopsided.simulate(program, model, batch, (0.5, 0.3, 0.2))
        worst = max((g - together.gradients[k]).abs().max().item() for k, g in alone.gradients.items())
        moved = ", ".join(f"{value.name} {a}→{b}" for value, a, b in program.conversions())
        print(f"{name:<16} gradients differ by {worst:.0e}; converts {moved}")
        assert worst < 1e-12
