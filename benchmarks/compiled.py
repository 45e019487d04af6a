"""What compiling gains on one device. Writes results/compiled-DEVICE.json.

python benchmarks/compiled.py [--only gpt2,llama] [--rounds 9] [--quick] [--kernels]

All subjects train the same model with the same batch, AdamW and autocast in one process, some steps each in every
round, in an order that is shuffled anew. What counts is the ratio to `torch.compile` within a round, and of these the
median.

    plain      the model as it is
    compile    `torch.compile(model)`, as it comes
    eager      `parallelize(..., compile=False)` by a plan of one device
    stretches  `parallelize(..., compile=True)` by the same plan
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import record
import torch
from runtime import by_hand, cluster_of
from torch import Tensor, nn

from lopsided import capture, parallelize
from lopsided.ir.placement import Shares
from lopsided.ir.program import one_device
from lopsided.models import by_name as models

SUBJECTS = ("plain", "compile", "eager", "stretches")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    gpu: str  # the model at the size of a GPU
    cpu: str
    steps: int = 3  # in a round


CASES = (
    Case("gpt2", "gpt2:dropout=0,seq=1024,batch=32,vocab=50304", "gpt2:layers=4,width=256,heads=4,seq=128,batch=4"),
    Case(
        "llama",
        "llama:layers=12,width=1024,heads=16,seq=1024,batch=16",
        "llama:layers=4,width=256,heads=4,seq=128,batch=4",
    ),
    Case("bert", "bert:batch=16,dropout=0", "bert:layers=4,width=256,heads=4,vocab=8192,batch=4", 8),
    Case("vit", "vit:image=224,patch=16,batch=192,dropout=0", "vit:layers=4,width=256,heads=4,batch=8"),
    Case("t5", "t5:layers=6,width=512,heads=8,seq=512,batch=48,dropout=0", "t5:layers=2,width=256,heads=4,batch=4"),
    Case("resnet50", "resnet50:width=64,image=224,batch=128,classes=1000", "resnet50:batch=4"),
    Case("unet", "unet:width=64,batch=256,dropout=0", "unet:batch=4"),
)


class Trained:
    """One subject: a model with an optimizer, ready to take steps."""

    def __init__(self, model: nn.Module, batch: Any, device: torch.device) -> None:
        self.model, self.device = model, device
        self.args, self.kwargs = ((), batch) if isinstance(batch, dict) else (tuple(batch), {})
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step(self) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(*self.args, **self.kwargs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def seconds(self, steps: int) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.wait()
        return (time.perf_counter() - start) / steps

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def made(case: Case, subject: str, device: torch.device) -> Trained:
    torch.manual_seed(0)
    model, batch = models.load(case.gpu if device.type == "cuda" else case.cpu)
    move = {k: v.to(device) for k, v in batch.items()} if isinstance(batch, dict) else [v.to(device) for v in batch]
    model = model.to(device)
    if subject == "plain":
        return Trained(model, move, device)
    if subject == "compile":
        return Trained(torch.compile(model), move, device)  # type: ignore[arg-type]
    with torch.autocast(device.type, torch.bfloat16):
        graph = capture(copy.deepcopy(model), move)
        plan = by_hand(one_device(graph), Shares((1.0,)), cluster_of((1.0,), device.type == "cuda"))
        on = subject == "stretches"
        pm = parallelize(
            model, move, plan=plan, device=device, compile=on, check_capture=False, check_every=0, quiet=True
        )
    return Trained(pm, move, device)


def measured(case: Case, device: torch.device, rounds: int, kernels: bool) -> dict[str, Any]:
    subjects: dict[str, Trained] = {}
    found: dict[str, Any] = {"name": case.name, "model": case.gpu if device.type == "cuda" else case.cpu}
    losses: dict[str, list[float]] = {}
    first: dict[str, float] = {}
    for name in SUBJECTS:
        try:
            subjects[name] = made(case, name, device)
            start = time.perf_counter()
            first[name] = 0.0
            losses[name] = [float(subjects[name].step()) for _ in range(3)]
            first[name] = time.perf_counter() - start
        except Exception as error:
            found.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:300]
            subjects.pop(name, None)
    times: dict[str, list[float]] = {name: [] for name in subjects}
    order = list(subjects)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            subjects[name].seconds(1)
            times[name].append(subjects[name].seconds(case.steps))
    against = times.get("compile")
    ratios = {
        name: statistics.median(a / b for a, b in zip(of, against, strict=True)) if against else None
        for name, of in times.items()
    }
    peak = {name: peak_of(subjects[name]) for name in subjects}
    for name in subjects if kernels else ():
        print_kernels(name, subjects[name])
    found |= {"seconds": times, "first_3_steps_s": first, "losses": losses, "ratios": ratios, "peak_bytes": peak}
    medians = "  ".join(
        f"{name} {1e3 * statistics.median(of):.1f} ms ({ratios[name] or 0:.3f})" for name, of in times.items()
    )
    print(f"{case.name:10} {medians}", flush=True)
    ready = "  ".join(f"{name} {seconds:.1f} s" for name, seconds in first.items())
    print(f"{'':10} first three steps: {ready}; losses {losses}  {found.get('failed', '')}", flush=True)
    return found


def peak_of(subject: Trained) -> int:
    if subject.device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    subject.step()
    subject.wait()
    return torch.cuda.max_memory_allocated() - before


def print_kernels(name: str, subject: Trained, most: int = 14) -> None:
    """Where two steps spend their time on the device."""
    with torch.profiler.profile() as profile:
        subject.seconds(2)
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)[:most]
    total = sum(row.self_device_time_total for row in profile.key_averages())
    print(f"{name}: {total / 2e3:.1f} ms a step in kernels")
    for row in rows:
        print(f"  {row.self_device_time_total / 2e3:8.2f} ms {row.count // 2:5} × {row.key[:90]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kernels", action="store_true", help="print where steps spend their time on the device")
    parser.add_argument("--quick", action="store_true", help="two rounds, nothing is written")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = options.only.split(",") if options.only else [case.name for case in CASES]
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    rows: list[dict[str, Any]] = []
    path = None
    for case in CASES:
        if case.name in wanted:
            rows.append(measured(case, device, 2 if options.quick else options.rounds, options.kernels))
            if not options.quick:  # what is there when it is broken off is kept
                path = record.write(f"compiled-{device.type}", {"device": card, "cases": rows})
            gc.collect()
            torch._dynamo.reset()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if path is not None:
        print(path)


if __name__ == "__main__":
    main()
