# SPDX-License-Identifier: Apache-2.0
"""Knowledge distillation: a teacher is trained, then a student learns from its soft targets."""

import argparse
import copy

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset, random_split


def net(width, hidden):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(width * 36, hidden),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(hidden, 10),
    )


def train(model, train_loader, epochs, learning_rate, device):
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.Adam(model.parameters(), lr=learning_rate)
    model.train()
    for epoch in range(epochs):
        running_loss = 0.0
        for inputs, labels in train_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"Epoch {epoch + 1}/{epochs}, Loss: {running_loss / len(train_loader):.6f}")


def train_knowledge_distillation(teacher, student, train_loader, args, device):
    ce_loss = nn.CrossEntropyLoss()
    optimizer = optim.Adam(student.parameters(), lr=args.lr)
    teacher.eval()
    student.train()
    for epoch in range(args.epochs):
        running_loss = 0.0
        for inputs, labels in train_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            student_logits = student(inputs)
            soft_targets = nn.functional.softmax(teacher_logits / args.T, dim=-1)
            soft_prob = nn.functional.log_softmax(student_logits / args.T, dim=-1)
            soft_targets_loss = (
                torch.sum(soft_targets * (soft_targets.log() - soft_prob))
                / soft_prob.size()[0]
                * (args.T**2)
            )
            label_loss = ce_loss(student_logits, labels)
            loss = args.soft_weight * soft_targets_loss + (1 - args.soft_weight) * label_loss
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"Epoch {epoch + 1}/{args.epochs}, Loss: {running_loss / len(train_loader):.6f}")


def test(model, test_loader, device):
    model.to(device)
    model.eval()
    correct = 0
    total = 0
    with torch.no_grad():
        for inputs, labels in test_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            outputs = model(inputs)
            _, predicted = torch.max(outputs.data, 1)
            total += labels.size(0)
            correct += (predicted == labels).sum().item()
    accuracy = 100 * correct / total
    print(f"Test Accuracy: {accuracy:.2f}%")
    return accuracy


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--T", type=float, default=2)
    parser.add_argument("--soft-weight", type=float, default=0.25)
    args = parser.parse_args()
    torch.manual_seed(42)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prototypes = torch.randn(10, 3, 12, 12)
    target = torch.randint(10, (420,))
    data = TensorDataset(prototypes[target] + torch.randn(420, 3, 12, 12), target)
    train_set, test_set = random_split(data, [320, 100])
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size, shuffle=False)
    teacher = net(16, 48).to(device)
    train(teacher, train_loader, args.epochs, args.lr, device)
    test_accuracy_teacher = test(teacher, test_loader, device)
    student = net(8, 24).to(device)
    alone = copy.deepcopy(student)
    train(alone, train_loader, args.epochs, args.lr, device)
    test(alone, test_loader, device)
    train_knowledge_distillation(teacher, student, train_loader, args, device)
    gap = test_accuracy_teacher - test(student, test_loader, device)
    print(f"behind the teacher: {gap:.2f}")


if __name__ == "__main__":
    main()
