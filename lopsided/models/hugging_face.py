"""Randomly initialised `transformers` models, tiny unless told otherwise, each with a batch for a loss.

In comes a class name and overrides as text (`"BertForMaskedLM"`, `{"num_hidden_layers": "4"}`), out go a
module and a batch such that `module(**batch)` is a scalar. Nothing is ever downloaded. The one idea:
configurations of different models name the same few sizes in a few ways, so one table of names shrinks them
all, and a model's forward signature and class name tell which inputs and labels it wants.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lopsided.errors import ModelError
from lopsided.models.zoo.parts import Batch, Built, random_tokens, random_values

WIDTH, HEADS, LAYERS, FFN, VOCAB, PLACES = 32, 4, 2, 48, 99, 64

# Sizes by the names configurations give them. A default is only ever made smaller, and None is left alone: it
# means "follow another size".
SMALL_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "decoder_hidden_size", "attention_hidden_size", "d_embed"), WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "decoder_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), HEADS // 2),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "attention_head_size"), WIDTH // HEADS),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers"), LAYERS),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), FFN),
    **dict.fromkeys(("hidden_dim", "d_inner", "ffn_hidden_size", "decoder_intermediate_size"), FFN),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), FFN // 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "moe_topk", "top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), PLACES),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), PLACES),
    **dict.fromkeys(("image_size", "decoder_hidden_dim", "max_length", "state_size"), 32),
    **dict.fromkeys(("patch_size", "num_mel_bins", "num_conv_pos_embeddings", "projection_dim"), 16),
    **dict.fromkeys(("num_conv_pos_embedding_groups", "num_buckets", "hidden_size_per_layer_input"), 4),
    **dict.fromkeys(("classifier_proj_size", "tdnn_output_dim", "codevector_dim", "proj_codevector_dim"), 16),
    **dict.fromkeys(("neck_hidden_size", "auxiliary_channels", "aspp_out_channels"), 16),
    "sliding_window": 8,
}
# Sizes that come one per stage: each is divided by this, or set to it.
STAGE_DIVISORS = {"hidden_sizes": 4, "neck_hidden_sizes": 4, "encoder_hidden_sizes": 4}
STAGE_VALUES = {"depths": 1, "conv_dim": 16, "tdnn_dim": 16}

OURS = {"batch": 3, "seq": 10}
"""The two sizes of the batch, which no configuration holds, with their defaults."""

MODEL_NAME = re.compile("For[A-Z]")

IMPLEMENTATIONS: dict[str, str] = {
    "attn_implementation": "eager, sdpa, flex_attention or flash_attention_2",
    "experts_implementation": "eager, batched_mm or grouped_mm",
}
"""Overrides that choose among implementations, with the words they take; anything with a / is a kernel to download."""

FIRST_PLAIN_TOKEN = 10
"""Ids below are left to padding, beginnings and ends; the batch draws its tokens from here up."""


class Never:
    """A probability of zero that nothing lies below, known without looking: see `keep_layers`."""

    def __gt__(self, other: object) -> bool:
        return False


class Loss(nn.Module):
    """A `transformers` model whose forward returns its loss alone.

    A base model has none (`BertModel`): the mean of squares of its first floating output stands in for it.
    """

    def __init__(self, model: nn.Module, flags: dict[str, bool]) -> None:
        super().__init__()
        self.model, self.flags = model, flags

    def _get_name(self) -> str:
        """What it is called in messages: the model, not what it is wrapped in."""
        return type(self.model).__name__

    def forward(self, **batch: Tensor) -> Tensor:
        output = self.model(**batch, **self.flags)
        loss: Tensor | None = output.get("loss")
        if loss is not None:
            return loss
        first = next(value for value in tensors(output.to_tuple()) if value.is_floating_point())
        return first.square().mean()


def tensors(value: object) -> Iterator[Tensor]:
    """Every tensor in nested tuples and lists, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)


