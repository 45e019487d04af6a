"""The zoo has the sizes it claims, trains in small, and refuses sizes that do not fit together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lopsided.errors import ModelError
from lopsided.models import by_name as models
from lopsided.models import zoo
from lopsided.models.zoo.bert import MixtureOfExperts
from lopsided.models.zoo.t5 import distance_buckets


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("vgg19", 139_611_210),
        ("vit", 85_150_474),
        ("bert", 136_205_824),
        ("bert-moe", 560_929_792),
        ("resnet50", 25_557_032),
        ("gpt2", 124_475_904),
        ("llama", 8_030_261_248),
        ("t5", 60_506_624),
    ],
)
def test_defaults_have_the_published_size(name: str, parameters: int) -> None:
    with torch.device("meta"):
        module, batch = zoo.build(name)
    assert sum(p.numel() for p in module.parameters()) == parameters
    assert all(value.is_meta for value in batch.values())


def test_a_70b_llama_needs_no_memory() -> None:
    with torch.device("meta"):
        module, _ = zoo.build("llama", layers=80, width=8192, heads=64, ffn=28672)
    assert sum(p.numel() for p in module.parameters()) == 70_553_706_496


def test_small_covers_the_zoo() -> None:
    assert list(zoo.SMALL) == list(zoo.ZOO)


@pytest.mark.parametrize("name", zoo.ZOO)
def test_small_trains(name: str) -> None:
    module, batch = models.load(zoo.SMALL[name])
    loss = module(**batch)
    assert loss.shape == ()
    loss.backward()
    for path, parameter in module.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path
        assert parameter.grad.any(), path


@pytest.mark.parametrize("name", zoo.ZOO)
def test_small_is_capturable(name: str) -> None:
    module, batch = models.load(zoo.SMALL[name])
    exported = torch.export.export(module.train(), (), batch, strict=False)
    assert len(exported.graph_signature.user_outputs) == 1


def test_batches_repeat_and_leave_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    _, first = zoo.build("mlp", width=8, layers=1, batch=4)
    torch.random.set_rng_state(before)
    _, second = zoo.build("mlp", width=8, layers=1, batch=4)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_batch_entries_share_no_memory() -> None:
    for spec in zoo.SMALL.values():
        _, batch = models.load(spec)
        pointers = [v.untyped_storage().data_ptr() for v in batch.values() if isinstance(v, torch.Tensor)]
        assert len(set(pointers)) == len(pointers), spec


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_some_targets_are_ignored_and_unevenly(name: str) -> None:
    _, batch = models.load(zoo.SMALL[name])
    labels = batch["labels"]
    assert isinstance(labels, torch.Tensor)
    counted = (labels != -100).sum(dim=1)
    assert counted.min() > 0
    assert counted.unique().numel() > 1


def test_gpt2_head_is_tied_unless_told() -> None:
    tied, _ = models.load("gpt2:layers=1,width=8,heads=2,seq=4,vocab=11")
    untied, _ = models.load("gpt2:layers=1,width=8,heads=2,seq=4,vocab=11,tied=false")
    count_tied, count_untied = (sum(p.numel() for p in m.parameters()) for m in (tied, untied))
    assert count_untied - count_tied == 8 * 11


def test_mixture_agrees_with_a_loop_over_tokens() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(width=6, ffn=10, experts=3, seq=9, dropout=0.0)
    x = torch.randn(2, 9, 6)
    expected = torch.zeros_like(x)
    for b in range(2):
        best, chosen = layer.gate(x[b]).softmax(-1).topk(2, dim=-1)
        used = [0, 0, 0]
        for choice in range(2):
            for s in range(9):
                expert = int(chosen[s, choice])
                if used[expert] < layer.capacity:
                    answer = F.relu(x[b, s] @ layer.up[expert]) @ layer.down[expert]
                    expected[b, s] += best[s, choice] / best[s].sum() * answer
                used[expert] += 1
    torch.testing.assert_close(layer(x), expected)


def test_mixture_drops_tokens_beyond_capacity() -> None:
    layer = MixtureOfExperts(width=4, ffn=5, experts=2, seq=8, dropout=0.0)
    layer.capacity = 3
    weights = layer.route(torch.ones(1, 8, 4))
    # All tokens are equal, so all choose alike: three find a place with each of the two experts.
    assert weights.gt(0).sum(dim=(1, 3)).tolist() == [[3, 3]]


def test_distance_buckets_are_exact_near_and_shared_far() -> None:
    causal = distance_buckets(40, 8, both_ways=False)
    assert causal[39].flip(0)[:4].tolist() == [0, 1, 2, 3]
    assert causal.max() < 8
    assert causal[0].eq(0).all()  # what lies ahead is masked, and all at distance zero
    both = distance_buckets(40, 8, both_ways=True)
    assert both[0, 1] >= 4 > both[1, 0]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("gpt2:width=30,heads=4", "width=30 is not a multiple of heads=4"),
        ("llama:heads=32,kv_heads=5", "heads=32 is not a multiple of kv_heads=5"),
        ("llama:width=96,heads=32,kv_heads=8", "is odd"),
        ("vit:image=30", "image=30 is not a multiple of patch=4"),
        ("vgg19:image=16", "vanishes"),
        ("bert-moe:experts=1", "each token goes to two"),
        ("resnet50:blocks=3-x", "blocks=3-x is not a list"),
        ("unet:factors=1-2-4,image=6", "image=6 is not a multiple of 2^2=4"),
        ("unet:width=30,groups=4", "width=30 is not a multiple of groups=4"),
        ("t5:buckets=6", "buckets=6 is not a multiple"),
        ("t5:buckets=512", "buckets=512 leaves no distances"),
        ("bert:batch=0", "batch=0 is too small"),
        ("bert:layers=-1", "layers=-1 is too small"),
        ("bert:dropout=1.5", "dropout=1.5 is not a fraction"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(spec: str, words: str) -> None:
    with torch.device("meta"), pytest.raises(ModelError) as refused:
        models.load(spec)
    assert words in refused.value.what
    assert refused.value.do
