# SPDX-License-Identifier: Apache-2.0
"""An LSTM that predicts the next word, on packed sequences of different lengths.

    python examples/lstm.py --memory-limit 48MiB --steps 10

The loss is a mean over all words that are not padding. Small batches have different numbers of
words, so the mean of their means is a different number. koila counts the words of the whole batch.
"""

import argparse
from collections import Counter
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import koila

PADDING, UNKNOWN = 0, 1


def sentences(n_words: int) -> list[torch.Tensor]:
    """Return the sentences of Python's help texts, as numbers of their most frequent words."""
    text = " ".join(" ".join(topics.topics.values()).lower().split())
    words = [sentence.split()[:40] for sentence in text.split(". ")[:2000]]
    counted = Counter(word for sentence in words for word in sentence)
    frequent = [word for word, _ in counted.most_common(n_words - 2)]
    number_of = {word: number for number, word in enumerate(frequent, 2)}
    long_enough = [sentence for sentence in words if len(sentence) > 3]
    return [torch.tensor([number_of.get(w, UNKNOWN) for w in sentence]) for sentence in long_enough]


class Model(nn.Module):
    def __init__(self, n_words, width=64):
        super().__init__()
        self.embedding = nn.Embedding(n_words, width, padding_idx=PADDING)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, n_words)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.embedding(x), lengths, True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(hidden)


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--words", type=int, default=1000, help="size of the vocabulary")
    parser.add_argument("--memory-limit", default="48MiB", help="empty: use free memory")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    if args.memory_limit:
        koila.config(memory_limit=args.memory_limit)
    data = sentences(args.words)
    model = Model(args.words)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    for step in range(args.steps):
        chosen = [data[i] for i in torch.randint(len(data), (args.batch_size,)).tolist()]
        x, lengths = pad_sequence(chosen, True, PADDING), torch.tensor([len(s) - 1 for s in chosen])
        x = koila.lazy(x, batch=0)  # the one line; the lengths stay plain, since packing reads them
        logits = model(x[:, :-1], lengths)
        loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), ignore_index=PADDING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    print(koila.report())
    print(f"final loss: {loss.item():.6f}")
    return loss.item()


if __name__ == "__main__":
    main()
