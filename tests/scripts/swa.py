# SPDX-License-Identifier: Apache-2.0
"""Stochastic weight averaging: the averaged model gets new statistics with update_bn."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 5),
    )


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    loss, hits, n = 0.0, 0, 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        logits = model(x)
        loss += F.cross_entropy(logits, y, reduction="sum").item()
        hits += (logits.argmax(1) == y).sum().item()
        n += len(y)
    return loss / n, hits / n


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--swa-start", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=160)
    args = parser.parse_args()
    torch.manual_seed(3)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = torch.randint(5, (480,))
    images = torch.randn(5, 1, 12, 12)[target] + 0.8 * torch.randn(480, 1, 12, 12)
    data = TensorDataset(images, target)
    train_set, test_set = torch.utils.data.random_split(data, [330, 150])
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, args.batch_size)

    model = make_model().to(device)
    swa_model = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    swa_scheduler = SWALR(optimizer, anneal_epochs=2, swa_lr=0.02)
    for epoch in range(args.epochs):
        model.train()
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if epoch >= args.swa_start:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
        val_loss, accuracy = evaluate(model, test_loader, device)
        print(f"epoch {epoch}: loss {loss.item():.6f} val {val_loss:.6f} accuracy {accuracy:.4f}")
    update_bn(train_loader, swa_model, device=device)
    val_loss, accuracy = evaluate(swa_model, test_loader, device)
    print(f"averaged: val {val_loss:.6f} accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
