# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, a head at a time, in tiny configurations and with their own losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo import tiny
from zoo.entries import Entry, Step

T, V, LABELS = tiny.LENGTH, tiny.WORDS, tiny.LABELS
Batch = dict[str, Tensor]


def _text(rows: int, length: int = T) -> Batch:
    """Token ids whose ends are padded, as a tokenizer makes them."""
    ids = torch.randint(5, V, (rows, length))
    n_tokens = torch.randint(length // 2, length + 1, (rows,))
    mask = (torch.arange(length) < n_tokens[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def _language(rows: int) -> Batch:
    made = _text(rows)
    return made | {"labels": made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)}


def _masked(rows: int) -> Batch:
    made = _language(rows)
    is_hidden = torch.rand(rows, T) < 0.3
    is_hidden[:, 0] = True
    made["labels"] = made["labels"].masked_fill(~is_hidden, -100)
    return made


def _classes(rows: int) -> Batch:
    return _text(rows) | {"labels": torch.randint(LABELS, (rows,))}


def _tokens(rows: int) -> Batch:
    made = _text(rows)
    labels = torch.randint(LABELS, (rows, T)).masked_fill(made["attention_mask"] == 0, -100)
    return made | {"labels": labels}


def _spans(rows: int) -> Batch:
    places = torch.randint(T // 2, (2, rows))
    return _text(rows) | {"start_positions": places[0], "end_positions": places[1]}


def _choices(rows: int) -> Batch:
    ids = torch.randint(5, V, (rows, LABELS, T))
    return {"input_ids": ids, "labels": torch.randint(LABELS, (rows,))}


def _translation(rows: int) -> Batch:
    return _text(rows) | {"labels": _language(rows)["labels"][:, :8].contiguous()}


def _images(rows: int) -> Batch:
    pixels = torch.randn(rows, 3, tiny.IMAGE, tiny.IMAGE)
    return {"pixel_values": pixels, "labels": torch.randint(LABELS, (rows,))}


def _maps(rows: int) -> Batch:
    pixels, labels = torch.randn(rows, 3, 64, 64), torch.randint(LABELS, (rows, 64, 64))
    return {
        "pixel_values": pixels,
        "labels": labels.masked_fill(torch.rand(rows, 64, 64) < 0.1, 255),
    }


def _sound(rows: int) -> Batch:
    return {"input_values": torch.randn(rows, 640), "labels": torch.randint(1, 20, (rows, 5))}


def _sounds_of_classes(rows: int) -> Batch:
    return {"input_values": torch.randn(rows, 640), "labels": torch.randint(LABELS, (rows,))}


def _speech(rows: int) -> Batch:
    features = torch.randn(rows, 16, 128)
    return {"input_features": features, "labels": _language(rows)["labels"][:, :8].contiguous()}


def _videos(rows: int) -> Batch:
    pixels = torch.randn(rows, 8, 3, tiny.IMAGE, tiny.IMAGE)
    return {"pixel_values": pixels, "labels": torch.randint(LABELS, (rows,))}


def _hidden_patches(rows: int) -> Batch:
    pixels = torch.randn(rows, 3, tiny.IMAGE, tiny.IMAGE)
    return {"pixel_values": pixels, "bool_masked_pos": torch.rand(rows, 16) > 0.5}


@dataclass(frozen=True)
class Head:
    """A kind of model: the library's list of classes, a batch, and which families are tried."""

    classes: str
    batch: Callable[[int], Batch]
    families: str
    settings: tuple[tuple[str, Any], ...] = ()


HEADS = {
    "causal": Head(
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        _language,
        "afmoe apertus apertus1p5_text arcee aria_text bart beam bert bert-generation big_bird "
        "bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom camembert cohere cohere2 "
        "cohere2_moe ctrl cwm data2vec-text deepseek_v4 diffllama doge electra emu3 ernie ernie4_5 "
        "ernie4_5_moe exaone exaone4 exaone_moe falcon falcon_mamba flex_olmo flint fuyu gemma "
        "gemma2 gemma3 gemma3_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 "
        "glm4_moe got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss granite "
        "granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hy_v3 hy_v4 "
        "hyperclovax inkling_text internlm3 iquestcoder jais2 jetmoe kolibri1 laguna lara_mini "
        "lfm2 llama llama4 llama4_text mamba marian mbart megatron-bert mellum mimo_v2_flash "
        "minimax minimax_m2 minimax_m3_vl_text ministral3 mistral mixtral mllama "
        "modernbert-decoder moss_transcribe_diarize mpt mvp nanochat nemotron_h olmo olmo2 olmo3 "
        "olmo_hybrid olmoe openai-gpt opt pegasus persimmon phi phi3 phimoe plbart prophetnet "
        "qwen2 qwen2_moe qwen3 qwen3_moe rembert roberta roberta-prelayernorm roformer rwkv "
        "sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma whisper xglm "
        "xlm xlm-roberta xlm-roberta-xl xlnet",
    ),
    "masked": Head(
        "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        _masked,
        "albert bart bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert "
        "electra ernie eurobert flaubert fnet funnel gte ibert jina_embeddings_v3 layoutlm "
        "longformer mbart megatron-bert mobilebert modernbert modernvbert mpnet mra mvp nomic_bert "
        "nystromformer rembert roberta roberta-prelayernorm roformer squeezebert tapas ultrabert "
        "ultravbert xlm xlm-roberta xlm-roberta-xl yoso",
    ),
    "classify": Head(
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        _classes,
        "albert bert big_bird biogpt bloom canine convbert ctrl deberta deberta-v2 diffllama "
        "distilbert doge electra eurobert falcon flaubert fnet funnel gemma3_text gpt2 gpt_neo "
        "gpt_oss gte ibert jetmoe jina_embeddings_v3 layoutlm llama longformer markuplm minimax "
        "mixtral mobilebert modernbert mpnet mpt mra nomic_bert nystromformer openai-gpt opt "
        "qwen2_moe rembert roberta roformer squeezebert t5gemma tapas xlm xlnet yoso",
    ),
    "tokens": Head(
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        _tokens,
        "albert bert big_bird bloom canine convbert deberta-v2 distilbert electra funnel gpt2 "
        "layoutlm longformer llama markuplm mpnet mt5 openai_privacy_filter roberta t5 umt5 xlnet",
    ),
    "spans": Head(
        "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
        _spans,
        "albert bart bert bigbird_pegasus canine distilbert electra fnet funnel gpt_neox led llama "
        "mbart mobilebert mpnet mra mvp nystromformer splinter squeezebert xlm yoso",
        (("num_labels", 2),),
    ),
    "choice": Head(
        "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
        _choices,
        "albert bert canine deberta-v2 distilbert electra funnel mpnet roberta xlnet yoso",
    ),
    "translate": Head(
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        _translation,
        "bart bigbird_pegasus blenderbot blenderbot-small led m2m_100 marian mbart mt5 mvp "
        "nllb-moe pegasus pegasus_x plbart prophetnet seamless_m4t seamless_m4t_v2 "
        "switch_transformers t5 t5gemma t5gemma2 umt5",
        (("decoder_start_token_id", 2),),
    ),
    "image": Head(
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        _images,
        "beit data2vec-vision deit dinov2 dinov2_with_registers focalnet ijepa metaclip_2 "
        "mobilenet_v2 mobilevit poolformer pvt pvt_v2 regnet resnet segformer siglip swiftformer "
        "vit vit_msn",
    ),
    "map": Head("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES", _maps, "mobilenet_v2 segformer"),
    "patches": Head(
        "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES",
        _hidden_patches,
        "deit vit",
        (("encoder_stride", tiny.PATCH),),
    ),
    "video": Head("MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES", _videos, "timesformer"),
    "ctc": Head(
        "MODEL_FOR_CTC_MAPPING_NAMES",
        _sound,
        "data2vec-audio hubert sew unispeech unispeech-sat wav2vec2 wavlm",
    ),
    "audio": Head(
        "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
        _sounds_of_classes,
        "data2vec-audio hubert sew unispeech unispeech-sat wav2vec2 wav2vec2-conformer wavlm",
    ),
    "speech": Head("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", _speech, "whisper"),
}


def _cells_of_a_table(batch: Batch) -> Batch:
    """For each token, as the tokenizer of TAPAS has it: segment, column, row, and four ranks."""
    kinds = torch.zeros(*batch["input_ids"].shape, 7, dtype=torch.long)
    kinds[..., 1] = torch.randint(1, 4, kinds.shape[:-1])
    kinds[..., 2] = torch.randint(1, 6, kinds.shape[:-1])
    return {"token_type_ids": kinds}


#: What a family's tokenizer gives beside what all give.
_BESIDE: dict[str, Callable[[Batch], Batch]] = {"tapas": _cells_of_a_table}


def _build(head: Head, family: str) -> Step:
    import transformers
    from transformers.models.auto import modeling_auto

    transformers.logging.set_verbosity_error()
    found = getattr(modeling_auto, head.classes)[family]
    model_class = getattr(transformers, found if isinstance(found, str) else found[0])
    config = tiny.tiny(model_class.config_class, **dict(head.settings))
    model = model_class(config).train()
    add = _BESIDE.get(family, dict)

    def batch(rows: int) -> Batch:
        made = head.batch(rows)
        return made | add(made)

    return Step([model], batch, lambda **batch: model(**batch).loss)


def _contrastive() -> Step:
    """CLIP: texts and images of a batch, each with each."""
    import transformers

    config = tiny.tiny(transformers.CLIPConfig)
    model = transformers.CLIPModel(config).train()

    def batch(rows: int) -> Batch:
        return _text(rows) | {"pixel_values": _images(rows)["pixel_values"]}

    return Step([model], batch, lambda **batch: model(**batch, return_loss=True).loss)


def _detection() -> Step:
    """DETR: each image's boxes are matched with the model's by the library's own loss."""
    import transformers

    transformers.logging.set_verbosity_error()
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]
    )
    config = tiny.tiny(
        transformers.DetrConfig,
        use_timm_backbone=False,
        backbone=None,
        backbone_config=backbone,
        use_pretrained_backbone=False,
        num_queries=9,
        auxiliary_loss=True,
    )
    model = transformers.DetrForObjectDetection(config).train()

    def loss(pixel_values: Tensor, classes: Tensor, boxes: Tensor) -> Tensor:
        pairs = zip(classes, boxes, strict=True)
        labels = [{"class_labels": each, "boxes": box} for each, box in pairs]
        made: Tensor = model(pixel_values=pixel_values, labels=labels).loss
        return made

    def batch(rows: int) -> Batch:
        return {
            "pixel_values": torch.randn(rows, 3, 64, 64),
            "classes": torch.randint(LABELS, (rows, 2)),
            "boxes": torch.rand(rows, 2, 4) / 3 + 0.2,
        }

    return Step([model], batch, loss)


def entries() -> Iterator[Entry]:
    """Yield an entry for each head of each family."""
    for name, head in HEADS.items():
        for family in head.families.split():
            yield Entry(f"{name}/{family}", "transformers", partial(_build, head, family))
    yield Entry("contrastive/clip", "transformers", _contrastive)
    yield Entry("detection/detr", "transformers", _detection)
