"""`accelerate` on three unequal processes: losses, metrics and checkpoints of the plain one on one device."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import lopsided
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import LopsidedError
from lopsided.ir.placement import Shares
from tests.support.classifier import BATCH, NONE_FOR_ONE, SHARES, classifier, plan_for, samples
from tests.support.data import farthest, gap

pytest.importorskip("accelerate")

Told = list[dict[str, float]]


def batch_of(outside: bool) -> dict[str, torch.Tensor]:
    rows = samples(BATCH)
    whole = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {"x": whole["x"]} if outside else whole


def accelerator_for(plan: tuple[str, Shares] | None, *, outside: bool = False, precision: str = "no") -> Any:
    import accelerate
    from accelerate.state import AcceleratorState, GradientState

    from lopsided.integrations.accelerate import Accelerator

    AcceleratorState._reset_state()  # of the test before
    GradientState._reset_state()
    how: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": 2, "mixed_precision": precision}
    how["dataloader_config"] = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)  # an order to compare
    if plan is None:
        return accelerate.Accelerator(**how)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        made = plan_for(classifier(), batch_of(outside), *plan)
    return Accelerator(plan=made, **how)


def trained(
    folder: str,
    plan: tuple[str, Shares] | None = None,
    outside: bool = False,
    resume: bool = False,
    precision: str = "no",
) -> tuple[Told, dict[str, torch.Tensor]]:
    """Two epochs in the way of an `accelerate` script; what it saw, and its weights in the end."""
    accelerator = accelerator_for(plan, outside=outside, precision=precision)
    torch.manual_seed(7)
    label = "target" if outside else "labels"
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + 0.1 * k))
    each = BATCH // accelerator.num_processes
    loader = DataLoader(samples(31, label), batch_size=each, shuffle=True)  # two batches of 12, one of 7
    quiz = DataLoader(samples(17, label), batch_size=each)
    model, optimizer, loader, quiz, scheduler = accelerator.prepare(model, optimizer, loader, quiz, scheduler)
    told: Told = []
    if resume:
        accelerator.load_state(f"{folder}/state")
    for epoch in range(2):
        model.train()
        batches = accelerator.skip_first_batches(loader, 2) if resume and not epoch else loader
        for batch in batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(batch["x"]), batch["target"]) if outside else model(**batch)["loss"]
                accelerator.backward(loss)
                norm = torch.zeros(())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                for _ in range(1 if plan else 3):  # accelerate makes a step for every process
                    scheduler.step()
                optimizer.zero_grad()
            mean = accelerator.gather(loss.detach()).mean()
            told.append({"loss": mean.item(), "norm": norm.item(), "rate": scheduler.get_last_lr()[0]})
            if len(told) == 2 and not (epoch or resume):
                accelerator.save_state(f"{folder}/state")
        if resume and not epoch:
            loader.set_epoch(1)
        model.eval()
        guesses, labels = [], []
        for batch in quiz:
            with torch.no_grad():
                found = model(batch["x"]).argmax(-1)
            both = accelerator.gather_for_metrics((found, batch[label]))
            guesses.append(both[0])
            labels.append(both[1])
        right = torch.cat(guesses) == torch.cat(labels)
        told.append({"right": right.float().mean().item(), "count": len(right)})
    accelerator.wait_for_everyone()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        accelerator.print("done")
    assert bool(printed.getvalue()) == accelerator.is_main_process
    accelerator.unwrap_model(model).save_pretrained(f"{folder}/final")
    return told, accelerator.get_state_dict(model)


@pytest.mark.parametrize(
    ("how", "shares", "outside"),
    [("dp", SHARES, False), ("zero", NONE_FOR_ONE, False), ("zero", SHARES, True)],
    ids=["dp", "zero-and-one-has-no-rows", "loss-outside"],
)
def test_a_loop_is_that_of_one_device(
    one: WorkerPool, three: WorkerPool, tmp_path: Path, how: str, shares: Shares, outside: bool
) -> None:
    ((expected, weights),) = one.run(trained, str(tmp_path / "one"), None, outside)
    results = three.run(trained, str(tmp_path / "three"), (how, shares), outside)
    for found, state in results:
        assert gap(found, expected) < 1e-5
        assert farthest(state, weights) < 1e-5
    assert len(expected) == 8
    saved = load_file(tmp_path / "three" / "final" / "model.safetensors")
    assert all(torch.equal(saved[key], results[0][1][key]) for key in weights)
    # From the state in the middle of the first epoch, in a new model: the rest.
    for found, _ in three.run(trained, str(tmp_path / "three"), (how, shares), outside, True):
        assert gap(found, expected[2:]) < 1e-5


def test_mixed_precision_is_on_without_asking(one: WorkerPool, three: WorkerPool, tmp_path: Path) -> None:
    ((expected, _),) = one.run(trained, str(tmp_path / "one"), None, False, False, "bf16")
    ((full, _),) = one.run(trained, str(tmp_path / "full"))
    results = three.run(trained, str(tmp_path / "three"), ("dp", SHARES), False, False, "bf16")
    for found, _ in results:
        assert gap(found[:1], expected[:1]) < 1e-6 < gap(full[:1], expected[:1])


def told_by(job: Any) -> str:
    try:
        job()
    except LopsidedError as error:
        return str(error)
    return ""


def refused() -> list[str]:
    """What is told where the library's own accelerator prepares a parallel module, and other misuses."""
    import accelerate
    from accelerate.state import AcceleratorState

    from lopsided.integrations.accelerate import Accelerator

    ours = accelerator_for(("dp", SHARES))
    pm = lopsided.parallelize(classifier(), batch_of(False), plan=plan_for(classifier(), batch_of(False), "dp", SHARES))
    plain = accelerate.Accelerator(cpu=True)
    loader = DataLoader(samples(12), batch_size=4)
    told = [
        told_by(lambda: plain.prepare(pm)),
        told_by(lambda: ours.prepare(classifier())),
        told_by(lambda: ours.prepare(loader)),
        told_by(lambda: ours.prepare(classifier(), classifier(), loader)),
        told_by(lambda: ours.prepare(torch.nn.parallel.DistributedDataParallel(classifier()), loader)),
    ]
    AcceleratorState._reset_state(True)
    told.append(told_by(Accelerator))
    AcceleratorState._reset_state(True)
    return told


