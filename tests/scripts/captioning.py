# SPDX-License-Identifier: Apache-2.0
"""Image captioning: a convolutional encoder, a recurrent decoder over packed captions."""

import argparse
import os
import tempfile

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, Dataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WORDS = "<pad> <start> <end> a red green blue square left right of top bottom the picture".split()
VOCAB = {word: i for i, word in enumerate(WORDS)}


class Scenes(Dataset):
    def __init__(self, n):
        self.what = torch.randint(3, (n,))
        self.where = torch.randint(4, (n,))
        self.noise = torch.Generator().manual_seed(4)

    def __len__(self):
        return len(self.what)

    def __getitem__(self, index):
        color, place = int(self.what[index]), int(self.where[index])
        image = torch.full((3, 20, 20), 0.1)
        rows = (slice(4, 16), slice(4, 16), slice(0, 8), slice(12, 20))[place]
        columns = (slice(0, 8), slice(12, 20), slice(4, 16), slice(4, 16))[place]
        image[color, rows, columns] = 1.0
        caption = ["<start>", "a", WORDS[4 + color], "square"]
        caption += [["left"], ["right"], ["top", "of", "the", "picture"], ["bottom"]][place]
        caption.append("<end>")
        return image, torch.tensor([VOCAB[word] for word in caption])


def collate_fn(data):
    data.sort(key=lambda x: len(x[1]), reverse=True)
    images, captions = zip(*data, strict=True)
    images = torch.stack(images, 0)
    lengths = [len(cap) for cap in captions]
    targets = torch.zeros(len(captions), max(lengths)).long()
    for i, cap in enumerate(captions):
        end = lengths[i]
        targets[i, :end] = cap[:end]
    return images, targets, lengths


class EncoderCNN(nn.Module):
    def __init__(self, embed_size):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
        )
        self.linear = nn.Linear(256, embed_size)
        self.bn = nn.BatchNorm1d(embed_size, momentum=0.01)

    def forward(self, images):
        features = self.features(images)
        features = features.reshape(features.size(0), -1)
        return self.bn(self.linear(features))


class DecoderRNN(nn.Module):
    def __init__(self, embed_size, hidden_size, vocab_size, num_layers, max_seq_length=8):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, embed_size)
        self.lstm = nn.LSTM(embed_size, hidden_size, num_layers, batch_first=True)
        self.linear = nn.Linear(hidden_size, vocab_size)
        self.max_seg_length = max_seq_length

    def forward(self, features, captions, lengths):
        embeddings = self.embed(captions)
        embeddings = torch.cat((features.unsqueeze(1), embeddings), 1)
        packed = pack_padded_sequence(embeddings, lengths, batch_first=True)
        hiddens, _ = self.lstm(packed)
        outputs = self.linear(hiddens[0])
        return outputs

    def sample(self, features, states=None):
        sampled_ids = []
        inputs = features.unsqueeze(1)
        for _ in range(self.max_seg_length):
            hiddens, states = self.lstm(inputs, states)
            outputs = self.linear(hiddens.squeeze(1))
            _, predicted = outputs.max(1)
            sampled_ids.append(predicted)
            inputs = self.embed(predicted)
            inputs = inputs.unsqueeze(1)
        return torch.stack(sampled_ids, 1)


def main(args):
    torch.manual_seed(args.seed)
    data_loader = DataLoader(
        Scenes(500), batch_size=args.batch_size, shuffle=True, collate_fn=collate_fn
    )
    encoder = EncoderCNN(args.embed_size).to(device)
    decoder = DecoderRNN(args.embed_size, args.hidden_size, len(VOCAB), args.num_layers).to(device)
    criterion = nn.CrossEntropyLoss()
    params = list(decoder.parameters()) + list(encoder.parameters())
    optimizer = torch.optim.Adam(params, lr=args.learning_rate)

    total_step = len(data_loader)
    for epoch in range(args.num_epochs):
        for i, (images, captions, lengths) in enumerate(data_loader):
            images = images.to(device)
            captions = captions.to(device)
            targets = pack_padded_sequence(captions, lengths, batch_first=True)[0]
            features = encoder(images)
            outputs = decoder(features, captions, lengths)
            loss = criterion(outputs, targets)
            decoder.zero_grad()
            encoder.zero_grad()
            loss.backward()
            optimizer.step()
            print(
                f"Epoch [{epoch}/{args.num_epochs}], Step [{i}/{total_step}], "
                f"Loss: {loss.item():.4f}, Perplexity: {torch.exp(loss.detach()).item():5.4f}"
            )
        with tempfile.TemporaryDirectory() as folder:
            torch.save(decoder.state_dict(), os.path.join(folder, f"decoder-{epoch + 1}.ckpt"))
            torch.save(encoder.state_dict(), os.path.join(folder, f"encoder-{epoch + 1}.ckpt"))

    encoder.eval()
    with torch.no_grad():
        images, captions, lengths = next(iter(data_loader))
        ids = decoder.sample(encoder(images.to(device)))
        for row in ids[:3].cpu().numpy():
            print(" ".join(WORDS[word_id] for word_id in row))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--embed_size", type=int, default=48)
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--num_layers", type=int, default=1)
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=200)
    parser.add_argument("--learning_rate", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=7)
    main(parser.parse_args())
