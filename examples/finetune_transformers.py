# SPDX-License-Identifier: Apache-2.0
"""A text classifier whose batch does not fit, with the Trainer of transformers and a callback.

    python examples/finetune_transformers.py --memory-limit 48MiB --steps 20

The classifier learns which of Python's help topics a passage is from. The model is small and has
random weights, so the script downloads nothing. To use a pretrained model, replace it by
`from_pretrained("...")` and its tokenizer.
"""

import argparse
import tempfile
from pydoc_data import topics

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from koila.integrations.transformers import KoilaCallback


def passages(n_topics: int, length: int) -> tuple[list[dict[str, object]], int]:
    """Return passages of the longest topics with their topics' numbers, and the vocabulary size."""
    longest = sorted(topics.topics.values(), key=len, reverse=True)[:n_topics]
    number_of: dict[str, int] = {}
    data: list[dict[str, object]] = []
    for label, text in enumerate(longest):
        ids = [number_of.setdefault(word, len(number_of)) for word in text.lower().split()]
        starts = range(0, len(ids) - length, length // 2)
        data += [{"input_ids": ids[i : i + length], "labels": label} for i in starts]
    return data, len(number_of)


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--length", type=int, default=48, help="words in a passage")
    parser.add_argument("--memory-limit", default="48MiB", help="empty: use free memory")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    data, n_words = passages(n_topics=4, length=args.length)
    config = BertConfig(
        vocab_size=n_words,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=192,
        max_position_embeddings=args.length,
        num_labels=4,
    )
    callback = KoilaCallback(args.memory_limit or None)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            BertForSequenceClassification(config),
            TrainingArguments(
                folder,
                per_device_train_batch_size=args.batch_size,  # the batch size to train with
                max_steps=args.steps,
                learning_rate=5e-3,
                use_cpu=True,
                logging_steps=5,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=data,
            callbacks=[callback],  # the one line
        )
        loss = trainer.train().training_loss

    assert callback.summary is not None
    print("\n".join(callback.summary.lines()))
    print(f"mean loss: {loss:.6f}")
    return loss


if __name__ == "__main__":
    main()
