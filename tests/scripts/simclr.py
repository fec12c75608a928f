# SPDX-License-Identifier: Apache-2.0
"""Contrastive learning of pictures after SimCLR: two views of each, NT-Xent, cosine schedule."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class TwoViews(Dataset):
    def __init__(self, n):
        self.images = torch.rand(n, 3, 4, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)

    def __len__(self):
        return len(self.images)

    def view(self, image):
        top, left = torch.randint(4, (2,)).tolist()
        image = image[:, top : top + 12, left : left + 12]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return image * (0.6 + 0.8 * torch.rand(3, 1, 1))

    def __getitem__(self, index):
        return [self.view(self.images[index]) for _ in range(2)], index % 10


class ResNetSimCLR(nn.Module):
    def __init__(self, out_dim):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.fc = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, out_dim))

    def forward(self, x):
        return self.fc(self.backbone(x))


class SimCLR:
    def __init__(self, args, model, optimizer, scheduler):
        self.args, self.model, self.optimizer, self.scheduler = args, model, optimizer, scheduler
        self.criterion = torch.nn.CrossEntropyLoss().to(args.device)

    def info_nce_loss(self, features):
        n = features.shape[0] // 2
        labels = torch.cat([torch.arange(n) for _ in range(2)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        labels = labels.to(self.args.device)
        features = F.normalize(features, dim=1)
        similarity_matrix = torch.matmul(features, features.T)
        mask = torch.eye(labels.shape[0], dtype=torch.bool).to(self.args.device)
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
        positives = similarity_matrix[labels.bool()].view(labels.shape[0], -1)
        negatives = similarity_matrix[~labels.bool()].view(similarity_matrix.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1)
        labels = torch.zeros(logits.shape[0], dtype=torch.long).to(self.args.device)
        return logits / self.args.temperature, labels

    def train(self, train_loader):
        for epoch in range(self.args.epochs):
            for images, _ in train_loader:
                images = torch.cat(images, dim=0)
                images = images.to(self.args.device)
                features = self.model(images)
                logits, labels = self.info_nce_loss(features)
                loss = self.criterion(logits, labels)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                top1 = (logits.argmax(1) == labels).double().mean()
                lr = self.scheduler.get_last_lr()[0]
                print(f"loss {loss.item():.6f} top1 {top1.item():.4f} lr {lr:.6f}")
            self.scheduler.step()
            print(f"Epoch: {epoch}\tLoss: {loss:.5f}\tTop1 accuracy: {100 * top1:.3f}")


def main():
    parser = argparse.ArgumentParser(description="PyTorch SimCLR")
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("-b", "--batch-size", default=128, type=int)
    parser.add_argument("--lr", default=0.0003, type=float)
    parser.add_argument("--wd", default=1e-4, type=float)
    parser.add_argument("--out_dim", default=16, type=int)
    parser.add_argument("--temperature", default=0.07, type=float)
    args = parser.parse_args()
    torch.manual_seed(0)
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(TwoViews(300), batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = ResNetSimCLR(args.out_dim).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, weight_decay=args.wd)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader))
    SimCLR(args, model, optimizer, scheduler).train(loader)


if __name__ == "__main__":
    main()