def build(class_name: str, overrides: dict[str, str], *, batch: int | None = None) -> Built:
    """The model of this class with a tiny configuration, changed by `overrides`, and a batch for it."""
    where = f"hf:{class_name}"
    model_class = find_class(class_name)
    config_class = model_class.config_class
    ours = dict(OURS)
    try:
        defaults = config_class()
    except Exception as error:
        raise ModelError(
            f"{config_class.__name__} has no defaults to start from: {one_line(error)}",
            where=where,
            do="build it in a function of your own, and name that: file.py:function",
        ) from error
    values = shrink(defaults, config_class)
    for key, text in overrides.items():
        if key in ours:
            if not text.isdecimal() or int(text) < 1:
                raise ModelError(f"{key}={text} is not a size", where=where, do=f"choose {key} from 1 up")
            ours[key] = int(text)
        else:
            override(values, defaults, key, text, where)
    if batch is not None:
        ours["batch"] = batch
    if class_name.endswith("ForSequenceClassification"):
        # Decoders classify the last token that is not padding, and refuse batches if none is named.
        values.setdefault("pad_token_id", 0)
    try:
        config = config_class(**values)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        model = model_class(config)
        keep_layers(model)
    # Configurations refuse sizes with their own exceptions, and models fail in any way on those that pass.
    except Exception as error:
        raise ModelError(
            f"transformers cannot build it: {type(error).__name__}: {one_line(error)}",
            where=where,
            do="override the sizes it names, e.g. " + f"{where}:hidden_size=64,num_attention_heads=4",
        ) from error
    accepted = inspect.signature(model_class.forward).parameters
    flags = {"return_loss": True} if "return_loss" in accepted else {}
    return Loss(model, flags), make_batch(model_class, config, ours["batch"], ours["seq"])


def keep_layers(model: nn.Module) -> None:
    """Let a layer drop of zero be seen as such by a capture.

    Models that can skip layers at random ask `torch.rand([]) < self.layerdrop` even if that is 0.0. The
    answer is always no, but a capture sees a number drawn at run time decide what runs next, and gives up.
    """
    for module in model.modules():
        if getattr(module, "layerdrop", None) == 0:
            module.layerdrop = Never()  # type: ignore[assignment]  # not a part, but a plain attribute
        config = getattr(module, "config", None)
        if getattr(config, "layerdrop", None) == 0:
            vars(config)["layerdrop"] = Never()  # past the configuration's check of types


def find_class(class_name: str) -> Any:
    """The model class of `transformers` with this name."""
    go_offline()
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ModelError(
            "transformers is not installed", where=f"hf:{class_name}", do="pip install lopsided[hf]"
        ) from error
    found = getattr(transformers, class_name, None) if class_name in dir(transformers) else None
    if not (inspect.isclass(found) and issubclass(found, nn.Module) and getattr(found, "config_class", None)):
        names = [n for n in dir(transformers) if n.endswith("Model") or MODEL_NAME.search(n)]
        close = difflib.get_close_matches(class_name, names, n=3)
        raise ModelError(
            f"transformers has no model class {class_name!r}",
            where=f"hf:{class_name}",
            do=f"did you mean {' or '.join(close)}?" if close else "name a class, e.g. hf:LlamaForCausalLM",
        )
    return found


def go_offline() -> None:
    """Keep `transformers` from downloading anything, whatever the environment says."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    # The hub's client reads the environment once, and the caller may have imported it before.
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
        vars(constants)["HF_HUB_OFFLINE"] = True


def shrink(config: Any, config_class: Any) -> dict[str, Any]:
    """Arguments of `config_class` that make `config`, one of its instances, tiny."""
    small: dict[str, Any] = {}
    for key, default in defaults_of(config_class).items():
        value = getattr(config, key, None)
        if value is not None and hasattr(type(value), "sub_configs"):
            small[key] = {**shrink(value, type(value)), "model_type": value.model_type}
        elif key.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCAB:
            small[key] = plain_token(key, len(small))
        elif default is None or value is None or isinstance(value, bool):
            continue
        elif key in SMALL_SIZES and isinstance(value, int):
            small[key] = min(value, SMALL_SIZES[key])
        elif key in STAGE_DIVISORS and isinstance(value, list | tuple):
            small[key] = [v // STAGE_DIVISORS[key] for v in value]
        elif key in STAGE_VALUES and isinstance(value, list | tuple):
            small[key] = [STAGE_VALUES[key]] * len(value)
        elif key == "num_heads" and isinstance(value, list | tuple):
            small[key] = [2**stage for stage in range(len(value))]
        elif isinstance(value, int | float | str) and value != default:
            small[key] = value  # what a composite sets in its parts, and tokens that fit
    return small


def defaults_of(config_class: Any) -> dict[str, Any]:
    """What a configuration takes, with its defaults as written, before any is derived from another."""
    if dataclasses.is_dataclass(config_class):
        return {field.name: field.default for field in dataclasses.fields(config_class)}
    # Early releases of transformers 5, and configurations written outside it.
    parameters = inspect.signature(config_class.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def plain_token(key: str, unique: int) -> int:
    """A special token's id within the small vocabulary: fixed for the three all models share."""
    shared = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return shared.get(key, 3 + unique % (FIRST_PLAIN_TOKEN - 3))


