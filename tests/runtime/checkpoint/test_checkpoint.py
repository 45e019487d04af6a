"""A run goes on from its checkpoint on any cluster; a save that fails leaves the one before."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import CheckpointError
from lopsided.ir.placement import S, Shares
from lopsided.models.by_name import load as load_model
from lopsided.models.zoo import SMALL
from lopsided.runtime.checkpoint import folder as checkpoint_folder
from lopsided.runtime.checkpoint import storage
from lopsided.runtime.checkpoint.checkpoint import convert, load, save
from lopsided.runtime.checkpoint.folder import as_plain, from_plain
from lopsided.runtime.checkpoint.state import Kept, full_state_dict, spread
from lopsided.runtime.control_plane import accord_of
from lopsided.runtime.parameters.pieces import Piece
from tests.support.held_pieces import (
    FOUR,
    THREE,
    TWO,
    ByHand,
    gradient,
    make_optimizer,
    train,
    trained_whole,
    whole_model,
)
from tests.support.jobs import Run, at_random, classic, model_of, parallel_of

Pools = Callable[[int], WorkerPool]


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    # One whose state has a counter in it.
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[100, 100], gamma=0.5)


class Loader:
    """Where a loader is, as its sharded one tells."""

    def __init__(self) -> None:
        self.position = {"epoch": 0, "batches": 0}

    def state_dict(self) -> dict[str, int]:
        return dict(self.position)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = dict(state)


def trained(shares: Any, ranks: Any, folder: str, steps: int, wait: bool = True) -> dict[str, Tensor]:
    """Go on from the folder if there is something in it, train, save; the whole state at the end."""
    pm = ByHand(shares, ranks=ranks, seed=1 if not Path(folder).exists() else 77)
    optimizer = make_optimizer(pm)
    scheduler, loader = scheduler_of(optimizer), Loader()
    if Path(folder).exists():
        done = load(pm, optimizer, folder, scheduler=scheduler, loader=loader)
        assert done == pm.steps_done == loader.position["batches"] == scheduler.last_epoch
    for _ in range(steps):
        train(pm, optimizer, 1)
        scheduler.step()
        loader.position["batches"] += 1
    assert scheduler.milestones[100] == 2
    saving = save(pm, optimizer, folder, scheduler=scheduler, loader=loader, wait=wait)
    saving.wait()
    assert saving.path.is_dir()
    assert pm.looked == 1
    return full_state_dict(pm)


@pytest.mark.parametrize("wait", [True, False])
def test_four_to_two_to_three(worker_pools: Pools, tmp_path: Path, wait: bool) -> None:
    folder = str(tmp_path / "run")
    worker_pools(4).run(trained, FOUR, None, folder, 3, wait)
    worker_pools(2).run(trained, TWO, None, folder, 2, wait)
    # The same two devices again, with a bystander that has rank 0.
    worker_pools(3).run(trained, TWO, (1, 2), folder, 2, wait)
    found = worker_pools(3).run(trained, THREE, None, folder, 2, wait)
    wanted = trained_whole(9)
    for state in found:
        assert list(state) == list(wanted)
        for key, value in wanted.items():
            torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)
    assert checkpoint_folder.steps_in(tmp_path / "run") == [3, 5, 7, 9]


def test_what_is_written(worker_pools: Pools, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    worker_pools(4).run(trained, FOUR, None, str(folder), 1)
    path = folder / "step-00000001"
    assert {each.name for each in folder.iterdir()} == {path.name}
    ranks = [f"rank-0000{rank}.safetensors" for rank in range(4)]
    assert {each.name for each in path.iterdir()} == {*ranks, "metadata.json", "training.json"}
    training = json.loads((path / "training.json").read_text())
    assert training["graph"] == "0123456789abcdef"
    assert training["tied"] == {"head.weight": "embed.weight"}
    assert training["optimizer"]["class"] == "AdamW"
    assert [group["options"]["weight_decay"] for group in training["optimizer"]["groups"]] == [0.1, 0.0]
    table = checkpoint_folder.read_table(path)
    assert table["optimizer.qkv.weight.exp_avg"].shape == (768, 2)
    assert len(table["model.qkv.weight"].chunks) == 3 * 3
    assert "optimizer.frozen.exp_avg" not in table
    # Every element once, whoever has it.
    assert sum(record.bytes for name, record in table.items() if name.startswith("model.")) == sum(
        value.nbytes for key, value in whole_model().state_dict().items() if key != "head.weight"
    )


def test_what_all_have_is_spread_by_size() -> None:
    whole = {f"w{k}": Kept((100,), torch.float32, torch.zeros(100), None) for k in range(6)}
    written = []
    for rank in range(2):
        piece = Piece("c", (), (8, 100), torch.float32, S(0), counts=(6, 2), rank=rank)
        kept = {"c": Kept((8, 100), torch.float32, torch.zeros(piece.local_shape), piece), **whole}
        written.append({key for key, held in spread(kept, rank, 2).items() if held.chunks})
    # 600 elements are cut to the first and 200 to the second: of 600 that both have, it writes one part in six.
    assert written[0] & written[1] == {"c"}
    assert [len(each) for each in written] == [1 + 1, 1 + 5]


# Asynchronously


def saved_aside(folder: str) -> list[bool]:
    pm = ByHand(TWO)
    optimizer = make_optimizer(pm)
    train(pm, optimizer, 1)
    before = full_state_dict(pm)
    # Held back on one rank until the parameters have changed; the other one then waits for it in a collective.
    changed, original = threading.Event(), storage.write_tensors

    def held_back(*args: Any) -> str:
        if dist.get_rank() == 1:
            changed.wait(60)
        return original(*args)

    storage.write_tensors = held_back  # type: ignore[assignment]
    try:
        saving = save(pm, optimizer, folder, wait=False)
        under_way = not saving.done and not saving.path.exists()
        talked = accord_of(pm).all(dist.get_rank) == [0, 1]  # without getting in its way
        train(pm, optimizer, 1)
        changed.set()
        second = save(pm, optimizer, folder, wait=False)  # waits for the first
        first_was_done = saving.done and saving.path.is_dir()
        second.wait()
    finally:
        storage.write_tensors = original
    fresh = ByHand(TWO, seed=3)
    load(fresh, make_optimizer(fresh), folder, step=1)
    old = full_state_dict(fresh)
    load(fresh, None, folder)
    new = full_state_dict(fresh)
    return [
        under_way,
        first_was_done,
        all(torch.equal(old[key], before[key]) for key in before),
        all(torch.equal(new[key], value) for key, value in full_state_dict(pm).items()),
        talked,
    ]


def test_training_goes_on_beside_a_save(worker_pools: Pools, tmp_path: Path) -> None:
    assert worker_pools(2).run(saved_aside, str(tmp_path / "run")) == [[True] * 5] * 2


# Crashes


def crashed(folder: str, where: str, wait: bool) -> tuple[str, int]:
    """Save, train, fail to save; what is said, and from where a fresh module goes on."""
    pm = ByHand(TWO)
    optimizer = make_optimizer(pm)
    train(pm, optimizer, 1)
    save(pm, optimizer, folder)
    good = full_state_dict(pm)
    train(pm, optimizer, 1)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    place: Any = {"rename": os, "finish": storage.SafeWriter, "write_tensors": storage}[where]
    original = getattr(place, where)
    if where != "write_tensors" or dist.get_rank() == 1:
        setattr(place, where, fail)
    said = ""
    try:
        saving = save(pm, optimizer, folder, wait=wait)
        if wait:
            raise AssertionError("it did not fail")
        try:
            save(pm, optimizer, folder)  # is told of the one before
        except CheckpointError as error:
            said = str(error)
        with pytest.raises(CheckpointError):
            saving.wait()
    except CheckpointError as error:
        said = str(error)
    finally:
        setattr(place, where, original)
    fresh = ByHand(TWO, seed=4)
    step = load(fresh, make_optimizer(fresh), folder)
    assert all(torch.equal(value, good[key]) for key, value in full_state_dict(fresh).items())
    save(pm, optimizer, folder)
    return said, step


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("where", ["rename", "finish", "write_tensors"])
def test_a_save_that_fails_leaves_the_last_good_one(
    worker_pools: Pools, tmp_path: Path, where: str, wait: bool
) -> None:
    folder = tmp_path / "run"
    for said, step in worker_pools(2).run(crashed, str(folder), where, wait):
        assert "No space left on device" in said
        assert f"rank {1 if where == 'write_tensors' else 0} failed" in said
        assert step == 1
    assert {each.name for each in folder.iterdir()} == {"step-00000001", "step-00000002"}


def saved_often(folder: str, keep: int | None) -> None:
    pm = ByHand(TWO)
    optimizer = make_optimizer(pm)
    for _ in range(4):
        train(pm, optimizer, 1)
        save(pm, optimizer, folder, keep=keep)


def test_older_ones_go(worker_pools: Pools, tmp_path: Path) -> None:
    left = tmp_path / ".step-00000009.partial"
    left.mkdir()
    (tmp_path / "step-00000070").mkdir()  # of a run that went further
    (tmp_path / "notes.txt").write_text("not ours")
    worker_pools(2).run(saved_often, str(tmp_path), 2)
    assert {each.name for each in tmp_path.iterdir()} == {
        *("step-00000003", "step-00000004"),
        *("step-00000070", "notes.txt"),
    }


def test_a_checkpoint_that_was_set_aside_is_found(worker_pools: Pools, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    worker_pools(2).run(trained, TWO, None, str(folder), 1)
    # The same step again replaces it.
    worker_pools(2).run(trained, TWO, None, str(folder), 0)
    assert {each.name for each in folder.iterdir()} == {"step-00000001"}
    # As if the process had ended in the midst of that.
    os.rename(folder / "step-00000001", folder / ".step-00000001.replaced")
    worker_pools(2).run(trained, TWO, None, str(folder), 1)
    assert checkpoint_folder.steps_in(folder) == [1, 2]


# Safety


def without_pickle(folder: str) -> int:
    pm = ByHand(THREE, seed=6)
    optimizer = make_optimizer(pm)

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a file was unpickled")

    # Messages between ranks are pickled by a name that torch took before; files would be read by these.
    places: list[tuple[Any, str]] = [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")]
    originals = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, forbidden)
    try:
        return load(pm, optimizer, folder)
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)


def test_nothing_is_unpickled(worker_pools: Pools, tmp_path: Path) -> None:
    worker_pools(4).run(trained, FOUR, None, str(tmp_path / "run"), 1)
    assert worker_pools(3).run(without_pickle, str(tmp_path / "run")) == [1] * 3


def told_by(folder: str, change: str) -> tuple[str, bool]:
    """What loading says, and whether the module is as it was."""
    pm = ByHand(TWO, seed=8)
    optimizer: torch.optim.Optimizer = make_optimizer(pm)
    scheduler: Any = scheduler_of(optimizer)
    options: dict[str, Any] = {}
    if change == "class":
        optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    if change == "lacks":
        optimizer = torch.optim.AdamW([p for n, p in pm.named_parameters() if "out" not in n and p.requires_grad])
    if change == "groups":
        optimizer = torch.optim.AdamW([p for p in pm.parameters() if p.requires_grad])
    if change == "stranger":
        optimizer = torch.optim.AdamW([*pm.parameters(), torch.nn.Parameter(torch.zeros(2, 9))])
    if change == "scheduler":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    if change in ("scheduler", "state of the scheduler"):
        options["scheduler"] = scheduler
    if change == "step":
        options["step"] = 5
    if change == "model" and dist.get_rank() == 1:
        pm.register_buffer("more", torch.zeros(1))
    if change == "folder":
        folder = os.path.join(folder, "elsewhere")
    before = {key: value.clone() for key, value in pm.state_dict().items()}
    said = ""
    try:
        load(pm, optimizer, folder, **options)
    except CheckpointError as error:
        said = str(error)
    unchanged = all(torch.equal(value, before[key]) for key, value in pm.state_dict().items())
    return said, unchanged and not optimizer.state


@pytest.fixture(scope="module")
def saved(worker_pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    worker_pools(4).run(trained, FOUR, None, str(folder), 1)
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("class", "the checkpoint is of 'AdamW', and the optimizer is SGD"),
        ("lacks", "the optimizer lacks 'out.weight'"),
        ("groups", "the group of"),
        ("stranger", "shape [2, 9]"),
        ("scheduler", "the scheduler is StepLR"),
        ("step", "no checkpoint of step 5"),
        ("model", "missing more"),
        ("folder", "no checkpoint in this folder"),
    ],
)
def test_what_does_not_fit_changes_nothing(worker_pools: Pools, saved: Path, change: str, said: str) -> None:
    for told, unchanged in worker_pools(2).run(told_by, str(saved), change):
        assert said in told
        assert unchanged


def _training(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        training = json.loads((path / "training.json").read_text())
        for key, value in changes.items():
            *inner, last = key.split("__")
            into = training
            for each in inner:
                into = into[each]
            into[last] = value
        (path / "training.json").write_text(json.dumps(training))

    return change


def _truncated(path: Path) -> None:
    file = path / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def _renamed(path: Path) -> None:
    """A table whose shapes are right and whose file holds another tensor there."""
    table = json.loads((path / "metadata.json").read_text())
    tensors = table["tensors"]
    tensors["model.norm.weight"], tensors["model.frozen"] = tensors["model.frozen"], tensors["model.norm.weight"]
    tensors["model.norm.weight"]["shape"] = tensors["model.norm.weight"]["chunks"][0]["sizes"] = [5]
    tensors["model.frozen"]["shape"] = tensors["model.frozen"]["chunks"][0]["sizes"] = [3]
    (path / "metadata.json").write_text(json.dumps(table))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (_truncated, ""),
        (_renamed, ""),
        (lambda path: (path / "metadata.json").unlink(), ""),
        (lambda path: (path / "training.json").write_text("{}"), ""),
        (_training(step="1"), ""),
        (_training(step=2), ""),
        (_training(names=[["x"]]), ""),
        (_training(tied={"x": 3}), ""),
        (_training(optimizer=[]), ""),
        (_training(optimizer__groups=[3]), ""),
        (_training(optimizer__groups=[{"parameters": [], "options": {"lr": 1.0}}]), ""),
        (_training(optimizer__state={"out.weight": {"exp_avg": 7}}), ""),
        (_training(optimizer__state={"out.weight": {"other": {"shape": [1], "dtype": "F32"}}}), ""),
        (_training(optimizer__state={"out.weight": {"step": {"number": "x", "shape": [], "dtype": "F32"}}}), ""),
        (_training(optimizer__state={"out.weight": {"step": {"number": 1, "shape": [2**40], "dtype": "F32"}}}), ""),
        (_training(scheduler__state={"step": "print()"}), "state of the scheduler"),
        (_training(scheduler__state={"~": "code", "of": []}), "state of the scheduler"),
        (_training(scheduler__state={"gamma": {"~": "float", "of": "1"}}), "state of the scheduler"),
    ],
    ids=range(18),
)
def test_a_changed_checkpoint_is_refused(
    worker_pools: Pools, saved: Path, tmp_path: Path, change: Callable[[Path], None], kind: str
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    change(tmp_path / "run" / "step-00000001")
    for told, unchanged in worker_pools(2).run(told_by, str(tmp_path / "run"), kind):
        assert told
        assert unchanged


# Optimizers


class Rows(torch.optim.Optimizer):
    """Keeps a number for every row, as factored ones do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["rows"] = p.grad.flatten(1).sum(1) if p.dim() > 1 else p.grad.sum(0, keepdim=True)


