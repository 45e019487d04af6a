"""The whole state out of pieces, and pieces out of a whole state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import CheckpointError
from lopsided.runtime.checkpoint.state import full_state_dict, load_full_state_dict
from lopsided.runtime.checkpoint.tensor_file import TensorFile
from tests.support.held_pieces import FOUR, THREE, TWO, ByHand, whole_model

Pools = Callable[[int], WorkerPool]


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return list(found) == list(wanted) and all(torch.equal(found[key], wanted[key]) for key in wanted)


def joined(shares: tuple[float, ...], ranks: tuple[int, ...] | None, everywhere: bool) -> str:
    pm = ByHand(shares, ranks=ranks)
    found = full_state_dict(pm, everywhere=everywhere)
    if not found:
        return "nothing"
    if found["embed.weight"] is not found["head.weight"]:
        return "tied names differ"
    for local in pm.state_dict().values():
        local.zero_()
    return "same" if same(found, whole_model().state_dict()) else "different"


@pytest.mark.parametrize(
    ("size", "shares", "ranks"), [(4, FOUR, None), (3, THREE, None), (3, TWO, (1, 2)), (4, TWO, (0, 2))]
)
def test_it_is_the_models_own(worker_pools: Pools, size: int, shares: Any, ranks: Any) -> None:
    assert worker_pools(size).run(joined, shares, ranks, True) == ["same"] * size


@pytest.mark.parametrize("ranks", [(0, 1), (1, 2)])
def test_only_rank_0_keeps_it(worker_pools: Pools, ranks: tuple[int, ...]) -> None:
    assert worker_pools(3).run(joined, TWO, ranks, False) == ["same", "nothing", "nothing"]


def loaded(shares: tuple[float, ...], ranks: Any, path: str | None, only_rank_0: bool) -> bool:
    pm = ByHand(shares, ranks=ranks, seed=5)
    held = dict(pm.named_parameters())
    source = None if only_rank_0 and dist.get_rank() else path or whole_model(seed=9).state_dict()
    load_full_state_dict(pm, source)
    in_place = all(parameter is held[name] for name, parameter in pm.named_parameters())
    return in_place and same(full_state_dict(pm), whole_model(seed=9).state_dict())


@pytest.mark.parametrize("only_rank_0", [False, True])
@pytest.mark.parametrize("kind", ["mapping", "file"])
@pytest.mark.parametrize("ranks", [(0, 1, 2), (0, 2, 3)])
def test_loading_a_whole_state(worker_pools: Pools, tmp_path: Path, kind: str, only_rank_0: bool, ranks: Any) -> None:
    path = None
    if kind == "file":
        # As is usual in such files, the tied name is left out.
        path = str(tmp_path / "model.safetensors")
        save_file({k: v for k, v in whole_model(seed=9).state_dict().items() if k != "head.weight"}, path)
    assert worker_pools(4).run(loaded, THREE, ranks, path, only_rank_0) == [True] * 4


def elements_read(path: str) -> tuple[int, int]:
    """How many elements a rank reads of a file, and how many it holds."""
    pm, read = ByHand(FOUR), []
    original = TensorFile.read

    def counting(self: TensorFile, key: str, offsets: Any, sizes: Any) -> Tensor:
        found = original(self, key, offsets, sizes)
        read.append(found.numel())
        return found

    TensorFile.read = counting  # type: ignore[method-assign]
    try:
        load_full_state_dict(pm, path)
    finally:
        TensorFile.read = original  # type: ignore[method-assign]
    held = {id(value): value.numel() for value in (*pm.parameters(), pm.get_buffer("seen"))}
    return sum(read), sum(held.values())


def test_a_rank_reads_only_its_slices(worker_pools: Pools, tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")
    save_file({k: v for k, v in whole_model().state_dict().items() if k != "head.weight"}, path)
    found = worker_pools(4).run(elements_read, path)
    assert [read for read, _ in found] == [held for _, held in found]
    assert found[2][0] < found[0][0]  # the one with a share of 0


def refused(change: str, strict: bool) -> tuple[str, bool]:
    """What is said on this rank, and whether its pieces are as they were."""
    pm = ByHand(TWO)
    before = {key: value.clone() for key, value in pm.state_dict().items()}
    source = whole_model(seed=9).state_dict()
    if change == "missing" and dist.get_rank() == 1:
        del source["out.weight"]
    if change == "unexpected":
        source["other.weight"] = torch.zeros(1)
    if change == "shape":
        source["qkv.weight"] = torch.zeros(3, 2)
    try:
        load_full_state_dict(pm, source, strict=strict)
    except CheckpointError as error:
        return str(error), same(pm.state_dict(), before)
    return "", same(full_state_dict(pm), whole_model(seed=9).state_dict())


@pytest.mark.parametrize(
    ("change", "named"),
    [("missing", "out.weight"), ("unexpected", "other.weight"), ("shape", "qkv.weight is [3, 2], not [768, 2]")],
)
def test_a_state_of_another_model_changes_nothing(worker_pools: Pools, change: str, named: str) -> None:
    for said, unchanged in worker_pools(2).run(refused, change, True):
        assert named in said
        assert unchanged


def test_names_can_be_skipped_but_not_shapes(worker_pools: Pools) -> None:
    assert worker_pools(2).run(refused, "unexpected", False) == [("", True)] * 2
    assert all("qkv.weight" in said and unchanged for said, unchanged in worker_pools(2).run(refused, "shape", False))


def from_nowhere(path: str | None) -> str:
    with pytest.raises(CheckpointError) as told:
        load_full_state_dict(ByHand(TWO), path)
    return str(told.value)


@pytest.mark.parametrize(
    ("path", "said"), [(None, "rank 0 has no state"), ("x.pt", "not a .safetensors"), ("y.safetensors", "no such file")]
)
def test_no_source(worker_pools: Pools, path: str | None, said: str) -> None:
    assert all(said in told for told in worker_pools(2).run(from_nowhere, path))
