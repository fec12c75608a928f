# SPDX-License-Identifier: Apache-2.0
"""A recurrent word language model: the hidden state goes on from batch to batch."""

import argparse
import math
import os
import tempfile
from pydoc_data import topics

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser(description="RNN Language Model")
parser.add_argument("--model", type=str, default="LSTM")
parser.add_argument("--emsize", type=int, default=48)
parser.add_argument("--nhid", type=int, default=48)
parser.add_argument("--nlayers", type=int, default=2)
parser.add_argument("--lr", type=float, default=5)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch_size", type=int, default=96)
parser.add_argument("--bptt", type=int, default=20)
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--tied", action="store_true")
parser.add_argument("--seed", type=int, default=1111)
args = parser.parse_args()

torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Dictionary:
    def __init__(self):
        self.word2idx, self.idx2word = {}, []

    def add_word(self, word):
        if word not in self.word2idx:
            self.idx2word.append(word)
            self.word2idx[word] = len(self.idx2word) - 1
        return self.word2idx[word]


class Segments(Dataset):
    """The text as `batch_size` columns, in segments of `bptt` words; the targets are one later."""

    def __init__(self, ids, batch_size, bptt):
        nbatch = ids.size(0) // batch_size
        self.data = ids[: nbatch * batch_size].view(batch_size, -1)
        self.bptt = bptt
        self.batch_size = batch_size
        self.n_segments = (nbatch - 1) // bptt

    def __len__(self):
        return self.n_segments * self.batch_size

    def __getitem__(self, index):
        segment, column = divmod(index, self.batch_size)
        at = segment * self.bptt
        row = self.data[column]
        return row[at : at + self.bptt], row[at + 1 : at + 1 + self.bptt]


words = " ".join(topics.topics.values()).lower().split()[:24000]
dictionary = Dictionary()
common = {word for word in set(words) if words.count(word) > 20}
ids = torch.tensor([dictionary.add_word(w if w in common else "<unk>") for w in words])
ntokens = len(dictionary.idx2word)
split = len(ids) * 5 // 6
train_loader = DataLoader(Segments(ids[:split], args.batch_size, args.bptt), args.batch_size)
val_loader = DataLoader(Segments(ids[split:], 40, args.bptt), 40)


class RNNModel(nn.Module):
    def __init__(self, rnn_type, ntoken, ninp, nhid, nlayers, dropout=0.5, tie_weights=False):
        super().__init__()
        self.ntoken = ntoken
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = getattr(nn, rnn_type)(ninp, nhid, nlayers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(nhid, ntoken)
        if tie_weights:
            self.decoder.weight = self.encoder.weight
        self.init_weights()
        self.rnn_type, self.nhid, self.nlayers = rnn_type, nhid, nlayers

    def init_weights(self):
        initrange = 0.1
        nn.init.uniform_(self.encoder.weight, -initrange, initrange)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -initrange, initrange)

    def forward(self, input, hidden):
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        output = self.drop(output)
        decoded = self.decoder(output)
        decoded = decoded.view(-1, self.ntoken)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        if self.rnn_type == "LSTM":
            return (
                weight.new_zeros(self.nlayers, bsz, self.nhid),
                weight.new_zeros(self.nlayers, bsz, self.nhid),
            )
        return weight.new_zeros(self.nlayers, bsz, self.nhid)


def repackage_hidden(h):
    """Wraps hidden states in new Tensors, to detach them from their history."""
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


model = RNNModel(
    args.model, ntokens, args.emsize, args.nhid, args.nlayers, args.dropout, args.tied
).to(device)
criterion = nn.NLLLoss()


def evaluate(loader):
    model.eval()
    total_loss, total = 0.0, 0
    hidden = model.init_hidden(40)
    with torch.no_grad():
        for data, targets in loader:
            data, targets = data.to(device), targets.to(device)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total_loss += targets.numel() * criterion(output, targets.view(-1)).item()
            total += targets.numel()
    return total_loss / total


def train(epoch, lr):
    model.train()
    total_loss = torch.zeros((), device=device)
    hidden = model.init_hidden(args.batch_size)
    for batch, (data, targets) in enumerate(train_loader):
        data, targets = data.to(device), targets.to(device)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.detach()
        if batch % 2 == 1:
            cur_loss = total_loss.item() / 2
            print(
                f"| epoch {epoch} | {batch}/{len(train_loader)} batches | lr {lr:02.2f} | "
                f"loss {cur_loss:5.4f} | ppl {math.exp(cur_loss):8.3f}"
            )
            total_loss.zero_()


with tempfile.TemporaryDirectory() as folder:
    for epoch in range(1, args.epochs + 1):
        train(epoch, args.lr)
        val_loss = evaluate(val_loader)
        ppl = math.exp(val_loss)
        print(f"| end of epoch {epoch} | valid loss {val_loss:5.4f} | valid ppl {ppl:.3f}")
        with open(os.path.join(folder, "model.pt"), "wb") as f:
            torch.save(model.state_dict(), f)