def override(values: dict[str, Any], config: Any, key: str, text: str, where: str) -> None:
    """Put `key=text` into the arguments; the type is that of the configuration's own value."""
    *path, last = key.split(".")
    # With a leading underscore it is the configuration's own name for the same.
    if (words := IMPLEMENTATIONS.get(last.lstrip("_"))) is not None and not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", text):
        raise ModelError(f"{key}={text} is not the name of an implementation", where=where, do=f"choose {words}")
    if key in IMPLEMENTATIONS:
        values[key] = text
        return
    for part in path:
        config = getattr(config, part, None)
        values = values.setdefault(part, {})
    # attribute_map: names that a configuration answers to besides its own, such as GPT-2's hidden_size.
    last = getattr(config, "attribute_map", {}).get(last, last)
    if not hasattr(type(config), "sub_configs") or not hasattr(config, last):
        known = sorted(k for k in vars(config) if not k.startswith("_")) if hasattr(config, "to_dict") else []
        close = difflib.get_close_matches(last, known, n=3)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ModelError(
            f"the configuration has no {key!r}",
            where=where,
            do=f"{hint}choose among batch, seq, {', '.join((*IMPLEMENTATIONS, *known))}",
        )
    values[last] = parse(text, getattr(config, last), key, where)


def parse(text: str, like: object, key: str, where: str) -> Any:
    """`text` as the type of `like`; a list as [1,2] or 1-2; a guess where `like` is None."""
    try:
        if isinstance(like, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(like, list | tuple):
            items = text.strip("[]").split("," if text.startswith("[") else "-")
            return [parse(item.strip(), like[0] if like else None, key, where) for item in items]
        if isinstance(like, int | float):
            # Many configurations write 0 or 1 for what is a fraction.
            return int(text) if isinstance(like, int) and text.lstrip("-").isdecimal() else float(text)
    except (KeyError, ValueError) as error:
        wanted = {bool: "true or false", int: "a whole number"}.get(type(like), "a number")
        raise ModelError(f"{key}={text} is not {wanted}", where=where, do=f"write it like {key}={like}") from error
    if like is None:
        words = {"true": True, "false": False, "none": None}
        if text.lower() in words:
            return words[text.lower()]
        for number in (int, float):
            try:
                return number(text)
            except ValueError:
                continue
    return text


def lookup(config: Any, key: str) -> Any:
    """`key` of the configuration, or of the first of its parts that has it; None if none has."""
    if (value := getattr(config, key, None)) is not None:
        return value
    parts = (getattr(config, name, None) for name in type(config).sub_configs)
    return next((v for part in parts if part is not None and (v := lookup(part, key)) is not None), None)


def make_batch(model_class: Any, config: Any, batch: int, seq: int) -> Batch:
    """Inputs and labels by the names in the forward signature; no two entries share memory."""
    accepted = inspect.signature(model_class.forward).parameters
    vocab = lookup(config, "vocab_size") or VOCAB
    made: Batch = {}
    seed = 0

    def tokens(*shape: int, low: int = FIRST_PLAIN_TOKEN, below: int = vocab) -> Tensor:
        nonlocal seed
        seed += 1
        return random_tokens(*shape, below=max(1, below - low), seed=seed) + low

    choices = (2,) if model_class.__name__.endswith("ForMultipleChoice") else ()
    if "input_ids" in accepted:
        made["input_ids"] = tokens(batch, *choices, seq)
    if "pixel_values" in accepted:
        made["pixel_values"] = random_values(batch, *image_shape(config), seed=1)
        if "input_ids" in made and (image_token := lookup_image_token(config)) is not None:
            fill_image_tokens(made, config, image_token)
            if "token_type_ids" in accepted:
                # Gemma 3 marks the image by ones; PaliGemma the text that is to be predicted, and without the
                # marks attends differently when captured and when run.
                of_image = made["input_ids"] == image_token
                ones = ~of_image if config.model_type == "paligemma" else of_image
                made["token_type_ids"] = ones.to(torch.int64)
    if "input_values" in accepted:
        made["input_values"] = random_values(batch, *sound_shape(config, seq), seed=2)
    if "input_features" in accepted:
        made["input_features"] = random_values(batch, *feature_shape(config, seq), seed=3)
    if "bbox" in accepted:
        corner = tokens(batch, seq, 2, low=0, below=8)
        made["bbox"] = torch.cat((corner, corner + 4), dim=-1)
    if "pixel_mask" in accepted and "pixel_values" in made:
        pixels = made["pixel_values"]
        made["pixel_mask"] = torch.ones(batch, *pixels.shape[-2:], dtype=torch.int64)
    if "decoder_input_ids" in accepted and config.is_encoder_decoder:
        made["decoder_input_ids"] = tokens(batch, seq)
    if not made:
        raise ModelError(
            f"no batch is known for inputs named {', '.join(list(accepted)[1:])}",
            where=f"hf:{model_class.__name__}",
            do="build model and batch in a function of your own, and name that: file.py:function",
        )
    made.update(make_labels(model_class.__name__, accepted, config, made, tokens))
    return made


def make_labels(class_name: str, accepted: Any, config: Any, made: Batch, tokens: Any) -> Batch:
    """What the class name says is to be predicted."""
    first = next(iter(made.values()))
    batch = first.shape[0]
    classes = config.num_labels or 2
    if class_name.endswith("ForQuestionAnswering") and "start_positions" in accepted:
        seq = first.shape[1]
        return {name: tokens(batch, low=0, below=seq) for name in ("start_positions", "end_positions")}
    if class_name.endswith("ForQuestionAnswering") and "labels" in accepted:
        # Answers about images are classes with soft scores.
        return {"labels": random_values(batch, classes, seed=4).sigmoid()}
    if "next_sentence_label" in accepted and "labels" in accepted:
        return {
            "labels": tokens(*first.shape),
            "next_sentence_label": tokens(batch, low=0, below=2),
        }
    if class_name.endswith("ForMaskedImageModeling") or "bool_masked_pos" in accepted:
        patches = (made["pixel_values"].shape[-1] // lookup(config, "patch_size")) ** 2
        masked = torch.arange(patches) % 2 == 0
        made["bool_masked_pos"] = masked.expand(batch, patches).clone()
    if "labels" not in accepted:
        return {}
    if class_name.endswith(("ForTokenClassification", "ForAudioFrameClassification")):
        return {"labels": tokens(*first.shape[:2], low=0, below=classes)}
    if class_name.endswith(("Classification", "ForMultipleChoice", "NextSentencePrediction", "Classifier")):
        below = 2 if class_name.endswith(("Choice", "Prediction")) else classes
        return {"labels": tokens(batch, low=0, below=below)}
    if class_name.endswith("ForSemanticSegmentation"):
        return {"labels": tokens(batch, *first.shape[-2:], low=0, below=classes)}
    if class_name.endswith("ForCTC"):
        return {"labels": tokens(batch, 3)}
    if "decoder_input_ids" in made:
        return {"labels": tokens(*made["decoder_input_ids"].shape)}
    if "input_ids" in made:
        return {"labels": tokens(*made["input_ids"].shape)}
    return {}


def pair(size: Any) -> tuple[int, int]:
    """Height and width of a size given as one number or as two."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def image_shape(config: Any) -> tuple[int, ...]:
    """Channels, height, width; 32×32 where the configuration does not say, as in convolutional models."""
    return lookup(config, "num_channels") or 3, *pair(lookup(config, "image_size") or 32)


def lookup_image_token(config: Any) -> int | None:
    """The id that stands for a piece of an image in the text, if the model puts images there."""
    found = lookup(config, "image_token_id")
    token: int | None = lookup(config, "image_token_index") if found is None else found
    return token


def fill_image_tokens(made: Batch, config: Any, image_token: int) -> None:
    """Begin each text with as many image tokens as the image has patches."""
    if (image := lookup(config, "image_size")) is None:
        raise ModelError(
            f"{type(config).__name__} does not say how large images are, so there is no batch for it",
            where="hf:",
            do="build it in a function of your own, and name that: file.py:function",
        )
    (height, width), (tall, wide) = pair(image), pair(lookup(config, "patch_size"))
    patches = (height // tall) * (width // wide)
    count = min(patches, lookup(config, "mm_tokens_per_image") or patches)  # Gemma 3 pools its patches
    text = made["input_ids"]
    image = torch.full((text.shape[0], count), image_token)
    made["input_ids"] = torch.cat((image, text), dim=1)


def sound_shape(config: Any, seq: int) -> tuple[int, ...]:
    """Raw samples that the convolutions turn into `seq` frames, or a spectrogram of the configured size."""
    if lookup(config, "conv_stride") is None:
        return lookup(config, "max_length"), lookup(config, "num_mel_bins")
    samples = seq
    kernels, strides = lookup(config, "conv_kernel"), lookup(config, "conv_stride")
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        samples = (samples - 1) * stride + kernel
    return (samples,)


def feature_shape(config: Any, seq: int) -> tuple[int, ...]:
    """Mel features: all positions at once for Whisper, which takes no fewer; `seq` frames for the others."""
    if (places := lookup(config, "max_source_positions")) and lookup(config, "num_mel_bins"):
        return lookup(config, "num_mel_bins"), 2 * places
    names = ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins")
    size = next((v for name in names if (v := lookup(config, name))), WIDTH)
    return 4 * seq, size


def one_line(error: BaseException) -> str:
    """An exception's text on one line of bearable length; some begin with a line that says nothing."""
    return " ".join(str(error).split())[:300] or "no message"
