"""Models on meta get the same first values under every plan, and never whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lopsided.errors import ModelError
from lopsided.ir.placement import I, Placement, S
from lopsided.runtime.parameters.initial import initialise
from lopsided.runtime.parameters.pieces import Piece

CPU = torch.device("cpu")
COUNTS = (3, 1, 0)


def pieces_of(model: nn.Module, rank: int, at: Placement = I) -> dict[str, Piece]:
    """Every parameter cut along its first dim in the proportion of `COUNTS`, or whole."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        cuts = at.is_shard and shape and shape[0] % 4 == 0
        counts = tuple(count * shape[0] // 4 for count in COUNTS) if cuts else ()
        also = tuple(names[id(parameter)][1:])
        found[name] = Piece(name, also, shape, parameter.dtype, at if cuts else I, counts, rank)
    return found


def on_meta(build: Any, *args: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = build(*args)
    return model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.batch_norm = nn.BatchNorm1d(8)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 20)
        self.head.weight = self.words.weight


def joined(model: nn.Module, at: Placement, **options: Any) -> dict[str, Tensor]:
    """What three processes hold, put together."""
    parts = [initialise(model, pieces_of(model, rank, at), CPU, **options) for rank in range(3)]
    pieces = pieces_of(model, 0, at)
    return {
        name: pieces[name].join([part[name] for part in parts]) if name in pieces else parts[0][name]
        for name in parts[0]
    }


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_every_plan_sees_the_same_values_and_the_model_stays_on_meta() -> None:
    model = on_meta(Small)
    before = dict(model.named_parameters())
    whole = joined(model, I, seed=3)
    assert whole.keys() == dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys()
    assert same(joined(model, S(0), seed=3), whole)
    assert not same(joined(model, I, seed=4), whole)
    assert all(parameter is before[name] and parameter.is_meta for name, parameter in model.named_parameters())
    assert all(buffer.is_meta for buffer in model.buffers())


def test_values_are_those_a_constructor_gives() -> None:
    found = joined(on_meta(Small), S(0), seed=3)
    assert found["blocks.0.norm.weight"].eq(1).all()
    assert found["blocks.0.batch_norm.num_batches_tracked"] == 0
    assert found["blocks.0.batch_norm.running_var"].eq(1).all()
    # What the attention around it sets, its own constructor would have drawn.
    assert found["blocks.1.attention.out_proj.bias"].eq(0).all()
    assert 0.7 < found["words.weight"].std() < 1.3
    assert not torch.equal(found["blocks.0.up.weight"], found["blocks.1.up.weight"])
    assert found["blocks.0.up.weight"].abs().max() <= 1 / math.sqrt(8)


def test_a_tied_parameter_is_initialised_once_by_its_first_module() -> None:
    model = on_meta(Small)
    tied = initialise(model, pieces_of(model, 0), CPU, seed=3)
    assert "head.weight" not in tied
    alone = on_meta(Small)
    alone.head.weight = nn.Parameter(torch.empty(20, 8, device="meta"))
    untied = initialise(alone, pieces_of(alone, 0), CPU, seed=3)
    assert torch.equal(tied["words.weight"], untied["words.weight"])
    assert torch.equal(tied["head.bias"], untied["head.bias"])


def test_initialising_leaves_the_generator_alone() -> None:
    model = on_meta(Small)
    before = torch.random.get_rng_state()
    initialise(model, pieces_of(model, 0), CPU, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_bystander_holds_nothing() -> None:
    model = on_meta(nn.Linear, 4, 4)
    found = initialise(model, pieces_of(model, -1, S(0)), CPU, seed=3)
    assert [tensor.shape for tensor in found.values()] == [(0,), (0,)]


def test_init_is_called_as_apply_would() -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 2.0)
        if isinstance(module, Block):
            nn.init.constant_(module.down.weight, 5.0)

    found = joined(on_meta(Small), S(0), seed=3, init=fill)
    assert found["blocks.0.up.weight"].eq(2).all()
    assert found["blocks.0.down.weight"].eq(5).all()
    assert found["blocks.0.norm.weight"].eq(1).all()


class Ruled(nn.Module):
    """With rules like nanoGPT's, which do not reach its norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 3.0)


def test_the_rules_of_the_nearest_model_count() -> None:
    found = joined(on_meta(lambda: nn.Sequential(Ruled(), nn.Linear(4, 4))), S(0), seed=3)
    assert found["0.first.weight"].eq(3).all()
    assert found["0.norm.weight"].eq(1).all()
    assert found["1.weight"].abs().max() < 1


class Bare(nn.Module):
    """Nothing says how its tensors begin."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4, 4).tril())
        self.register_buffer("places", torch.arange(4))
        self.register_buffer("flags", torch.ones(2, dtype=torch.bool))


def test_what_nobody_initialises_is_named() -> None:
    model = on_meta(lambda: nn.Sequential(Bare()))
    with pytest.raises(ModelError, match=r"4 tensors .*: 0\.scale, 0\.mask, 0\.places, 0\.flags") as refused:
        initialise(model, pieces_of(model, 0), CPU, seed=3)
    assert refused.value.where == "Bare"
    assert "init=" in refused.value.do
    assert all(parameter.is_meta for parameter in model.parameters())


def test_buffers_that_the_loss_does_not_need_may_be_left() -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, Bare):
            nn.init.ones_(module.scale)
            module.places = torch.arange(4)
            module.mask.copy_(torch.ones(4, 4).tril())

    model = on_meta(Bare)
    found = initialise(model, pieces_of(model, 0), CPU, seed=3, init=fill, needed=["mask", "places"])
    assert found["places"].tolist() == [0, 1, 2, 3]
    assert found["mask"].sum() == 10
    assert found["flags"].eq(False).all()
    with pytest.raises(ModelError, match=r"1 tensors .*: flags"):
        initialise(model, pieces_of(model, 0), CPU, seed=3, init=fill, needed=["mask", "places", "flags"])


