"""Every form of MODEL gives a module and a batch, and every way to get it wrong says what to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lopsided.errors import ModelError
from lopsided.models import by_name as models
from lopsided.models import hugging_face as hf
from tests.support.architectures import ARCHITECTURES, REFUSED

USER_FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.layer = nn.Linear(width, 1, bias=bias)

    def forward(self, x):
        return self.layer(x).sum()

def make(batch: int = 3, width: int = 4, bias=True, note=None):
    net = Net(width, bias)
    net.note = note
    return net, {"x": torch.ones(batch, width)}

def fails():
    return helper()

def helper():
    raise RuntimeError("no luck")

def inside_torch():
    return torch.ones(2) @ torch.ones(3)

def not_a_pair():
    return Net(1, True)

def triple():
    return Net(1, True), {}, 3

def no_module():
    return "net", {}

def no_batch():
    return Net(1, True), 3

def by_position(widths=[4, 5]):
    return Net(widths[0], True), (torch.ones(2, widths[0]),)

def alone():
    return Net(1, True), torch.ones(1)

def bare(**anything):
    return Net(1, True), dict.fromkeys(anything, 1)

def nothing():
    return Net(1, True), {}

constant = 3
"""


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "usermodel.py"
    file.write_text(USER_FILE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield file
    sys.modules.pop("usermodel", None)


def refused(spec: str, batch: int | None = None) -> ModelError:
    with pytest.raises(ModelError) as caught:
        models.load(spec, batch=batch)
    assert caught.value.where
    assert caught.value.do
    return caught.value


def test_zoo_overrides_are_typed_by_the_builder() -> None:
    module, batch = models.load("gpt2:layers=1,width=8,heads=2,seq=4,vocab=11,dropout=0,tied=no,batch=2")
    assert len(module.layers) == 1
    assert batch["input_ids"].shape == (2, 4)
    assert module.drop.p == 0.0


def test_batch_wins_over_the_spec() -> None:
    _, batch = models.load("mlp:layers=1,width=4,batch=2", batch=9)
    assert batch["x"].shape == (9, 4)


def test_a_file_and_a_module_are_the_same_function(user_file: Path) -> None:
    for place in (str(user_file), "usermodel.py", "./usermodel.py", "usermodel"):
        module, batch = models.load(f"{place}:make")
        assert module(**batch).shape == ()
        assert batch["x"].shape == (3, 4)


def test_function_overrides_follow_the_signature(user_file: Path) -> None:
    module, batch = models.load("usermodel.py:make:width=6,bias=false,note=0.5", batch=7)
    assert batch["x"].shape == (7, 6)
    assert module.layer.bias is None
    assert module.note == 0.5
    assert models.load("usermodel.py:make:note=words")[0].note == "words"
    assert models.load("usermodel.py:make:note=True")[0].note is True
    assert models.load("usermodel.py:bare:a=1", batch=2)[1] == {"a": 1, "batch": 1}


def test_a_batch_may_go_by_position(user_file: Path) -> None:
    module, batch = models.load("usermodel:by_position")
    assert isinstance(batch, tuple)
    assert module(*batch).shape == ()
    assert isinstance(models.load("usermodel:alone")[1], torch.Tensor)


def test_a_list_stands_in_brackets(user_file: Path) -> None:
    module, _ = models.load("usermodel:by_position:widths=[7,8]")
    assert module.layer.in_features == 7
    assert models.split_overrides("a=[1, 2],b=3", "spec") == {"a": "[1, 2]", "b": "3"}
    assert "widths=x is not a whole number" in refused("usermodel:by_position:widths=[7,x]").what


def test_a_file_may_import_its_neighbour(user_file: Path) -> None:
    (user_file.parent / "sub").mkdir()
    (user_file.parent / "sub" / "neighbour_of_train.py").write_text("WIDTH = 5\n")
    train = user_file.parent / "sub" / "train.py"
    train.write_text(
        "import torch\nfrom neighbour_of_train import WIDTH\n"
        "def make():\n    return torch.nn.Linear(WIDTH, 1), {'input': torch.ones(2, WIDTH)}\n"
    )
    module, _ = models.load("sub/train.py:make")
    assert module.in_features == 5


@pytest.mark.parametrize(
    ("spec", "what", "do"),
    [
        ("brt:layers=2", "no zoo model 'brt'; did you mean bert", "choose one of mlp"),
        ("brt", "did you mean bert", "choose one of"),
        ("", "no zoo model ''", "choose one of"),
        ("bert:layrs=2", "bert has no size 'layrs'; did you mean layers", "width=768"),
        ("bert:layers", "'layers' is not an override", "key=value"),
        ("brt:layers", "no module 'brt'", "the zoo's bert"),
        ("bert:layers=two", "layers=two is not a whole number", "layers=12"),
        ("bert:dropout=much", "dropout=much is not a number", "dropout=0.1"),
        ("gpt2:tied=maybe", "tied=maybe is not true or false", "tied=True"),
        ("bert:layers=2,width", "'width' is not an override", "key=value"),
        ("bert:layers=2,=3", "'=3' is not an override", "key=value"),
        ("bert:layers=2,layers=3", "layers is set twice", "keep one"),
        ("nowhere.py:make", "no file nowhere.py", "check the path"),
        ("usermodel.py", "no function in it is named", "usermodel.py:function"),
        ("usermodel.py:width=3", "no function in it is named", "usermodel.py:function"),
        ("nowhere.at.all:make", "no module 'nowhere'", "file.py:function"),
        ("usermodel:mak", "has no function 'mak'", "did you mean make"),
        ("usermodel:constant", "has no function 'constant'", "(module, batch)"),
        ("usermodel:make:widht=3", "takes no argument 'widht'", "did you mean width"),
        ("usermodel:nothing:zzz=3", "takes no argument 'zzz'", "none"),
        ("usermodel:make:width=x", "width=x is not a whole number", "width=4"),
        ("usermodel:not_a_pair", "returned a Net, not a pair", "nn.Module"),
        ("usermodel:triple", "returned a tuple of 3, not a pair", "nn.Module"),
        ("usermodel:no_module", "returned a str in place of a module", "nn.Module"),
        ("usermodel:no_batch", "returned a int in place of a batch", "a tuple by position"),
    ],
)
def test_refusals(user_file: Path, spec: str, what: str, do: str) -> None:
    error = refused(spec)
    assert what in error.what
    assert do in error.do


def test_batch_must_be_positive_and_wanted(user_file: Path) -> None:
    assert "a batch of 0" in refused("bert", batch=0).what
    assert "does not take a batch size" in refused("usermodel:nothing", batch=4).what


def test_a_failure_in_the_function_is_told_with_its_line(user_file: Path) -> None:
    error = refused("usermodel.py:fails")
    line = USER_FILE.splitlines().index('    raise RuntimeError("no luck")') + 1
    assert error.what == "fails() failed: RuntimeError: no luck"
    assert error.where == f"{user_file}:{line}, helper"
    assert isinstance(error.__cause__, RuntimeError)
    inside = refused("usermodel.py:inside_torch")
    assert f"{user_file}:" in inside.where


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        ("import torch\nx = 1 / 0\n", "ZeroDivisionError: division by zero", 2),
        ("import no_such_package\n", "ModuleNotFoundError", 1),
        ("def make(:\n", "SyntaxError", 1),
    ],
)
def test_a_failing_import_is_told_with_its_line(user_file: Path, text: str, words: str, line: int) -> None:
    broken = user_file.parent / "brokenmodel.py"
    broken.write_text(text)
    for place in ("brokenmodel.py", "brokenmodel"):
        error = refused(f"{place}:make")
        assert words in error.what
        assert error.where.startswith(f"{broken}:{line}")
        assert error.__cause__ is not None


