"""Lopsided trains an ordinary PyTorch model on devices that are not alike.

The line, each room importing only from rooms before it (docs/index.md):

    capture(model, batch) → Graph → derive_rules → RuleBook → search → Program → balance → Shares → Plan
                                                                 └─▶ simulate → loss and gradients
    parallelize(model, batch, plan) → a module that trains on torch.distributed

`plan` is all of the first row.
"""

from lopsided.capture import capture
from lopsided.cluster import Cluster
from lopsided.clusterfile import load_cluster
from lopsided.errors import LopsidedError
from lopsided.graph import Graph
from lopsided.graphparse import parse_graph
from lopsided.placement import Placement, Shares
from lopsided.plan import Plan
from lopsided.planfile import load_plan, save_plan
from lopsided.planner import plan
from lopsided.program import Program, check_program, parse_program
from lopsided.rules import RuleBook, derive_rules
from lopsided.runtime.batches import shard
from lopsided.runtime.checkpoint import load as load_checkpoint
from lopsided.runtime.checkpoint import save as save_checkpoint
from lopsided.runtime.norms import clip_grad_norm_
from lopsided.runtime.parallel import Parallel, parallelize
from lopsided.runtime.state import full_state_dict, load_full_state_dict
from lopsided.sample import random_program
from lopsided.simulate import Simulation, one_device, simulate
from lopsided.verify import Verification, verify

__all__ = [
    "Cluster",
    "Graph",
    "LopsidedError",
    "Parallel",
    "Placement",
    "Plan",
    "Program",
    "RuleBook",
    "Shares",
    "Simulation",
    "Verification",
    "capture",
    "check_program",
    "clip_grad_norm_",
    "derive_rules",
    "full_state_dict",
    "load_checkpoint",
    "load_cluster",
    "load_full_state_dict",
    "load_plan",
    "one_device",
    "parallelize",
    "parse_graph",
    "parse_program",
    "plan",
    "random_program",
    "save_checkpoint",
    "save_plan",
    "shard",
    "simulate",
    "verify",
]
__version__ = "0.1.0"
