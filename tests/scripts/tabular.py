# SPDX-License-Identifier: Apache-2.0
"""Tabular data: embeddings of categories beside numbers, AUC, early stopping, the best weights."""

import argparse
import copy

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, random_split


class Table(Dataset):
    SIZES = (7, 12, 4, 30)

    def __init__(self, n):
        self.cats = torch.stack([torch.randint(size, (n,)) for size in self.SIZES], 1)
        self.conts = torch.randn(n, 6)
        score = self.conts[:, 0] * (self.cats[:, 0] - 3) + self.conts[:, 1:3].sum(1)
        score += (self.cats[:, 3] % 5 - 2) * 0.5
        self.y = (score + torch.randn(n) > 0).to(torch.get_default_dtype())

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.cats[i], self.conts[i], self.y[i]


class TabularModel(nn.Module):
    def __init__(self, sizes, n_cont, layers, p=0.2):
        super().__init__()
        self.embeds = nn.ModuleList(
            [nn.Embedding(size, min(50, (size + 1) // 2)) for size in sizes]
        )
        n_emb = sum(e.embedding_dim for e in self.embeds)
        self.emb_drop = nn.Dropout(p)
        self.bn_cont = nn.BatchNorm1d(n_cont)
        parts = []
        n_in = n_emb + n_cont
        for n_out in layers:
            parts += [nn.Linear(n_in, n_out), nn.ReLU(True), nn.BatchNorm1d(n_out), nn.Dropout(p)]
            n_in = n_out
        parts.append(nn.Linear(n_in, 1))
        self.layers = nn.Sequential(*parts)

    def forward(self, x_cat, x_cont):
        x = torch.cat([e(x_cat[:, i]) for i, e in enumerate(self.embeds)], 1)
        x = self.emb_drop(x)
        x = torch.cat([x, self.bn_cont(x_cont)], 1)
        return self.layers(x).squeeze(1)


def roc_auc(scores, labels):
    order = scores.argsort()
    ranks = torch.empty_like(scores)
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=scores.dtype)
    positive = labels == 1
    n_pos, n_neg = positive.sum(), (~positive).sum()
    return ((ranks[positive].sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg)).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--patience", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()
    torch.manual_seed(11)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_set, val_set = random_split(Table(5000), [4300, 700])
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
    val_loader = DataLoader(val_set, args.batch_size)
    model = TabularModel(Table.SIZES, 6, [200, 100]).to(device)
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(1.2, device=device))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    best, best_state, waited = 0.0, None, 0
    for epoch in range(args.epochs):
        model.train()
        losses = []
        for cats, conts, y in train_loader:
            cats, conts, y = cats.to(device), conts.to(device), y.to(device)
            loss = criterion(model(cats, conts), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        scores, labels = [], []
        with torch.no_grad():
            for cats, conts, y in val_loader:
                scores.append(model(cats.to(device), conts.to(device)).sigmoid().cpu())
                labels.append(y)
        auc = roc_auc(torch.cat(scores), torch.cat(labels))
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.6f} auc {auc:.6f}")
        if auc > best:
            best, best_state, waited = auc, copy.deepcopy(model.state_dict()), 0
        else:
            waited += 1
            if waited > args.patience:
                print(f"early stop after epoch {epoch}")
                break
    model.load_state_dict(best_state)
    print(f"best auc {best:.6f}")


if __name__ == "__main__":
    main()
