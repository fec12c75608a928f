# SPDX-License-Identifier: Apache-2.0
"""Digits with Lightning: a validation loop, metrics, a monitored checkpoint, early stopping."""

import logging
import tempfile

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


class DigitsData(L.LightningDataModule):
    def __init__(self, batch_size=160):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        digits = load_digits()
        images = torch.tensor(digits.images / 16.0, dtype=torch.get_default_dtype())
        data = TensorDataset(images.unsqueeze(1)[:700], torch.tensor(digits.target)[:700])
        generator = torch.Generator().manual_seed(42)
        self.train, self.val, self.test = random_split(data, [400, 150, 150], generator)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=self.batch_size)


class LitDigits(L.LightningModule):
    def __init__(self, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(512, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(10, average="micro")

    def forward(self, x):
        return F.log_softmax(self.model(x), dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.nll_loss(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.nll_loss(logits, y)
        self.accuracy(logits.argmax(dim=1), y)
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_acc", self.accuracy, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("test_loss", F.nll_loss(logits, y))
        self.log("test_acc", (logits.argmax(1) == y).float().mean())

    def on_train_epoch_end(self):
        metrics = self.trainer.callback_metrics
        print({name: f"{value.item():.5f}" for name, value in sorted(metrics.items())})

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=6)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def main():
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    L.seed_everything(7)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}")
        trainer = L.Trainer(
            max_epochs=2,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[checkpoint, EarlyStopping("val_loss", patience=3)],
            gradient_clip_val=1.0,
        )
        model, data = LitDigits(), DigitsData()
        trainer.fit(model, data)
        print(f"best: {checkpoint.best_model_score.item():.5f}")
        (result,) = trainer.test(model, data, ckpt_path="best", verbose=False)
        print({name: round(value, 4) for name, value in result.items()})


if __name__ == "__main__":
    main()
