"""`transformers.Trainer` on three unequal processes: losses, metrics and checkpoints of the plain one on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lopsided.capturing.capture_graph import capture_call
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import LopsidedError
from lopsided.ir.placement import Shares
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.planner.plan_data import Plan
from tests.support.data import farthest, gap
from tests.support.jobs import cluster_of, plan_of, prices_of

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

SHARES = Shares((0.5, 0.2, 0.3), named=(("state", (0.2, 0.5, 0.3)),))
NONE_FOR_ONE = Shares((0.6, 0.0, 0.4), named=(("state", (0.3, 0.3, 0.4)),))
TWO = Shares((0.6, 0.4))
BATCH = 12  # of all processes together
COMPARED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_items", "train_loss", "epoch")


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Of one length, with an unequal number of labels each."""
    random = torch.Generator().manual_seed(3)
    made = []
    for k in range(count):
        ids = torch.randint(1, 61, (12,), generator=random)
        made.append({"input_ids": ids, "labels": torch.where(torch.arange(12) < k % 7, -100, ids)})
    return made


def language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 24, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def plan_for(how: str, shares: Shares, with_labels: bool) -> Plan:
    rows = samples(BATCH)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    batch["num_items_in_batch"] = torch.tensor(100.0)
    if not with_labels:
        del batch["labels"]
    model = language_model()
    model.config.use_cache = False
    book = derive_rules(capture_call(model, batch, needs_loss=False).graph)
    program = data_parallel(book, prices_of(book.graph, shares))
    plan = plan_of(stored_cut(program) if how == "zero" else program, shares)
    if len(shares) == 2:  # and a third process, whose device the plan leaves idle
        plan = replace(plan, cluster=cluster_of(3), on=cluster_of(3).without_device(cluster_of(3).device_names[2]))
    return plan


def metrics(prediction: Any) -> dict[str, float]:
    guesses, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((guesses == labels)[counted].mean()), "items": int(counted.sum())}


def total_of_squares(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of the script's own, which is no mean over rows."""
    found = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return found + outputs.logits.pow(2).sum() / (1 + labels.ne(-100).sum())


def trained(
    folder: str,
    plan: tuple[str, Shares] | None = None,
    resume: str | None = None,
    more: dict[str, Any] | None = None,
    own_loss: bool = False,
) -> tuple[list[dict[str, float]], str]:
    """Ten steps; what was logged, and where the model is saved. Without a plan, the plain Trainer on one device."""
    import transformers

    from lopsided.integrations.trainer import Trainer

    more = more or {}
    args = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=BATCH if plan is None else BATCH // 3,
        per_device_eval_batch_size=BATCH if plan is None else BATCH // 3,
        gradient_accumulation_steps=2,
        max_steps=10,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=4,
        save_steps=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **more,
    )
    parts: dict[str, Any] = {
        "model": language_model(),
        "args": args,
        "train_dataset": samples(64),  # five batches of 12, and one of 4
        "eval_dataset": samples(31),
        "compute_metrics": metrics,
        "compute_loss_func": total_of_squares if own_loss else None,
    }
    if plan is None:
        trainer = transformers.Trainer(**parts)
    else:
        inside = not own_loss and "label_smoothing_factor" not in more
        trainer = Trainer(plan=plan_for(*plan, inside), **parts)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/final")
    told = [{key: entry[key] for key in ("step", *COMPARED) if key in entry} for entry in trainer.state.log_history]
    return told, f"{folder}/final"


