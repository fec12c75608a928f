# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a text classifier with the Trainer of transformers: metrics, evaluation, a schedule."""

import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)


class Sentences(Dataset):
    def __init__(self, n, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(5, 200, (n, 32), generator=generator)
        self.lengths = torch.randint(12, 33, (n,), generator=generator).tolist()
        self.labels = [int((row[:12] < 100).sum() > 6) for row in self.ids]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        mask = torch.arange(32) < self.lengths[i]
        return {
            "input_ids": self.ids[i] * mask,
            "attention_mask": mask.long(),
            "labels": self.labels[i],
        }


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    predictions = np.argmax(logits, axis=-1)
    return {"accuracy": float((predictions == labels).mean())}


def main():
    set_seed(5)
    config = BertConfig(
        vocab_size=200,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=32,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        training_args = TrainingArguments(
            output_dir=folder,
            learning_rate=2e-3,
            per_device_train_batch_size=48,
            per_device_eval_batch_size=48,
            num_train_epochs=2,
            weight_decay=0.01,
            warmup_steps=1,
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            seed=5,
        )
        trainer = Trainer(
            model=model,
            args=training_args,
            train_dataset=Sentences(144, 1),
            eval_dataset=Sentences(60, 2),
            compute_metrics=compute_metrics,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        names = ("loss", "grad_norm", "eval_loss", "eval_accuracy")
        for entry in trainer.state.log_history:
            print({name: round(float(entry[name]), 4) for name in names if name in entry})
        predictions = trainer.predict(Sentences(20, 3)).predictions
        print("mean logit:", round(float(np.abs(predictions).mean()), 4))


if __name__ == "__main__":
    main()