def test_wrong_uses_are_refused(three: WorkerPool) -> None:
    expected = [
        "DistributedDataParallel around a parallel module",
        "there is no batch to plan for",
        "a loader is prepared before the model",
        "2 models are trained",
        "the model is a DistributedDataParallel already",
        "3 processes were started, and accelerate takes each for the only one",
    ]
    for told in three.run(refused):
        assert all(words in text for words, text in zip(expected, told, strict=True)), told


def gathered() -> tuple[Any, ...]:
    """What processes know together after a batch of 12 rows, of which they have 6, 2 or 3, and 4."""
    accelerator = accelerator_for(("dp", SHARES))
    loader = DataLoader(samples(12), batch_size=4)
    model, loader = accelerator.prepare(classifier(), loader)
    for batch in loader:
        loss = model(**batch)["loss"]
    rows, rank = len(batch["x"]), accelerator.process_index
    return (
        accelerator.gather(loss.detach().repeat(4)).tolist(),
        accelerator.gather_for_metrics([f"{rank}"] * rows),
        accelerator.reduce(torch.tensor([rows])).item(),
        accelerator.reduce(loss.detach(), "mean").item() == loss.item(),
        told_by(lambda: accelerator.reduce(torch.tensor(float(rank)), "mean")),
        told_by(lambda: accelerator.gather(torch.zeros(rank + 20))),
    )


def test_what_is_gathered(three: WorkerPool) -> None:
    for losses, names, count, same, unequal, odd in three.run(gathered):
        assert len(losses) == 12
        assert len({*losses}) == 1
        assert (len(names), {*names}, names == sorted(names)) == (12, {"0", "1", "2"}, True)
        assert (count, same) == (12, True)
        assert "unequal numbers of rows" in unequal
        assert "processes gather tensors of 20, 21, 22 rows" in odd
