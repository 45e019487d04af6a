"""Lopsided trains an ordinary PyTorch model on devices that are not alike.

The line, each room importing only from rooms before it (docs/index.md):

    capture(model, batch) → Graph → derive_rules → RuleBook → random_program → Program → simulate → loss and gradients
"""

from lopsided.capture import capture
from lopsided.errors import LopsidedError
from lopsided.graph import Graph, parse_graph
from lopsided.placement import Placement
from lopsided.program import Program, check_program, parse_program
from lopsided.rules import RuleBook, derive_rules
from lopsided.sample import random_program
from lopsided.simulate import Simulation, one_device, simulate
from lopsided.verify import Verification, verify

__all__ = [
    "Graph",
    "LopsidedError",
    "Placement",
    "Program",
    "RuleBook",
    "Simulation",
    "Verification",
    "capture",
    "check_program",
    "derive_rules",
    "one_device",
    "parse_graph",
    "parse_program",
    "random_program",
    "simulate",
    "verify",
]
__version__ = "0.1.0"