def weights(folder: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


Alone = Callable[..., tuple[list[dict[str, float]], Path]]


@pytest.fixture(scope="module")
def alone(pools: Callable[[int], WorkerPool], tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """What the plain Trainer logs on one device, and its folder: trained once for each way."""
    known: dict[str, tuple[list[dict[str, float]], Path]] = {}

    def of(more: dict[str, Any] | None = None, own_loss: bool = False) -> tuple[list[dict[str, float]], Path]:
        key = repr((more, own_loss))
        if key not in known:
            folder = tmp_path_factory.mktemp("one")
            ((told, _),) = pools(1).run(trained, str(folder), None, None, more, own_loss)
            known[key] = told, folder
        return known[key]

    return of


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("how", "shares"),
    [("dp", SHARES), ("zero", NONE_FOR_ONE), ("zero", TWO)],
    ids=["dp", "zero-and-one-has-no-rows", "zero-and-one-is-idle"],
)
def test_ten_steps_are_those_of_one_device(
    alone: Alone, three: WorkerPool, tmp_path: Path, how: str, shares: Shares
) -> None:
    expected, folder = alone()
    at_one = folder / "final"
    results = three.run(trained, str(tmp_path / "three"), (how, shares))
    for found, _ in results:
        assert gap(found, expected) < 1e-5
    assert len([entry for entry in expected if "loss" in entry]) == 10
    ours, theirs = weights(results[0][1]), weights(str(at_one))
    assert ours.keys() == theirs.keys()
    assert farthest(theirs, ours) < 1e-4
    assert sorted(path.name for path in Path(results[0][1]).iterdir()) == sorted(path.name for path in at_one.iterdir())
    if how == "dp":
        return
    # From the checkpoint in the middle of an epoch, in new models: the rest of the losses.
    resumed = three.run(trained, str(tmp_path / "again"), (how, shares), str(tmp_path / "three" / "checkpoint-4"))
    for found, _ in resumed:
        assert gap([e for e in found if "train_loss" not in e], [e for e in expected if "train_loss" not in e]) < 1e-5


@pytest.mark.parametrize("more", [{"label_smoothing_factor": 0.1}, {}], ids=["label-smoothing", "compute_loss_func"])
def test_a_loss_outside_of_the_model(alone: Alone, three: WorkerPool, tmp_path: Path, more: dict[str, Any]) -> None:
    own = not more
    expected, _ = alone(more, own)
    for shares in (SHARES, NONE_FOR_ONE):
        for found, _ in three.run(trained, str(tmp_path / "three"), ("zero", shares), None, more, own):
            assert gap(found, expected) < 1e-5


def test_the_best_model_is_loaded_at_the_end(alone: Alone, three: WorkerPool, tmp_path: Path) -> None:
    more = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "greater_is_better": False}
    expected, folder = alone(more)
    results = three.run(trained, str(tmp_path / "three"), ("zero", SHARES), None, more)
    assert all(gap(found, expected) < 1e-5 for found, _ in results)
    ours, theirs = weights(results[0][1]), weights(str(folder / "final"))
    assert farthest(theirs, ours) < 1e-4
    best = weights(str(tmp_path / "three" / "checkpoint-4"))  # the lowest accuracy is the first
    assert all(torch.equal(ours[key], best[key]) for key in ours)


def refused(folder: str, checkpoint: str | None, shares: Shares, own_loss: bool) -> str:
    try:
        trained(folder, ("dp", shares), checkpoint, None, own_loss)
    except LopsidedError as error:
        return str(error)
    return ""


def test_the_state_of_a_plain_trainer_is_refused(alone: Alone, three: WorkerPool, tmp_path: Path) -> None:
    checkpoint = str(alone()[1] / "checkpoint-4")
    told = three.run(refused, str(tmp_path / "three"), checkpoint, SHARES, False)
    assert all("on one device, or under DDP" in text for text in told)


def test_an_idle_process_has_no_loss_outside_of_the_model(three: WorkerPool, tmp_path: Path) -> None:
    told = three.run(refused, str(tmp_path), None, TWO, True)
    assert all("could not compute a loss outside of the model" in text for text in told)


def test_samples_are_grouped_by_length_for_the_global_batch(tmp_path: Path) -> None:
    import transformers

    from lopsided.integrations.trainer import Trainer

    trainer = object.__new__(Trainer)
    how: dict[str, Any] = {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 2}
    trainer.args = transformers.TrainingArguments(str(tmp_path), per_device_train_batch_size=4, use_cpu=True, **how)
    trainer.train_dataset, trainer.processing_class = samples(24), None
    with trainer._batch_size_in_args(BATCH):
        assert trainer._get_train_sampler().batch_size == 2 * BATCH
    assert trainer.args.per_device_train_batch_size == 4
