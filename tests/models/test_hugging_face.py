"""The sample of `transformers` models: captured, described, verified; those that cannot be say why."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import lopsided
from lopsided.errors import CaptureError
from lopsided.models import by_name as models
from lopsided.ops.derive import derive_rules
from tests.support.architectures import ARCHITECTURES, EAGER_ONLY, REFUSED, with_eager_attention

# Some files of transformers script functions when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def class_of(spec: str) -> str:
    return spec.split(":")[1]


WITH_EAGER = [with_eager_attention(spec) for spec in ARCHITECTURES if class_of(spec) not in EAGER_ONLY]


def check(spec: str, programs: int) -> None:
    model, batch = models.load(spec)
    found = lopsided.verify(model, batch, programs=programs)
    assert found.passed, f"capture {found.capture_error}; {found.worst.where}: {found.worst.error}"
    whole = derive_rules(found.graph).only_whole
    assert whole == (), f"nobody described {', '.join(sorted({node.op for node in whole}))}"


def test_the_sample_is_large() -> None:
    assert len({class_of(spec) for spec in ARCHITECTURES}) >= 40
    assert not {class_of(spec) for spec in ARCHITECTURES} & {class_of(spec) for spec in REFUSED}


@pytest.mark.sampled(18)
@pytest.mark.parametrize("spec", ARCHITECTURES, ids=class_of)
def test_every_architecture(spec: str) -> None:
    check(spec, programs=2)


def test_attention_written_out() -> None:
    check(with_eager_attention("hf:LlamaForCausalLM"), programs=3)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ARCHITECTURES, ids=class_of)
def test_every_architecture_at_length(spec: str) -> None:
    check(spec, programs=10)


@pytest.mark.slow
@pytest.mark.parametrize("spec", WITH_EAGER, ids=class_of)
def test_every_architecture_with_attention_written_out(spec: str) -> None:
    check(spec, programs=10)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("spec", REFUSED, ids=class_of)
def test_what_cannot_be_captured_says_where_and_what_to_do(spec: str) -> None:
    model, batch = models.load(spec)
    with pytest.raises(CaptureError) as refused:
        lopsided.capture(model, batch)
    assert ".py:" in refused.value.where, refused.value
    assert refused.value.do


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_experts_as_they_come(name: str) -> None:
    """Without a word about their implementation; a loop over experts names the implementations to choose."""
    check(f"hf:{name}:num_hidden_layers=1", programs=2)
    model, batch = models.load(f"hf:{name}:num_hidden_layers=1,experts_implementation=eager")
    with pytest.raises(CaptureError) as refused:
        lopsided.capture(model, batch)
    assert "set_experts_implementation" in refused.value.do
    model.model.set_experts_implementation("grouped_mm")  # type: ignore[operator, union-attr]
    lopsided.capture(model, batch)
