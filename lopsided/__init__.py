"""Lopsided trains an ordinary PyTorch model on devices that are not alike.

The line, each package importing only from packages before it (docs/index.md):

    capture(model, batch) → Graph → derive_rules → RuleBook → search → Program → balance → Shares → Plan
                                                                 └─▶ simulate → loss and gradients
    parallelize(model, batch, plan) → a module that trains on torch.distributed

`plan` is all of the first row.
"""

from lopsided import interrupts as interrupts  # first: from then on Ctrl-C ends a command that is still importing
from lopsided.capturing.capture_graph import capture
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.cluster_file import load_cluster
from lopsided.errors import LopsidedError
from lopsided.ir.graph import Graph
from lopsided.ir.graph_text import parse_graph
from lopsided.ir.placement import Placement, Shares
from lopsided.ir.program import Program, RuleBook, check_program, one_device, parse_program
from lopsided.ops.derive import derive_rules
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import load_plan, save_plan
from lopsided.planner.planner import plan
from lopsided.runtime.calls.batches import shard
from lopsided.runtime.calls.outputs import gather
from lopsided.runtime.checkpoint.automatic import Checkpoints
from lopsided.runtime.checkpoint.checkpoint import load as load_checkpoint
from lopsided.runtime.checkpoint.checkpoint import save as save_checkpoint
from lopsided.runtime.checkpoint.state import full_state_dict, load_full_state_dict, whole
from lopsided.runtime.parallel import Parallel
from lopsided.runtime.parallelizing import parallelize
from lopsided.runtime.parameters.norms import clip_grad_norm_
from lopsided.verification.simulator import Simulation, simulate
from lopsided.verification.verifier import Verification, random_program, verify

__all__ = [
    "Checkpoints",
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
    "gather",
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
    "whole",
]
__version__ = "0.1.0"
