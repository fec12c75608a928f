# SPDX-License-Identifier: Apache-2.0
"""Sentiment of sentences of unequal length: a bidirectional LSTM over packed sequences."""

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset


class Reviews(Dataset):
    """Words below 50 are kind, those above are not; the most decide."""

    def __init__(self, n, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 30, (n,), generator=generator)
        self.texts = [
            torch.randint(1, 101, (length,), generator=generator) for length in lengths.tolist()
        ]
        self.labels = [int((text <= 50).sum() * 2 > len(text)) for text in self.texts]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index], self.labels[index]


def collate_batch(batch):
    text_list, label_list, lengths = [], [], []
    for text, label in batch:
        text_list.append(text)
        label_list.append(label)
        lengths.append(text.size(0))
    label_list = torch.tensor(label_list, dtype=torch.get_default_dtype())
    return pad_sequence(text_list, batch_first=True), label_list, torch.tensor(lengths)


class RNN(nn.Module):
    def __init__(self, vocab_size, embed_dim, rnn_hidden_size, fc_hidden_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embed_dim, padding_idx=0)
        self.rnn = nn.LSTM(embed_dim, rnn_hidden_size, batch_first=True, bidirectional=True)
        self.fc1 = nn.Linear(rnn_hidden_size * 4, fc_hidden_size)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(fc_hidden_size, 1)
        self.sigmoid = nn.Sigmoid()

    def forward(self, text, lengths):
        out = self.embedding(text)
        out = pack_padded_sequence(out, lengths.cpu(), enforce_sorted=False, batch_first=True)
        out, (hidden, _) = self.rnn(out)
        out, _ = pad_packed_sequence(out, batch_first=True)
        mean = out.sum(1) / lengths.to(out.device).unsqueeze(1)
        out = torch.cat((hidden[-2, :, :], hidden[-1, :, :], mean), dim=1)
        return self.sigmoid(self.fc2(self.relu(self.fc1(out))))


def train(model, dataloader, loss_fn, optimizer, device):
    model.train()
    total_acc, total_loss = 0, 0
    for text_batch, label_batch, lengths in dataloader:
        text_batch, label_batch = text_batch.to(device), label_batch.to(device)
        optimizer.zero_grad()
        pred = model(text_batch, lengths)[:, 0]
        loss = loss_fn(pred, label_batch)
        loss.backward()
        optimizer.step()
        total_acc += ((pred >= 0.5).float() == label_batch).float().sum().item()
        total_loss += loss.item() * label_batch.size(0)
    return total_acc / len(dataloader.dataset), total_loss / len(dataloader.dataset)


def evaluate(model, dataloader, loss_fn, device):
    model.eval()
    total_acc, total_loss = 0, 0
    with torch.no_grad():
        for text_batch, label_batch, lengths in dataloader:
            text_batch, label_batch = text_batch.to(device), label_batch.to(device)
            pred = model(text_batch, lengths)[:, 0]
            loss = loss_fn(pred.float(), label_batch.float())
            total_acc += ((pred >= 0.5).float() == label_batch).float().sum().item()
            total_loss += loss.item() * label_batch.size(0)
    return total_acc / len(dataloader.dataset), total_loss / len(dataloader.dataset)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=160)
    args = parser.parse_args()
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_dl = DataLoader(
        Reviews(400, 1), batch_size=args.batch_size, shuffle=True, collate_fn=collate_batch
    )
    test_dl = DataLoader(Reviews(100, 2), batch_size=args.batch_size, collate_fn=collate_batch)
    model = RNN(101, 24, 32, 64).to(device)
    loss_fn = nn.BCELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for epoch in range(args.epochs):
        acc_train, loss_train = train(model, train_dl, loss_fn, optimizer, device)
        acc_valid, loss_valid = evaluate(model, test_dl, loss_fn, device)
        print(
            f"Epoch {epoch} accuracy: {acc_train:.4f} val_accuracy: {acc_valid:.4f} "
            f"loss: {loss_train:.5f} val_loss: {loss_valid:.4f}"
        )
