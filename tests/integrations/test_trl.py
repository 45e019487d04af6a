"""TRL's SFTTrainer on three unequal processes: losses of the plain one on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lopsided.comm.worker_pool import WorkerPool
from tests.integrations.test_trainer import BATCH, samples
from tests.support.jobs import cluster_of

pytest.importorskip("trl")


def trained(folder: str, parallel: bool) -> list[dict[str, float]]:
    import datasets
    import trl
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from lopsided.integrations.trl import SFTTrainer

    words = {"<pad>": 0, "<eos>": 1} | {f"w{k}": k for k in range(2, 61)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 61}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    rows = [{name: part.tolist() for name, part in row.items()} for row in samples(48)]
    each = BATCH // 3 if parallel else BATCH
    args = trl.SFTConfig(
        folder,
        per_device_train_batch_size=each,
        per_device_eval_batch_size=each,
        gradient_accumulation_steps=2,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    parts: dict[str, Any] = {
        "model": model,
        "args": args,
        "train_dataset": datasets.Dataset.from_list(rows),
        "eval_dataset": datasets.Dataset.from_list(rows[:17]),
        "processing_class": tokenizer,
        "peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    }
    trainer = SFTTrainer(cluster=cluster_of(3, [4e6, 8e6, 12e6]), **parts) if parallel else trl.SFTTrainer(**parts)
    trainer.train()
    compared = ("loss", "grad_norm", "eval_loss", "train_loss")
    return [{key: entry[key] for key in compared if key in entry} for entry in trainer.state.log_history]


def test_three_steps_are_those_of_one_device(one: WorkerPool, three: WorkerPool, tmp_path: Any) -> None:
    (expected,) = one.run(trained, str(tmp_path / "one"), False)
    assert [[*entry] for entry in expected] == [["loss", "grad_norm"]] * 3 + [["eval_loss"], ["train_loss"]]
    for found in three.run(trained, str(tmp_path / "three"), True):
        assert [entry.keys() for entry in found] == [entry.keys() for entry in expected]
        for ours, theirs in zip(found, expected, strict=True):
            assert all(ours[key] == pytest.approx(theirs[key], abs=1e-5) for key in theirs)