def test_hf_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    error = refused("hf:BertModel")
    assert "not installed" in error.what
    assert error.do == "pip install lopsided[hf]"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")


@pytest.mark.usefixtures("offline")
class TestHF:
    @pytest.mark.parametrize(
        "spec",
        [
            "hf:LlamaForCausalLM:batch=2,seq=7",
            "hf:LlamaForSequenceClassification:batch=2",
            "hf:BertModel:num_hidden_layers=1",
            "hf:BertForQuestionAnswering:num_hidden_layers=1",
            "hf:ElectraForTokenClassification:num_hidden_layers=1",
            "hf:RobertaForMultipleChoice:num_hidden_layers=1",
            "hf:T5ForConditionalGeneration:num_layers=1",
            "hf:ViTForImageClassification:image_size=48",
            "hf:CLIPModel:text_config.num_hidden_layers=1",
            "hf:GPT2LMHeadModel:num_hidden_layers=1,attn_implementation=eager",
        ],
    )
    def test_gives_a_loss(self, spec: str) -> None:
        module, batch = models.load(spec)
        loss = module(**batch)
        assert loss.shape == ()
        assert loss.isfinite()
        loss.backward()

    def test_overrides_reach_the_configuration(self) -> None:
        module, batch = models.load(
            "hf:CLIPModel:text_config.hidden_size=16,projection_dim=12,attn_implementation=eager", batch=4
        )
        config = module.model.config
        assert config.text_config.hidden_size == 16
        assert config.projection_dim == 12
        assert config._attn_implementation == "eager"
        assert batch["input_ids"].shape[0] == batch["pixel_values"].shape[0] == 4
        module, _ = models.load("hf:ConvNextForImageClassification:depths=[1,2,1,1],drop_path_rate=0.5")
        assert module.model.config.depths == [1, 2, 1, 1]
        assert module.model.config.drop_path_rate == 0.5

    def test_builds_without_memory(self) -> None:
        with torch.device("meta"):
            module, batch = models.load("hf:LlamaForCausalLM:hidden_size=4096,num_attention_heads=32")
        assert all(p.is_meta for p in module.parameters())
        assert batch["input_ids"].is_meta

    @pytest.mark.parametrize(
        ("spec", "what", "do"),
        [
            ("hf:LlamaForCausalLN", "no model class 'LlamaForCausalLN'", "LlamaForCausalLM"),
            ("hf:", "no model class ''", "hf:LlamaForCausalLM"),
            ("hf:BertTokenizer", "no model class", "name a class"),
            ("hf:BertModel:hiden_size=3", "no 'hiden_size'", "did you mean hidden_size"),
            ("hf:BertModel:text_config.hidden_size=3", "no 'text_config.hidden_size'", "choose among"),
            ("hf:BertModel:hidden_size=wide", "hidden_size=wide is not a whole number", "hidden_size=768"),
            ("hf:TimeSeriesTransformerModel:prediction_length=4", "no batch is known", "file.py:function"),
            ("hf:Qwen2VLForConditionalGeneration", "does not say how large images are", "file.py:function"),
            ("hf:BertModel:seq=none", "seq=none is not a size", "from 1 up"),
            ("hf:BertModel:hidden_size=33", "cannot build it", "hidden_size"),
            ("hf:BertModel:attn_implementation=magic", "cannot build it", "hidden_size"),
            ("hf:BertModel:attn_implementation=kernels-community/flash-attn", "not the name of an", "eager, sdpa"),
            ("hf:BertModel:_attn_implementation=kernels-community/flash-attn", "not the name of an", "eager, sdpa"),
            ("hf:CLIPModel:text_config._attn_implementation=a/b", "not the name of an", "eager, sdpa"),
            ("hf:MixtralForCausalLM:experts_implementation=../x", "not the name of an", "batched_mm"),
        ],
    )
    def test_refusals(self, spec: str, what: str, do: str) -> None:
        error = refused(spec)
        assert what in error.what
        assert do in error.do

    def test_a_configuration_without_defaults_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Needy:
            def __init__(self, encoder: object) -> None: ...

        import transformers

        monkeypatch.setattr(transformers.BertModel, "config_class", Needy)
        error = refused("hf:BertModel")
        assert "Needy has no defaults to start from" in error.what
        assert "file.py:function" in error.do

    def test_zero_layerdrop_decides_nothing_at_run_time(self) -> None:
        module, batch = models.load("hf:OPTForCausalLM:num_hidden_layers=1")
        torch.export.export(module.train(), (), batch, strict=False)

    def test_the_list_of_architectures_is_long_and_without_repeats(self) -> None:
        assert len(set(ARCHITECTURES)) == len(ARCHITECTURES) >= 60
        assert not set(ARCHITECTURES) & set(REFUSED)

    # transformers compiles a few functions with it when some models are imported.
    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
    @pytest.mark.slow
    @pytest.mark.parametrize("spec", [*ARCHITECTURES, *REFUSED])
    def test_every_architecture_gives_a_loss(self, spec: str) -> None:
        module, batch = models.load(spec)
        loss = module(**batch)
        assert loss.shape == ()
        assert loss.isfinite()
        loss.backward()


