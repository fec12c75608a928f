# SPDX-License-Identifier: Apache-2.0
"""Training with frameworks: plain, and with koila under half of the memory that plain takes.

    PYTHONPATH=python:tests .venv-zoo/bin/python -m benchmarks.bench_frameworks

One network, four steps, the framework's own loop. "Lines" counts the lines that koila adds, imports
too; `python -m koila` needs none. "Difference" is the largest of the trained parameters and
buffers in float64, in four chunks, over the largest entry. "Peak" is what torch's allocator hands
out at most, parameters too, and "time" the time from one optimizer step to the next; both with
koila over plain, in float32, under a limit that is a share of plain's peak. "By hand" is the time
of plain torch that accumulates gradients over as many chunks, over plain. DDP and FSDP2 train with
two processes, one thread each, on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
import random
import socket
import statistics
import time
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

import koila
from benchmarks.bench import interleave, parser, prepare, publish, ratio, table
from benchmarks.bench_limits import peak_of
from koila.memory import budget, storages
from koila.reporting import reports
from koila.summary import Summary
from zoo import libraries  # noqa: F401 - the libraries can be imported

N_STEPS, N_ROWS, WIDTH, N_CLASSES = 4, 1024, 256, 10
N_CHUNKS = 4
#: Ends the lines that koila needs.
MARK = "  # koila"

LOOP = """
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
loader = DataLoader(data, batch_size=N_ROWS)
{prepare}
import koila  # koila
loader = koila.lazy(loader)  # koila
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(wrapped(x), y)
    {backward}
    optimizer.step()
"""

LIGHTNING = """
import lightning.pytorch as pl
from koila.integrations.lightning import KoilaCallback  # koila

class Classifier(pl.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, number):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)

trainer = pl.Trainer(
    callbacks=[KoilaCallback()],  # koila
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(model), DataLoader(data, batch_size=N_ROWS))
"""

TRAINER = """
import tempfile
from transformers import Trainer, TrainingArguments
from koila.integrations.transformers import KoilaCallback  # koila

class Classifier(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, labels):
        scores = self.net(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}

rows = [{"x": x, "labels": y} for x, y in data]
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=N_ROWS,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    Trainer(
        Classifier(model),
        args,
        train_dataset=rows,
        callbacks=[KoilaCallback()],  # koila
    ).train()
"""

IGNITE = """
from ignite.engine import create_supervised_trainer

optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy)
loader = DataLoader(data, batch_size=N_ROWS)
import koila  # koila
loader = koila.lazy(loader)  # koila
trainer.run(loader, max_epochs=1)
"""

SKORCH = """
from skorch import NeuralNetClassifier
import koila  # koila

class Classifier(NeuralNetClassifier):
    def get_iterator(self, dataset, training=False):
        loader = super().get_iterator(dataset, training)
        loader = koila.lazy(loader)  # koila
        return loader

net = Classifier(
    model,
    criterion=nn.CrossEntropyLoss,
    optimizer=torch.optim.AdamW,
    lr=1e-3,
    batch_size=N_ROWS,
    max_epochs=1,
    train_split=None,
    iterator_train__shuffle=False,
    verbose=0,
)
net.fit(*(tensor.numpy() for tensor in data.tensors))
model.load_state_dict(net.module_.state_dict())
"""


def _loop(prepare: str = "wrapped = model", backward: str = "loss.backward()") -> str:
    return LOOP.format(prepare=prepare, backward=backward)


SCRIPTS = {
    "torch": _loop(),
    "transformers' Trainer": TRAINER,
    "accelerate": _loop(
        "from accelerate import Accelerator\n"
        "accelerator = Accelerator(cpu=True)\n"
        "wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        "accelerator.backward(loss)",
    ),
    "Lightning": LIGHTNING,
    "Fabric": _loop(
        "from lightning.fabric import Fabric\n"
        "fabric = Fabric(accelerator='cpu', devices=1)\n"
        "wrapped, optimizer = fabric.setup(model, optimizer)\n"
        "loader = fabric.setup_dataloaders(loader)",
        "fabric.backward(loss)",
    ),
    "Ignite": IGNITE,
    "skorch": SKORCH,
}

#: fully_shard() replaces the parameters of the model, so the script makes a new optimizer after it.
_SHARDED = """
from torch.distributed.fsdp import fully_shard
for layer in model:
    fully_shard(layer)
wrapped = fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
"""
PROCESSES = {
    "DDP, 2 processes": _loop("wrapped = nn.parallel.DistributedDataParallel(model)"),
    "FSDP2, 2 processes": _loop(_SHARDED),
}
#: Of plain's peak; FSDP2 keeps the values between its modules for the whole batch.
SHARES = {"FSDP2, 2 processes": 0.6}


class Layer(nn.Module):
    """A residual block with dropout: what it keeps for backward is many times its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        wide = nn.functional.gelu(self.up(self.norm(x)))
        made: Tensor = x + self.down(nn.functional.dropout(wide, 0.1, self.training))
        return made


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Layer() for _ in range(4)), nn.Linear(WIDTH, N_CLASSES))


def make_data(rank: int = 0) -> TensorDataset:
    torch.manual_seed(2 + rank)
    n_rows = N_STEPS * N_ROWS
    return TensorDataset(torch.randn(n_rows, WIDTH), torch.randint(N_CLASSES, (n_rows,)))


def lines_of(text: str) -> int:
    return sum(line.endswith(MARK) for line in text.splitlines())


