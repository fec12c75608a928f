# SPDX-License-Identifier: Apache-2.0
"""A Wasserstein GAN with gradient penalty: a gradient of a gradient."""

import argparse

import torch
import torch.nn as nn
from torch import autograd
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--n_epochs", type=int, default=1)
parser.add_argument("--batch_size", type=int, default=900)
parser.add_argument("--latent_dim", type=int, default=16)
parser.add_argument("--n_critic", type=int, default=2)
parser.add_argument("--lr", type=float, default=1e-3)
opt = parser.parse_args()
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
lambda_gp = 10

angle = 6.2832 * torch.rand(2700)
points = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(2700, 2)
dataloader = DataLoader(TensorDataset(points), opt.batch_size, shuffle=True)
generator = nn.Sequential(
    nn.Linear(opt.latent_dim, 128),
    nn.LeakyReLU(0.2),
    nn.Linear(128, 128),
    nn.ReLU(),
    nn.Linear(128, 2),
).to(device)
discriminator = nn.Sequential(
    nn.Linear(2, 128), nn.Softplus(), nn.Linear(128, 128), nn.Softplus(), nn.Linear(128, 1)
).to(device)
optimizer_G = torch.optim.Adam(generator.parameters(), lr=opt.lr, betas=(0.5, 0.9))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=opt.lr, betas=(0.5, 0.9))


def compute_gradient_penalty(D, real_samples, fake_samples):
    alpha = torch.rand(real_samples.size(0), 1, device=device)
    interpolates = (alpha * real_samples + ((1 - alpha) * fake_samples)).requires_grad_(True)
    d_interpolates = D(interpolates)
    fake = torch.ones(real_samples.size(0), 1, device=device)
    gradients = autograd.grad(
        outputs=d_interpolates,
        inputs=interpolates,
        grad_outputs=fake,
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    gradients = gradients.view(gradients.size(0), -1)
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


for epoch in range(opt.n_epochs):
    for i, (real,) in enumerate(dataloader):
        real = real.to(device)
        optimizer_D.zero_grad()
        z = torch.randn(real.shape[0], opt.latent_dim, device=device)
        fake = generator(z)
        real_validity = discriminator(real)
        fake_validity = discriminator(fake.detach())
        gradient_penalty = compute_gradient_penalty(discriminator, real.data, fake.data)
        d_loss = -torch.mean(real_validity) + torch.mean(fake_validity)
        d_loss = d_loss + lambda_gp * gradient_penalty
        d_loss.backward()
        optimizer_D.step()
        if i % opt.n_critic == 0:
            optimizer_G.zero_grad()
            fake = generator(z)
            g_loss = -torch.mean(discriminator(fake))
            g_loss.backward()
            optimizer_G.step()
        print(
            f"[Epoch {epoch}/{opt.n_epochs}] [Batch {i}/{len(dataloader)}] "
            f"[D loss: {d_loss.item():f}] [G loss: {g_loss.item():f}] "
            f"[penalty: {gradient_penalty.item():f}]"
        )