@pytest.mark.parametrize("before", ["0", None])
def test_hf_never_goes_online(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # Set first, so that it is taken back in the end whatever the loader does.
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    if before is None:
        monkeypatch.delenv("HF_HUB_OFFLINE")
    hf.find_class("BertModel")
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert constants.is_offline_mode()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mlp:width=999999999999999", "mlp with these sizes cannot be built"),
        ("mlp:width=99999999999999999999999", "mlp with these sizes cannot be built"),
        ("gpt2:seq=999999999999999,layers=1", "gpt2 with these sizes cannot be built"),
    ],
)
def test_sizes_beyond_memory_are_refused(spec: str, words: str) -> None:
    error = refused(spec)
    assert words in error.what
    assert "\n" not in error.what
    assert "smaller sizes" in error.do
    assert isinstance(error.__cause__, RuntimeError | MemoryError | OverflowError | TypeError)


def test_one_line_of_any_exception() -> None:
    assert hf.one_line(ValueError()) == "no message"
    assert hf.one_line(ValueError("refused:\n   by the second line")) == "refused: by the second line"


def test_configurations_that_are_no_dataclasses_have_defaults_too() -> None:
    class Plain:
        def __init__(self, hidden_size: int = 768, head_dim: int | None = None, **rest: int) -> None: ...

    assert hf.defaults_of(Plain) == {"hidden_size": 768, "head_dim": None}
