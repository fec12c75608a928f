# SPDX-License-Identifier: Apache-2.0
"""A plain loop with Lightning Fabric: a mixer network, clipping, a step schedule, a checkpoint."""

import argparse
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.fabric import Fabric, seed_everything
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Mixer(nn.Module):
    def __init__(self, patches=16, dim=48, classes=6):
        super().__init__()
        self.embed = nn.Linear(48, dim)
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(4)])
        self.tokens = nn.ModuleList([nn.Linear(patches, patches) for _ in range(2)])
        self.channels = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))] * 2
        )
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = F.unfold(x, 4, stride=4).transpose(1, 2)
        x = self.embed(x)
        for i in range(2):
            x = x + self.tokens[i](self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.channels[i](self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


def run(hparams):
    fabric = Fabric(accelerator="cpu", devices=1)
    seed_everything(hparams.seed, verbose=False)
    target = torch.randint(6, (500,))
    images = torch.randn(6, 3, 16, 16)[target] + torch.randn(500, 3, 16, 16)
    train = TensorDataset(images[:400], target[:400])
    test = TensorDataset(images[400:], target[400:])
    train_loader = DataLoader(train, batch_size=hparams.batch_size, shuffle=True)
    test_loader = DataLoader(test, batch_size=hparams.batch_size)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)
    model = Mixer()
    optimizer = torch.optim.Adam(model.parameters(), lr=hparams.lr)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=hparams.gamma)
    for epoch in range(1, hparams.epochs + 1):
        model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            output = model(data)
            loss = F.cross_entropy(output, target)
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            print(f"Epoch {epoch} [{batch_idx}] loss {loss.item():.6f} norm {norm.item():.5f}")
        scheduler.step()
        model.eval()
        test_loss, correct = 0, 0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                test_loss += F.cross_entropy(output, target, reduction="sum")
                correct += (output.argmax(1) == target).sum()
        test_loss = fabric.all_reduce(test_loss).item() / len(test_loader.dataset)
        fabric.print(f"test loss {test_loss:.5f} correct {correct.item()}")
    with tempfile.TemporaryDirectory() as folder:
        fabric.save(os.path.join(folder, "mixer.ckpt"), {"model": model, "epoch": epoch})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fabric Example")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    run(parser.parse_args())
