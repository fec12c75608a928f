# SPDX-License-Identifier: Apache-2.0
"""Embeddings with pytorch-metric-learning: a miner, a triplet loss, nearest neighbours."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from pytorch_metric_learning import distances, losses, miners, reducers
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 48, 3, 1)
        self.dropout1 = nn.Dropout2d(0.25)
        self.fc1 = nn.Linear(1728, 48)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        return self.fc1(torch.flatten(x, 1))


def train(model, loss_func, mining_func, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, labels) in enumerate(train_loader):
        data, labels = data.to(device), labels.to(device)
        optimizer.zero_grad()
        embeddings = model(data)
        indices_tuple = mining_func(embeddings, labels)
        loss = loss_func(embeddings, labels, indices_tuple)
        loss.backward()
        optimizer.step()
        print(
            f"Epoch {epoch} Iteration {batch_idx}: Loss = {loss:.6f}, "
            f"Number of mined triplets = {mining_func.num_triplets}"
        )


@torch.no_grad()
def get_all_embeddings(dataset, model, device):
    model.eval()
    embeddings, labels = [], []
    for x, y in DataLoader(dataset, batch_size=128):
        embeddings.append(model(x.to(device)))
        labels.append(y)
    return torch.cat(embeddings), torch.cat(labels)


def main():
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.get_default_dtype()).unsqueeze(1)
    images = F.interpolate(images[:600], scale_factor=2, mode="bilinear")
    labels = torch.tensor(digits.target)
    train_set = TensorDataset(images[:320], labels[:320])
    test_set = TensorDataset(images[500:600], labels[500:600])
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    distance = distances.CosineSimilarity()
    reducer = reducers.ThresholdReducer(low=0)
    loss_func = losses.TripletMarginLoss(margin=0.2, distance=distance, reducer=reducer)
    mining_func = miners.TripletMarginMiner(
        margin=0.2, distance=distance, type_of_triplets="semihard"
    )
    for epoch in range(1, 2):
        train(model, loss_func, mining_func, device, train_loader, optimizer, epoch)
    train_embeddings, train_labels = get_all_embeddings(train_set, model, device)
    test_embeddings, test_labels = get_all_embeddings(test_set, model, device)
    similar = F.normalize(test_embeddings) @ F.normalize(train_embeddings).T
    nearest = train_labels[similar.argmax(1)]
    print(f"Test set precision@1 = {(nearest == test_labels).double().mean().item():.4f}")


if __name__ == "__main__":
    main()
