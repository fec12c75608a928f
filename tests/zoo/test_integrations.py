# SPDX-License-Identifier: Apache-2.0
"""koila inside frameworks: five steps with chunks forced equal the framework's own."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import koila
from zoo import libraries  # noqa: F401 - the libraries can be imported

pytestmark = pytest.mark.filterwarnings("ignore")
N_STEPS, N_ROWS = 5, 12


def data() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(
        torch.randn(N_STEPS * N_ROWS, 6, dtype=torch.float64),
        torch.randint(5, (N_STEPS * N_ROWS,)),
    )


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5)
    ).double()


def assert_equal(got: nn.Module, want: nn.Module) -> None:
    for (name, value), other in zip(
        got.state_dict().items(), want.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-11, msg=name)


def test_trainer_of_transformers(tmp_path: Path) -> None:
    """With the callback; and the report is of a training step."""
    transformers = pytest.importorskip("transformers")
    from koila.integrations.transformers import KoilaCallback

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            scores = self.net(x)
            return {"loss": F.cross_entropy(scores, labels), "logits": scores}

    def train(*callbacks: Any) -> nn.Module:
        rows = [{"x": x, "labels": y} for x, y in data()]
        args = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=N_ROWS,
            num_train_epochs=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            seed=3,
        )
        trained = Named()
        transformers.Trainer(trained, args, train_dataset=rows, callbacks=[*callbacks]).train()
        return trained

    want = train()
    callback = KoilaCallback(chunks=3)
    assert_equal(train(callback), want)
    _check(callback)
    assert koila.config() is not None and not koila.is_lazy(next(iter(DataLoader(data())))[0])


def _check(callback: Any) -> None:
    summary = callback.summary
    assert summary.n_steps == N_STEPS
    assert summary.most_chunks == 3
    assert any(f"{N_STEPS} optimizer steps" in line for line in summary.lines())
    assert any(ran.what == "backward()" and ran.n_chunks == 3 for ran in summary.last)


def test_trainer_of_lightning() -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from koila.integrations.lightning import KoilaCallback

    class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, number: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    def train(*callbacks: Any) -> nn.Module:
        lightning.seed_everything(2, verbose=False)
        trained = Lit()
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[*callbacks],
        )
        trainer.fit(trained, DataLoader(data(), batch_size=N_ROWS, shuffle=True))
        return trained

    want = train()
    callback = KoilaCallback(chunks=3)
    assert_equal(train(callback), want)
    _check(callback)


@pytest.mark.parametrize("is_lazy_first", [False, True])
@pytest.mark.parametrize("framework", ["plain", "accelerate", "fabric"])
def test_loops_of_ones_own(framework: str, is_lazy_first: bool) -> None:
    """koila.lazy(loader) before or after the framework has prepared it."""
    pytest.importorskip({"fabric": "lightning.fabric"}.get(framework, framework)) if (
        framework != "plain"
    ) else None

    def train(is_lazy: bool) -> tuple[nn.Module, int]:
        net = model()
        optimizer: Any = torch.optim.SGD(net.parameters(), 0.1)
        loader: Any = DataLoader(data(), batch_size=N_ROWS)
        if is_lazy and is_lazy_first:
            loader = koila.lazy(loader)
        wrapped: Any = net
        backward: Any = Tensor.backward
        if framework == "accelerate":
            from accelerate import Accelerator

            accelerator = Accelerator(cpu=True)
            wrapped, optimizer, loader = accelerator.prepare(net, optimizer, loader)
            backward = accelerator.backward
        elif framework == "fabric":
            from lightning.fabric import Fabric

            fabric = Fabric(accelerator="cpu", devices=1)
            wrapped, optimizer = fabric.setup(net, optimizer)
            loader = fabric.setup_dataloaders(loader)
            backward = fabric.backward
        if is_lazy and not is_lazy_first:
            loader = koila.lazy(loader)
        torch.manual_seed(4)
        chunks = 0
        with koila.config(chunks=3) if is_lazy else contextlib.nullcontext():
            for x, y in loader:
                assert koila.is_lazy(x) == is_lazy
                optimizer.zero_grad()
                backward(F.cross_entropy(wrapped(x), y))
                optimizer.step()
                chunks = max(chunks, koila.report().n_chunks) if is_lazy else 0
        return net, chunks

    want, _ = train(False)
    got, chunks = train(True)
    assert chunks == 3
    assert_equal(got, want)
