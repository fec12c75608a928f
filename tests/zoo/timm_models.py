# SPDX-License-Identifier: Apache-2.0
"""Image classifiers of timm, narrow and on small images, with the library's own losses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from zoo.entries import Entry, Step

CLASSES = 10

#: Architecture: side of its images, and what makes it small. Drop rates are those of the recipes.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet18": (64, {}),
    "resnet26d": (64, {}),
    "seresnet18": (64, {}),
    "resnext50_32x4d": (64, {"layers": (1, 1, 1, 1)}),
    "resnet50_gn": (64, {"layers": (1, 1, 1, 1)}),
    "resnetv2_50": (64, {"layers": (1, 1, 1, 1)}),
    "skresnet18": (64, {}),
    "res2net50_26w_4s": (64, {"layers": (1, 1, 1, 1)}),
    "ecaresnet26t": (64, {}),
    "efficientnet_b0": (64, {"drop_rate": 0.2, "drop_path_rate": 0.1}),
    "tf_efficientnetv2_b0": (64, {"drop_rate": 0.2}),
    "mobilenetv2_050": (64, {"drop_rate": 0.2}),
    "mobilenetv3_small_050": (64, {"drop_rate": 0.2}),
    "mobilenetv4_conv_small_050": (64, {}),
    "mnasnet_small": (64, {}),
    "mixnet_s": (64, {}),
    "ghostnet_050": (64, {}),
    "repghostnet_050": (64, {}),
    "regnetx_002": (64, {}),
    "regnety_002": (64, {}),
    "densenet121": (64, {"growth_rate": 8, "block_config": (2, 2, 2, 2)}),
    "vgg11_bn": (32, {"mlp_ratio": 0.05, "drop_rate": 0.5}),
    "dla34": (64, {}),
    "hrnet_w18_small": (64, {}),
    "xception41": (64, {}),
    "convnext_atto": (64, {"drop_path_rate": 0.1}),
    "convnextv2_atto": (64, {"drop_path_rate": 0.1}),
    "nfnet_l0": (64, {}),
    "edgenext_xx_small": (64, {}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "efficientvit_b0": (64, {}),
    "efficientvit_m0": (64, {"img_size": 64}),
    "levit_128s": (224, {}),
    "repvgg_a0": (64, {}),
    "rexnet_100": (64, {}),
    "lcnet_050": (64, {}),
    "tinynet_e": (64, {}),
    "fastvit_t8": (64, {}),
    "starnet_s1": (64, {}),
    "shvit_s1": (64, {}),
    "ghostnetv2_100": (64, {}),
    "inception_next_atto": (64, {}),
    "vit_tiny_patch16_224": (64, {"img_size": 64, "depth": 2, "drop_path_rate": 0.1}),
    "deit_tiny_distilled_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "deit3_small_patch16_224": (64, {"img_size": 64, "depth": 2, "embed_dim": 96, "num_heads": 3}),
    "beit_base_patch16_224": (64, {"img_size": 64, "depth": 2, "embed_dim": 96, "num_heads": 3}),
    "eva02_tiny_patch14_224": (56, {"img_size": 56, "depth": 2}),
    "cait_xxs24_224": (64, {"img_size": 64, "depth": 2}),
    "xcit_nano_12_p16_224": (64, {"img_size": 64, "depth": 2}),
    "swin_tiny_patch4_window7_224": (
        56,
        {"img_size": 56, "embed_dim": 24, "depths": (2, 2, 2, 2), "drop_path_rate": 0.2},
    ),
    "swinv2_tiny_window8_256": (64, {"img_size": 64, "embed_dim": 24, "depths": (2, 2, 2, 2)}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}),
    "coat_lite_tiny": (64, {"img_size": 64}),
    "pit_ti_224": (64, {"img_size": 64}),
    "tnt_s_legacy_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "mixer_s32_224": (64, {"img_size": 64}),
    "resmlp_12_224": (64, {"img_size": 64}),
    "gmlp_ti16_224": (64, {"img_size": 64}),
    "poolformer_s12": (64, {}),
    "pvt_v2_b0": (64, {}),
    "twins_svt_small": (64, {"img_size": 64, "embed_dims": (16, 32, 64, 64)}),
    "convit_tiny": (64, {"img_size": 64, "depth": 2}),
    "crossvit_tiny_240": (240, {"depth": ([1, 1, 0],) * 3}),
    "nest_tiny": (64, {"img_size": 64}),
    "mvitv2_tiny": (64, {"img_size": 64}),
    "davit_tiny": (64, {"depths": (1, 1, 1, 1), "embed_dims": (24, 48, 96, 192)}),
    "focalnet_tiny_srf": (64, {}),
    "volo_d1_224": (64, {"img_size": 64}),
    "sequencer2d_s": (64, {"layers": (1, 1, 1, 1)}),
}


def _build(name: str, side: int, settings: dict[str, Any]) -> Step:
    import timm
    import timm.loss

    model = timm.create_model(name, num_classes=CLASSES, **settings).train()
    criterion = timm.loss.LabelSmoothingCrossEntropy(0.1)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = model(x)
        if isinstance(logits, tuple):  # a distilled model in training: a head for each teacher
            return sum(criterion(each, y) for each in logits) / len(logits)
        made: torch.Tensor = criterion(logits, y)
        return made

    def batch(rows: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(rows, 3, side, side), "y": torch.randint(CLASSES, (rows,))}

    return Step([model], batch, loss)


def entries() -> Iterator[Entry]:
    """Yield an entry for each architecture."""
    for name, (side, settings) in MODELS.items():
        yield Entry(f"timm/{name}", "timm", partial(_build, name, side, settings))
