# SPDX-License-Identifier: Apache-2.0
"""Denoisers and autoencoders of diffusers. The library's scheduler adds the noise to predict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.entries import Entry, Step

_BLOCKS = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
_DOWN, _UP = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
_CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}
_DIT = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}

#: Class, its arguments, and what a batch has beside `sample` (of 4 channels and a side of 16).
#: "text" is 7 states of 32 numbers, "class" a label.
DENOISERS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "unet": (
        "UNet2DModel",
        dict(_BLOCKS, sample_size=16, in_channels=4, out_channels=4, down_block_types=_DOWN)
        | {"up_block_types": _UP, "attention_head_dim": 8, "dropout": 0.1},
        (),
    ),
    "unet-condition": (
        "UNet2DConditionModel",
        _BLOCKS | _CROSS | {"sample_size": 16},
        ("text",),
    ),
    "unet-uvit": (
        "UNet2DConditionModel",
        _BLOCKS | _CROSS | {"sample_size": 16, "resnet_time_scale_shift": "scale_shift"},
        ("text",),
    ),
    "dit": ("DiTTransformer2DModel", _DIT | {"sample_size": 16, "in_channels": 4}, ("class",)),
    "pixart": (
        "PixArtTransformer2DModel",
        _DIT
        | {"sample_size": 16, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32}
        | {"caption_channels": 32, "use_additional_conditions": False},
        ("text",),
    ),
    "sd3": (
        "SD3Transformer2DModel",
        _DIT
        | {"sample_size": 16, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 32}
        | {"caption_projection_dim": 32, "pooled_projection_dim": 24, "pos_embed_max_size": 16},
        ("text", "pooled"),
    ),
    "sana": (
        "SanaTransformer2DModel",
        _DIT
        | {"sample_size": 16, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32}
        | {"caption_channels": 32, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16},
        ("text",),
    ),
    "aura-flow": (
        "AuraFlowTransformer2DModel",
        {"sample_size": 16, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 32}
        | {"attention_head_dim": 16, "num_attention_heads": 2, "caption_projection_dim": 32}
        | {"num_mmdit_layers": 1, "num_single_dit_layers": 1, "pos_embed_max_size": 64},
        ("text",),
    ),
}


def _conditions(kinds: tuple[str, ...], rows: int) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for kind in kinds:
        if kind == "text":
            made["text"] = torch.randn(rows, 7, 32)
        elif kind == "pooled":
            made["pooled"] = torch.randn(rows, 24)
        elif kind == "class":
            made["label"] = torch.randint(10, (rows,))
    return made


def _predict(model: Any) -> Callable[..., Tensor]:
    """How a model is called on a noisy sample at some time."""

    def call(x: Tensor, t: Tensor, given: dict[str, Tensor]) -> Tensor:
        words: dict[str, Any] = {}
        if "text" in given:
            words["encoder_hidden_states"] = given["text"]
        if "pooled" in given:
            words["pooled_projections"] = given["pooled"]
        if "label" in given:
            words["class_labels"] = given["label"]
        made: Tensor = model(x, timestep=t, return_dict=False, **words)[0]
        return made

    return call


def _denoiser(class_name: str, arguments: dict[str, Any], kinds: tuple[str, ...]) -> Step:
    import diffusers

    model = getattr(diffusers, class_name)(**arguments).train()
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=50)
    predict = _predict(model)

    def loss(x: Tensor, t: Tensor, **given: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        noisy = scheduler.add_noise(x, noise, t)
        predicted = predict(noisy, t, given)[:, : x.shape[1]]
        return F.mse_loss(predicted, noise)

    def batch(rows: int) -> dict[str, Tensor]:
        made = {"x": torch.randn(rows, 4, 16, 16), "t": torch.randint(50, (rows,))}
        return made | _conditions(kinds, rows)

    return Step([model], batch, loss)


def _autoencoder(class_name: str, arguments: dict[str, Any]) -> Step:
    import diffusers

    model = getattr(diffusers, class_name)(**arguments).train()

    def loss(x: Tensor) -> Tensor:
        if class_name == "VQModel":
            encoded = model.encode(x).latents
            decoded = model.decode(encoded, return_dict=False)
            return F.mse_loss(decoded[0], x) + decoded[1].mean()
        if class_name == "AutoencoderTiny":
            return F.mse_loss(model(x).sample, x)
        posterior = model.encode(x).latent_dist
        decoded = model.decode(posterior.sample()).sample
        return F.mse_loss(decoded, x) + 1e-3 * posterior.kl().mean()

    return Step([model], lambda rows: {"x": torch.randn(rows, 3, 16, 16)}, loss)


AUTOENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "autoencoder-kl": (
        "AutoencoderKL",
        _BLOCKS
        | {"down_block_types": ("DownEncoderBlock2D",) * 2, "latent_channels": 4}
        | {"up_block_types": ("UpDecoderBlock2D",) * 2},
    ),
    "vq": (
        "VQModel",
        _BLOCKS
        | {"down_block_types": ("DownEncoderBlock2D",) * 2, "latent_channels": 3}
        | {"up_block_types": ("UpDecoderBlock2D",) * 2, "num_vq_embeddings": 16},
    ),
    "autoencoder-tiny": (
        "AutoencoderTiny",
        {"encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16)}
        | {"num_encoder_blocks": (1, 2), "num_decoder_blocks": (2, 1)},
    ),
}


def entries() -> Iterator[Entry]:
    """Yield an entry for each denoiser and each autoencoder."""
    for name, (class_name, arguments, kinds) in DENOISERS.items():
        yield Entry(
            f"diffusers/{name}", "diffusers", partial(_denoiser, class_name, arguments, kinds)
        )
    for name, (class_name, arguments) in AUTOENCODERS.items():
        yield Entry(f"diffusers/{name}", "diffusers", partial(_autoencoder, class_name, arguments))
