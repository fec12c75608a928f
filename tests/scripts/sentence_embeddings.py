# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a sentence encoder: pairs in a DataLoader, in-batch negatives, an evaluation."""

import tempfile

import torch
import transformers
from sentence_transformers import SentenceTransformer, losses, models, util
from torch.utils.data import DataLoader

WORDS = [f"word{i}" for i in range(120)]


def build_model():
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(vocabulary)})
        tokenizer.save_pretrained(folder)
        config = transformers.BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
        )
        transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
        encoder = models.Transformer(folder, max_seq_length=24)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return SentenceTransformer(modules=[encoder, models.Pooling(48)], device=device)


def make_pairs(n):
    pairs = []
    for _ in range(n):
        ids = torch.randperm(len(WORDS))[: int(torch.randint(8, 20, ()))].tolist()
        pairs.append((" ".join(WORDS[i] for i in ids), " ".join(WORDS[i] for i in ids[::-1])))
    return pairs


def main():
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model = build_model()
    pairs, held = make_pairs(160), make_pairs(30)

    def collate(batch):
        return [dict(model.tokenize(list(column))) for column in zip(*batch, strict=True)]

    loader = DataLoader(pairs, batch_size=64, shuffle=True, collate_fn=collate)
    criterion = losses.MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        model.train()
        for features in loader:
            features = [util.batch_to_device(column, model.device) for column in features]
            loss = criterion(features, None)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            print(f"epoch {epoch} loss {loss.item():.6f}")
    first = model.encode([a for a, _ in held], convert_to_tensor=True)
    second = model.encode([b for _, b in held], convert_to_tensor=True)
    scores = util.cos_sim(first, second)
    hits = (scores.argmax(1).cpu() == torch.arange(len(held))).double().mean()
    print(f"recall@1 {hits.item():.4f} mean similarity {scores.diagonal().mean().item():.5f}")


if __name__ == "__main__":
    main()
