# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT-2 with accelerate: accumulation, clipping, a schedule, gathered metrics."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    default_data_collator,
    get_linear_schedule_with_warmup,
)


def get_dataloaders(batch_size):
    starts, steps = torch.randint(100, (250,)), torch.randint(1, 5, (250,))
    rows = (starts[:, None] + steps[:, None] * torch.arange(32)) % 120
    data = [{"input_ids": row, "labels": row} for row in rows]
    train, val = data[:192], data[192:]
    train_loader = DataLoader(
        train, shuffle=True, collate_fn=default_data_collator, batch_size=batch_size
    )
    val_loader = DataLoader(val, collate_fn=default_data_collator, batch_size=batch_size)
    return train_loader, val_loader


def training_function(config, args):
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(config["batch_size"])
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_positions=32, n_embd=48, n_layer=2, n_head=4)
    )
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer, num_warmup_steps=1, num_training_steps=len(train_dataloader)
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for epoch in range(config["num_epochs"]):
        model.train()
        total_loss = 0
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                output = model(**batch)
                loss = output.loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        losses, hits, n = [], 0, 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits[:, :-1].argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics(
                (predictions, batch["labels"][:, 1:])
            )
            hits += (predictions == references).sum().item()
            n += references.numel()
            losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(len(batch["labels"]))))
        eval_loss = torch.mean(torch.cat(losses))
        accelerator.print(
            f"epoch {epoch}: train loss {total_loss.item() / len(train_dataloader):.5f} "
            f"eval loss {eval_loss.item():.5f} perplexity {torch.exp(eval_loss).item():.3f} "
            f"accuracy {hits / n:.4f} lr {lr_scheduler.get_last_lr()[0]:.6f}"
        )


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    args = parser.parse_args()
    training_function({"lr": 2e-3, "num_epochs": 1, "seed": 42, "batch_size": 48}, args)


if __name__ == "__main__":
    main()