def test_a_part_of_a_tensor_is_not_enough() -> None:
    model = on_meta(Bare)

    def fill(module: nn.Module) -> None:
        if isinstance(module, Bare):
            module.scale[:3] = 1.0
            module.mask.fill_(1)
            module.places[1:] = 0
            module.flags.fill_(True)

    with pytest.raises(ModelError, match=r"2 tensors .*: scale, places"):
        initialise(model, pieces_of(model, 0), CPU, seed=3, init=fill)


def test_an_init_that_fails_is_told_of_and_leaves_the_model_as_it_was() -> None:
    model = on_meta(Small)

    def read(module: nn.Module) -> None:
        if isinstance(module, Block):
            module.up.weight.sum().item()

    with pytest.raises(ModelError, match=r"init\(Block\) failed while blocks\.0\.norm was initialised"):
        initialise(model, pieces_of(model, 0), CPU, seed=3, init=read)
    assert all(parameter.is_meta for parameter in model.parameters())

    def replace(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            module.weight = nn.Parameter(torch.ones(3))

    with pytest.raises(ModelError, match=r"left weight without its values") as refused:
        initialise(model, pieces_of(model, 0), CPU, seed=3, init=replace)
    assert "[8]" in refused.value.do


def test_what_is_on_a_real_device_is_only_cut() -> None:
    model = nn.Sequential(nn.Linear(4, 8), on_meta(nn.Linear, 8, 4))
    model[1].bias = nn.Parameter(torch.full((4,), 9.0))
    found = joined(model, S(0), seed=3)
    assert torch.equal(found["0.weight"], model[0].weight)
    assert found["1.bias"].eq(9).all()
    assert found["1.weight"].abs().max() <= 1 / math.sqrt(8)
    part = initialise(model, pieces_of(model, 1, S(0)), CPU, seed=3)["0.weight"]
    assert part.untyped_storage().nbytes() == 2 * 4 * 4


class Live(TorchDispatchMode):
    """The most bytes that were alive at a time among what was made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.storages = {key: (ref, size) for key, (ref, size) in self.storages.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return made


def test_no_more_than_one_module_is_ever_whole() -> None:
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(12))))
    with Live() as live:
        found = initialise(model, pieces_of(model, 1, S(0)), CPU, seed=3)
    held = sum(tensor.untyped_storage().nbytes() for tensor in found.values())
    module = (256 * 256 + 256) * 4
    assert held == 12 * module // 4
    assert live.peak <= held + module + 6000  # the generator's state
    assert live.peak >= module


def test_models_of_transformers_begin_as_their_config_says() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    gpt = on_meta(
        GPT2LMHeadModel, GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=8, n_head=4, bos_token_id=0)
    )
    found = joined(gpt, S(0), seed=3)
    assert abs(found["transformer.wte.weight"].std() - 0.02) < 0.002
    # Its blocks scale what is added to the residual stream: 0.02 / √(2·8).
    assert abs(found["transformer.h.3.mlp.c_proj.weight"].std() - 0.005) < 0.0005
    assert found["transformer.ln_f.weight"].eq(1).all()

    llama = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    found = joined(on_meta(LlamaForCausalLM, llama), S(0), seed=3)
    expected = dict(LlamaForCausalLM(llama).named_buffers())
    assert torch.equal(found["model.rotary_emb.inv_freq"], expected["model.rotary_emb.inv_freq"])
    assert found["model.norm.weight"].eq(1).all()
