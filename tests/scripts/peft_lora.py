# SPDX-License-Identifier: Apache-2.0
"""LoRA on a frozen language model with peft, in a loop of its own; the adapters are merged."""

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    default_data_collator,
    get_linear_schedule_with_warmup,
)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lr, num_epochs, batch_size = 3e-3, 2, 48
    config = LlamaConfig(
        vocab_size=160,
        hidden_size=48,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config)
    peft_config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=8,
        lora_alpha=32,
        lora_dropout=0.1,
        target_modules=["q_proj", "v_proj"],
    )
    model = get_peft_model(model, peft_config)
    trainable, everything = model.get_nb_trainable_parameters()
    print(f"trainable params: {trainable} of {everything}")
    rows = torch.randint(4, 160, (150, 12)).repeat(1, 2)
    lengths = torch.randint(14, 25, (150,))
    mask = (torch.arange(24) < lengths[:, None]).long()
    data = [
        {"input_ids": row, "attention_mask": m, "labels": row.masked_fill(m == 0, -100)}
        for row, m in zip(rows, mask, strict=True)
    ]
    train_dataloader = DataLoader(
        data[:100], shuffle=True, collate_fn=default_data_collator, batch_size=batch_size
    )
    eval_dataloader = DataLoader(
        data[100:], collate_fn=default_data_collator, batch_size=batch_size
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 0, len(train_dataloader) * num_epochs)
    model = model.to(device)
    for epoch in range(num_epochs):
        model.train()
        total_loss = 0
        for batch in train_dataloader:
            batch = {k: v.to(device) for k, v in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            total_loss += loss.detach().float()
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        eval_loss = 0
        for batch in eval_dataloader:
            batch = {k: v.to(device) for k, v in batch.items()}
            with torch.no_grad():
                outputs = model(**batch)
            eval_loss += outputs.loss.detach().float()
        train_loss = total_loss / len(train_dataloader)
        print(
            f"epoch={epoch} train_loss={train_loss:.5f} "
            f"eval_loss={eval_loss.item() / len(eval_dataloader):.5f} "
            f"ppl={torch.exp(train_loss).item():.3f}"
        )
    merged = model.merge_and_unload()
    print(f"{sum(p.abs().sum() for p in merged.parameters()).item():.3f}")


if __name__ == "__main__":
    main()
