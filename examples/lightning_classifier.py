# SPDX-License-Identifier: Apache-2.0
"""An image classifier whose batch does not fit, with Lightning's Trainer and a callback.

    python examples/lightning_classifier.py --memory-limit 16MiB --steps 12

Lightning runs the training loop. The callback makes the batches of its loaders lazy.
"""

import argparse

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from koila.integrations.lightning import KoilaCallback


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(512, 10),
        )

    def training_step(self, batch, number):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def images(n: int) -> TensorDataset:
    """Return noisy pictures of ten patterns."""
    patterns, labels = torch.randn(10, 3, 4, 4), torch.randint(10, (n,))
    clean = F.interpolate(patterns[labels], size=(16, 16))
    return TensorDataset(clean + torch.randn_like(clean), labels)


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--memory-limit", default="16MiB", help="empty: use free memory")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    data = images(args.steps * args.batch_size)
    callback = KoilaCallback(args.memory_limit or None)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[callback],  # the one line
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(data, args.batch_size, shuffle=True))

    loss = trainer.callback_metrics["loss"].item()
    assert callback.summary is not None
    print("\n".join(callback.summary.lines()))
    print(f"final loss: {loss:.6f}")
    return loss


if __name__ == "__main__":
    main()
