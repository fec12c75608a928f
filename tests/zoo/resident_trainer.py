# SPDX-License-Identifier: Apache-2.0
"""BERT in a Trainer of transformers, and what the process has resident while it trains.

    python tests/zoo/resident_trainer.py none             # eager: losses, and bytes of its tensors
    python tests/zoo/resident_trainer.py memory_limit 60000000

Prints one line of JSON, as `tests/resident_programs.py` does.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from typing import Any

import torch

import koila
from zoo import libraries  # noqa: F401 - before transformers, which it makes importable

import transformers  # isort: skip
from koila.integrations.transformers import KoilaCallback  # isort: skip
from profiled import bytes_over_time
from resident_programs import N_STEPS, Sampler

LENGTH, N_WORDS, N_ROWS = 64, 1000, 96


class Steps(transformers.TrainerCallback):  # type: ignore[misc]
    """Notes, after each step, the peak of the resident memory and the chunks."""

    def __init__(self, sampler: Sampler | None) -> None:
        self.sampler = sampler
        self.peaks: list[int] = []
        self.chunks: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.sampler is not None:
            self.peaks.append(self.sampler.peak())
            self.chunks.append(max(one.n_chunks for one in koila.report().programs))


def data(n_rows: int) -> list[dict[str, torch.Tensor]]:
    """Sentences of many lengths, padded, and a class for each."""
    ids = torch.randint(1, N_WORDS, (n_rows, LENGTH))
    mask = (torch.arange(LENGTH) <= torch.randint(8, LENGTH, (n_rows, 1))).long()
    names = ("input_ids", "attention_mask", "labels")
    columns = zip(ids * mask, mask, torch.randint(5, (n_rows,)), strict=True)
    return [dict(zip(names, row, strict=True)) for row in columns]


def train(n_rows: int, *callbacks: Any) -> list[float]:
    """Train a model of its own; return the losses."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=N_WORDS,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=LENGTH,
        num_labels=5,
    )
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=n_rows,
            max_steps=N_STEPS,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            seed=3,
        )
        trainer = transformers.Trainer(
            transformers.BertForSequenceClassification(config),
            args,
            train_dataset=data(N_STEPS * n_rows),
            callbacks=list(callbacks),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def run(kind: str, n_bytes: int) -> dict[str, Any]:
    """Train under a limit of so many bytes beyond what is there before the model is made."""
    train(2)  # what libraries take once is there before anything is counted
    gc.collect()
    found: dict[str, Any] = {}
    if kind == "none":
        found["tensors"] = max(bytes_over_time(lambda: found.update(losses=train(N_ROWS))))
        return found
    limit = koila.memory.budget.taken(torch.device("cpu"), []) + n_bytes
    sampler = Sampler()
    steps = Steps(sampler)
    try:
        found["losses"] = train(N_ROWS, KoilaCallback(memory_limit=limit), steps)
        return {**found, "peaks": steps.peaks, "chunks": steps.chunks}
    finally:
        sampler.close()


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
