# SPDX-License-Identifier: Apache-2.0
"""A diffusion model with diffusers: UNet2DModel predicts the noise that DDPMScheduler added."""

import argparse
import tempfile

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_batch_size", type=int, default=16)
    parser.add_argument("--num_epochs", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.tanh(torch.randn(44, 3, 2, 2))
    images = images.repeat_interleave(8, 2).repeat_interleave(8, 3)
    loader = DataLoader(TensorDataset(images), args.train_batch_size, shuffle=True)
    model = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).to(device)
    ema_model = EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True)
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, 1, len(loader) * args.num_epochs)
    for epoch in range(args.num_epochs):
        model.train()
        for step, (clean_images,) in enumerate(loader):
            clean_images = clean_images.to(device)
            noise = torch.randn(clean_images.shape, dtype=clean_images.dtype).to(device)
            bsz = clean_images.shape[0]
            timesteps = torch.randint(
                0, noise_scheduler.config.num_train_timesteps, (bsz,), device=device
            ).long()
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            noise_pred = model(noisy_images, timesteps).sample
            loss = F.mse_loss(noise_pred, noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            ema_model.step(model.parameters())
            print(f"epoch {epoch} step {step} loss {loss.detach().item():.6f}")
    ema_model.copy_to(model.parameters())
    model.eval()
    sample = torch.randn(2, 3, 16, 16, device=device)
    noise_scheduler.set_timesteps(3)
    with torch.no_grad():
        for t in noise_scheduler.timesteps:
            sample = noise_scheduler.step(model(sample, t).sample, t, sample).prev_sample
    print(f"sample: {sample.mean().item():.5f} {sample.std().item():.5f}")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)


if __name__ == "__main__":
    main()
