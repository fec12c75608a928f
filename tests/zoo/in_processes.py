# SPDX-License-Identifier: Apache-2.0
"""A training script for `torchrun` and `accelerate launch`: it trains with libraries, whose models
are replicated (ddp) and sharded (fsdp).

    in_processes.py FOLDER (trainer | accelerate | trainer,accelerate) MODE...

Modes: `lazy` uses the Trainer's callback, and makes the loader of a loop lazy; `plain` and
`launched` do nothing of that. What must be equal is written to `FOLDER/MODE.RANK.pt`.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import koila
import zoo.libraries  # noqa: F401 - the libraries can be imported
from allocations import Allocations

import accelerate  # isort: skip

N_STEPS, N_ROWS, N_CHUNKS = 5, 600, 3
SHARD_BLOCKS = {"version": 2, "transformer_layer_cls_to_wrap": ["Block"]}
Made = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.dropout(torch.tanh(self.a(self.norm(x))), 0.2, self.training))


class Net(nn.Module):
    """With statistics of a batch and noise; the Trainer wants the loss of a model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(8, 5)
        self.double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.last(self.blocks(self.norm(self.first(x))))
        return {"loss": F.cross_entropy(scores, labels), "logits": scores}


def rows() -> TensorDataset:
    """Those of all processes."""
    torch.manual_seed(0)
    n_rows = 2 * N_STEPS * N_ROWS
    x = torch.randn(n_rows, 6, dtype=torch.float64)
    return TensorDataset(x, torch.randint(5, (n_rows,)))


def numbers(model: nn.Module, **logged: list[float]) -> Made:
    made = {
        name: getattr(value, "full_tensor", lambda value=value: value)().clone()
        for name, value in model.state_dict().items()
    }
    return made | {name: torch.tensor(values) for name, values in logged.items()}


def pretend_to_have_accelerators(sharding: str) -> None:
    """accelerate shards models on accelerators only: on CPUs it replicates them, without a word."""
    state = accelerate.PartialState(cpu=True)
    assert state.distributed_type == accelerate.DistributedType.MULTI_CPU
    if sharding == "fsdp":
        state.distributed_type = accelerate.DistributedType.MULTI_XPU


def with_trainer(sharding: str, mode: str, folder: Path) -> Made:
    import transformers

    from koila.integrations.transformers import KoilaCallback

    transformers.logging.set_verbosity_error()
    words: Any = {} if sharding == "ddp" else {"fsdp": True, "fsdp_config": SHARD_BLOCKS}
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=N_ROWS,
        num_train_epochs=1,
        max_grad_norm=0.5,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
        seed=3,
        **words,
    )
    pretend_to_have_accelerators(sharding)
    model = Net()
    callbacks: Any = [KoilaCallback(chunks=N_CHUNKS)] if mode == "lazy" else []
    data: Any = [{"x": x, "labels": y} for x, y in rows()]
    trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=callbacks)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    for callback in callbacks:
        of_steps = [ran.n_chunks for ran in callback.summary.last if ran.what == "backward()"]
        assert callback.summary.n_steps == N_STEPS
        assert of_steps == [N_CHUNKS] * N_STEPS * PASSES[sharding]
        assert sharding == "fsdp" or len(callback.summary.last) == N_STEPS
    assert type(trainer.model_wrapped).__name__ == WRAPPED[sharding]
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(log) == N_STEPS
    return numbers(
        model, **{name: [entry[name] for entry in log] for name in ("loss", "grad_norm")}
    )


def with_accelerate(sharding: str, mode: str, folder: Path) -> Made:
    """A loop of one's own, with two batches for each step of the optimizer."""
    pretend_to_have_accelerators(sharding)
    plugin = None
    if sharding == "fsdp":
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
        )
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin
    )
    net = Net()
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    loader: Any = DataLoader(rows(), batch_size=N_ROWS)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    assert type(model).__name__ == WRAPPED[sharding]
    if mode == "lazy":
        loader = koila.lazy(loader)
    torch.manual_seed(4)
    losses, shares, norms = [], [], []
    with koila.config(chunks=N_CHUNKS):
        for x, y in loader:
            assert koila.is_lazy(x) == (mode != "plain")
            with accelerator.accumulate(model):
                made = model(x, y)
                accelerator.backward(made["loss"])
                assert mode == "plain" or koila.report().n_chunks == N_CHUNKS
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(made["loss"].detach(), "mean").item())
            found, wanted = accelerator.gather_for_metrics((made["logits"].argmax(1), y))
            assert len(found) == 2 * N_ROWS
            shares.append((found == wanted).double().mean().item())
    return numbers(net, loss=losses, share=shares, grad_norm=norms)


#: A sharded block, and what is before and behind the blocks, each go back on their own.
PASSES = {"ddp": 1, "fsdp": 4}
#: What a model becomes.
WRAPPED = {"ddp": "DistributedDataParallel", "fsdp": "FSDPNet"}
WITH: dict[str, Callable[[str, str, Path], Made]] = {
    "trainer": with_trainer,
    "accelerate": with_accelerate,
}


def main() -> None:
    folder, libraries, *modes = sys.argv[1:]
    signal.alarm(60)  # processes that wait for each other
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for mode in modes:
        made = {}
        for library in libraries.split(","):
            for sharding in WRAPPED:
                accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
                memory = Allocations()
                with memory:
                    pass
                with memory:
                    made[library, sharding] = WITH[library](sharding, mode, Path(folder))
                made[library, sharding]["peak"] = torch.tensor(memory.peak)
        torch.save(made, Path(folder) / f"{mode}.{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