def by_rows(folder: str, which: str) -> str:
    pm = ByHand(TWO)
    optimizer = Rows([p for name, p in pm.named_parameters() if name.startswith(which)])
    train(pm, optimizer, 2)
    try:
        save(pm, optimizer, folder)
    except CheckpointError as error:
        return str(error)
    fresh = ByHand(TWO)
    again = Rows([p for name, p in fresh.named_parameters() if name.startswith(which)])
    load(fresh, again, folder)
    (state,) = again.state.values()
    total = gradient("norm.weight", (5,), 1).sum(0, keepdim=True)
    return f"{state['count']} {torch.equal(state['rows'], total)}"


def test_state_of_another_shape(worker_pools: Pools, tmp_path: Path) -> None:
    assert worker_pools(2).run(by_rows, str(tmp_path / "whole"), "norm") == ["2 True"] * 2
    for said in worker_pools(2).run(by_rows, str(tmp_path / "cut"), "out"):
        assert "Rows keeps 'rows' of out.weight" in said
    assert not (tmp_path / "cut").exists()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.lr_scheduler.ReduceLROnPlateau(p),
        lambda p: torch.optim.lr_scheduler.OneCycleLR(p, 0.1, total_steps=9),
        lambda p: torch.optim.lr_scheduler.LambdaLR(p, lambda step: 1 / (step + 1)),
        lambda p: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(p, 3),
        lambda p: torch.optim.lr_scheduler.SequentialLR(
            p, [torch.optim.lr_scheduler.LinearLR(p), torch.optim.lr_scheduler.StepLR(p, 2)], [1]
        ),
    ],
    ids=range(5),
)
def test_schedulers_are_plain_data(make: Callable[[Any], Any]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    state = make(optimizer).state_dict()
    text = json.dumps(as_plain(state, "here"), allow_nan=False)
    assert from_plain(json.loads(text)) == state


def test_what_is_no_plain_data() -> None:
    with pytest.raises(CheckpointError, match="a Loader cannot be saved"):
        as_plain({"a": [Loader()]}, "here")


# Random numbers


def drawn(folder: str, shares: Any, fresh: bool) -> list[float]:
    """What is drawn next, of the run's streams and of torch's own generator: after saving, or after loading."""
    pm = ByHand(shares)
    if fresh:
        torch.manual_seed(99)
        load(pm, None, folder)
    else:
        for own in (True, False):
            with pm.randomness.streams():
                pm.randomness.draw_from(own=own)
                torch.rand(3 + dist.get_rank() * own)
        save(pm, None, folder)
    found: list[float] = []
    for own in (True, False):
        with pm.randomness.streams():
            pm.randomness.draw_from(own=own)
            found.append(torch.rand(1).item())
    return [*found, torch.rand(1).item()]


def test_random_numbers_go_on(worker_pools: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    before = worker_pools(2).run(drawn, folder, TWO, False)
    assert worker_pools(2).run(drawn, folder, TWO, True) == before
    other = worker_pools(3).run(drawn, folder, THREE, True)
    # On another cluster: what all share goes on, the rest is each one's own.
    assert {shared for _, shared, _ in other} == {before[0][1]}
    assert len({own for own, _, _ in other} - {own for own, _, _ in before}) == 3


# Disagreement


def disagreeing(folder: str) -> str:
    pm = ByHand(TWO)
    pm.steps_done = 3 + dist.get_rank()
    with pytest.raises(CheckpointError) as told:
        save(pm, None, folder)
    return str(told.value)


def test_ranks_at_different_steps(worker_pools: Pools, tmp_path: Path) -> None:
    for said in worker_pools(2).run(disagreeing, str(tmp_path)):
        assert "rank 1 saves step 4" in said
    assert not any(tmp_path.iterdir())


def unhealthy(folder: str) -> str:
    pm = ByHand(TWO)

    def before_saving() -> None:
        raise CheckpointError("the last loss is not a number")

    pm.before_saving = before_saving  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="not a number"):
        save(pm, None, folder)
    return ",".join(os.listdir(folder))


def test_nothing_is_saved_of_a_run_that_went_wrong(worker_pools: Pools, tmp_path: Path) -> None:
    assert worker_pools(2).run(unhealthy, str(tmp_path)) == ["", ""]


# One file


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "model.bin"])
def test_one_plain_file(saved: Path, tmp_path: Path, name: str) -> None:
    for folder in (saved, saved / "step-00000001"):
        to = convert(folder, tmp_path / name)
        found = load_file(to) if to.suffix == ".safetensors" else torch.load(to, weights_only=True)
        wanted = trained_whole(1)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
        whole_model().load_state_dict(found)
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_no_kind_of_file(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.txt"):
        convert(saved, tmp_path / "model.txt")
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(saved, tmp_path / "nowhere" / "model.pt")
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(saved, tmp_path / "nowhere" / "model.safetensors")


def test_a_strangers_names(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    _training(names=["out.weight", "not there"])(tmp_path / "run" / "step-00000001")
    with pytest.raises(CheckpointError, match="no 'not there'"):
        convert(tmp_path / "run", tmp_path / "model.safetensors")


# The real thing


def go_on(run: Run, folder: str, steps: int) -> list[float]:
    """Train a planned module from where the folder is; the losses."""
    pm = parallel_of(run)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    if os.path.isdir(folder):
        load(pm, optimizer, folder)
    _, batch = model_of(run.spec)
    losses = []
    for _ in range(steps):
        loss = pm(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    save(pm, optimizer, folder, wait=False).wait()
    return losses


@pytest.mark.parametrize("name", ["llama", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_the_loss_curve_continues_on_another_cluster(worker_pools: Pools, tmp_path: Path, name: str) -> None:
    spec, folder = SMALL[name], str(tmp_path / "run")
    four = Shares((0.4, 0.0, 0.35, 0.25), named=(("state", (0.1, 0.5, 0.4, 0.0)),))
    found = worker_pools(4).run(go_on, classic(spec, "zero", four), folder, 3)[0]
    found += worker_pools(2).run(go_on, at_random(spec, Shares((0.7, 0.3)), 1), folder, 3)[0]
    found += worker_pools(3).run(go_on, classic(spec, "searched", Shares((0.5, 0.2, 0.3))), folder, 3)[0]
    torch.manual_seed(0)
    model, batch = load_model(spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    alone = []
    for _ in range(9):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        alone.append(loss.item())
    assert alone[-1] < alone[0]
    assert found == pytest.approx(alone, rel=1e-4)
    # And as one file, it is the model's own.
    trained_alone = model.state_dict()
    for key, value in load_file(convert(folder, tmp_path / "model.safetensors")).items():
        torch.testing.assert_close(value, trained_alone.pop(key), rtol=1e-2, atol=1e-3)
    assert not trained_alone