def train(text: str, data: TensorDataset, with_koila: bool) -> tuple[nn.Module, list[float]]:
    """Run a script; return its model, and when each optimizer step was done."""
    model = make_model()
    names: dict[str, Any] = {"__name__": "script", "torch": torch, "nn": nn}
    names |= {"DataLoader": torch.utils.data.DataLoader, "N_ROWS": N_ROWS}
    names |= {"model": model, "data": data}
    if not with_koila:
        text = "\n".join(line for line in text.splitlines() if not line.endswith(MARK))
    ends: list[float] = []
    random.seed(0)
    torch.manual_seed(0)
    handle = register_optimizer_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    try:
        exec(compile(text, "train.py", "exec"), names)
    finally:
        handle.remove()
    assert len(ends) == N_STEPS
    return model, ends


def _whole(tensor: Any) -> Tensor:
    made: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return made


def difference(text: str, data: TensorDataset) -> float:
    """Train in float64, plain and in chunks; return the largest difference of the two models, over
    their largest entry."""
    torch.set_default_dtype(torch.float64)
    double = TensorDataset(data.tensors[0].double(), data.tensors[1])
    try:
        want = train(text, double, False)[0].state_dict()
        summary = Summary()
        with koila.config(chunks=N_CHUNKS), reports.observed_by(summary):
            got = train(text, double, True)[0].state_dict()
        assert summary.most_chunks == N_CHUNKS
    finally:
        torch.set_default_dtype(torch.float32)
    pairs = [(_whole(want[name]), _whole(got[name])) for name in want]
    largest = max(float(one.abs().max()) for one, _ in pairs)
    return max(float((one - other).abs().max()) for one, other in pairs) / largest


def seconds_of_a_step(text: str, data: TensorDataset, limit: int | None) -> float:
    gc.collect()
    with koila.config(memory_limit=limit):
        ends = train(text, data, limit is not None)[1]
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


def seconds_by_hand(data: TensorDataset, n_chunks: int) -> float:
    """Return the time of a step of plain torch that accumulates gradients over chunks."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    ends: list[float] = []
    for batch in torch.utils.data.DataLoader(data, batch_size=N_ROWS):
        optimizer.zero_grad()
        for x, y in zip(*(tensor.chunk(n_chunks) for tensor in batch), strict=True):
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum") / N_ROWS
            loss.backward()
        optimizer.step()
        ends.append(time.perf_counter())
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


def agreed(number: int) -> int:
    """The first process's number."""
    if not torch.distributed.is_initialized():
        return number
    box = torch.tensor(number)
    torch.distributed.broadcast(box, 0)
    return int(box)


def row(name: str, text: str, rounds: int) -> tuple[str, ...]:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    data, share = make_data(rank), SHARES.get(name, 0.5)
    gap = difference(text, data)
    plain = agreed(peak_of(partial(train, text, data, False)))
    gc.collect()
    storages.look_again(True)
    limit = agreed(budget.taken(torch.device("cpu"), []) + int(share * plain))
    summary = Summary()
    with koila.config(memory_limit=limit), reports.observed_by(summary):
        peak = peak_of(partial(train, text, data, True))
    variants = {
        "plain": partial(seconds_of_a_step, text, data, None),
        "koila": partial(seconds_of_a_step, text, data, limit),
    }
    is_alone = not torch.distributed.is_initialized()
    if is_alone:
        variants["by hand"] = partial(seconds_by_hand, data, summary.most_chunks)
    times = interleave(variants, rounds)
    return (
        name,
        str(lines_of(text)),
        f"{gap:.0e}",
        str(summary.most_chunks),
        f"{plain / 2**20:.0f} MiB",
        f"{share}",
        f"{peak / plain:.2f}",
        f"{1e3 * statistics.median(times['plain']):.0f} ms",
        f"{ratio(times, 'koila', 'plain'):.2f}",
        f"{ratio(times, 'by hand', 'plain'):.2f}" if is_alone else "",
    )


def _process(rank: int, port: int, rounds: int, made: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        lines = [row(name, text, rounds) for name, text in PROCESSES.items()]
    except Exception as error:
        made.put(error)
        raise
    made.put(lines)
    torch.distributed.destroy_process_group()


def rows_of_processes(rounds: int) -> list[tuple[str, ...]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    made = context.Queue()
    processes = [
        context.Process(target=_process, args=(rank, port, rounds, made)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    lines = made.get(timeout=600)
    if isinstance(lines, Exception):
        for process in processes:
            process.kill()
        raise lines
    for process in processes:
        process.join()
    return [*lines]


def all_rows(args: argparse.Namespace) -> list[tuple[str, ...]]:
    names = args.only or [*SCRIPTS, "processes"]
    rows = [row(name, SCRIPTS[name], args.rounds) for name in names if name in SCRIPTS]
    return rows + (rows_of_processes(args.rounds) if "processes" in names else [])


def main() -> None:
    warnings.simplefilter("ignore")
    made = parser(__doc__)
    made.add_argument("--only", action="append", choices=[*SCRIPTS, "processes"], help="these rows")
    args = made.parse_args()
    prepare(args)
    heads = (
        "",
        "lines",
        "difference",
        "chunks",
        "plain's peak",
        "limit",
        "peak",
        "plain's step",
        "time",
        "by hand",
    )
    publish(args, "Frameworks", [table(heads, all_rows(args))])


if __name__ == "__main__":
    main()
