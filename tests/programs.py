# SPDX-License-Identifier: Apache-2.0
"""Whole programs: a model, a batch and a step, as people write them, for `oracle.py` to run.

`ONE_PASS` are the programs whose loss is linear in its reductions: each chunk needs one forward and
one backward. `BARRIER` are those that need values of the whole batch, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Generator, Tensor, nn

from programs_barrier import BARRIER_STEPS
from programs_kit import (
    ANY,
    IN_ORDER,
    Program,
    images,
    padded,
    padded_time_major,
    sentences,
    sentences_time_major,
    table_rows,
    vectors,
)
from programs_losses import BARRIER_LOSSES, LOSSES, Loss
from programs_special import SPECIAL
from programs_text import (
    BagOfWords,
    CellLoop,
    CrossAttention,
    Encoder,
    Gpt,
    Recurrent,
    Seq2Seq,
    StatefulLstm,
    TextCnn,
)
from programs_vision import (
    BilinearUNet,
    Cnn,
    CnnBaked,
    ConvBatchNorm,
    DenseNet,
    DropoutMlp,
    Mixer,
    Mlp,
    Residual,
    ResidualBatchNorm,
    TabularMlp,
    UNet,
)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, its inputs, and the kind of its output (see `programs_losses.py`)."""

    name: str
    kind: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, Generator], tuple[Any, ...]]
    dims: tuple[int, ...] = (0,)
    draws: str = ""
    baked: int | None = None
    barrier: str = ""
    partly: str = ""


def encoder(*, batch_first: bool, dropout: float = 0.0) -> Callable[[], nn.Module]:
    """Return how to build an `Encoder`."""
    return lambda: Encoder(batch_first=batch_first, dropout=dropout)


MODELS = [
    Model("mlp", "classes", Mlp, vectors),
    Model("tabular", "classes", TabularMlp, table_rows, dims=(0, 0)),
    Model("cnn", "classes", Cnn, images),
    Model("cnn_baked", "classes", CnnBaked, images, baked=8),
    Model("residual", "classes", Residual, images),
    Model("densenet", "classes", DenseNet, images),
    Model("mixer", "classes", Mixer, images),
    Model("bag_of_words", "classes", BagOfWords, sentences),
    Model("text_cnn", "classes", TextCnn, sentences),
    Model("encoder", "classes", encoder(batch_first=True), padded, dims=(0, 0)),
    Model("encoder_time", "classes", encoder(batch_first=False), padded_time_major, dims=(1, 0)),
    Model(
        "attention",
        "classes",
        lambda: CrossAttention(batch_first=True),
        padded,
        dims=(0, 0),
        partly="its query is plain",
    ),
    Model(
        "attention_time",
        "classes",
        lambda: CrossAttention(batch_first=False),
        padded_time_major,
        dims=(1, 0),
        partly="its query is plain",
    ),
    Model("lstm", "classes", lambda: Recurrent(nn.LSTM, batch_first=True), sentences),
    Model(
        "lstm_time",
        "classes",
        lambda: Recurrent(nn.LSTM, batch_first=False),
        sentences_time_major,
        dims=(1,),
    ),
    Model("gru", "classes", lambda: Recurrent(nn.GRU, batch_first=True), sentences),
    Model(
        "gru_time",
        "classes",
        lambda: Recurrent(nn.GRU, batch_first=False),
        sentences_time_major,
        dims=(1,),
    ),
    Model("lstm_state", "classes", StatefulLstm, sentences),
    Model("cell_loop", "classes", CellLoop, sentences),
    Model("gpt_fused", "tokens", lambda: Gpt(fused=True), sentences),
    Model("gpt_by_hand", "tokens", lambda: Gpt(fused=False), sentences),
    Model("seq2seq", "tokens", Seq2Seq, sentences),
    Model("unet", "image", UNet, images),
    Model("unet_bilinear", "image", BilinearUNet, images),
    Model("mlp_dropout", "classes", DropoutMlp, vectors, draws=IN_ORDER),
    Model(
        "gpt_dropout", "tokens", lambda: Gpt(fused=False, dropout=0.3), sentences, draws=IN_ORDER
    ),
    Model(
        "gpt_fused_dropout", "tokens", lambda: Gpt(fused=True, dropout=0.3), sentences, draws=ANY
    ),
    Model(
        "encoder_dropout",
        "classes",
        encoder(batch_first=False, dropout=0.3),
        padded_time_major,
        dims=(1, 0),
        draws=ANY,
    ),
    Model(
        "lstm_dropout",
        "classes",
        lambda: Recurrent(nn.LSTM, batch_first=False, dropout=0.3),
        sentences_time_major,
        dims=(1,),
        draws=ANY,
    ),
]

BATCH_NORM_MODELS = [
    Model("cnn_bn", "classes", ConvBatchNorm, images, barrier="BatchNorm"),
    Model("residual_bn", "classes", ResidualBatchNorm, images, barrier="BatchNorm"),
    Model("cnn_bn_average", "classes", lambda: ConvBatchNorm(None), images, barrier="BatchNorm"),
]


def combine(model: Model, loss: Loss) -> Program:
    """Return the program that trains a model by a loss."""
    assert model.kind == loss.kind
    n_inputs = len(model.dims)

    def batch(n_rows: int, generator: Generator) -> tuple[Any, ...]:
        return *model.inputs(n_rows, generator), *loss.targets(n_rows, generator)

    def step(module: nn.Module, *tensors: Any) -> Tensor:
        return loss.compute(module, module(*tensors[:n_inputs]), *tensors[n_inputs:])

    n_targets = len(loss.targets(2, Generator()))
    return Program(
        name=f"{model.name}-{loss.name}",
        model=model.build,
        batch=batch,
        step=step,
        dims=(*model.dims, *(0 for _ in range(n_targets))),
        barrier=loss.barrier or model.barrier,
        draws=model.draws,
        baked=model.baked,
        partly=model.partly,
    )


def products() -> list[Program]:
    """Every loss with one or two models, and every model with a few losses."""
    every_loss = {"mlp", "cnn", "lstm_time", "gpt_by_hand", "seq2seq", "unet", "unet_bilinear"}
    few = {"ce", "ce_ignored", "masked_mean", "flat_ce_ignored", "mean_by_row"}
    return [
        combine(model, loss)
        for model in MODELS
        for loss in LOSSES
        if model.kind == loss.kind and (model.name in every_loss or loss.name in few)
    ]


def barrier_products() -> list[Program]:
    """Losses that need the whole batch, and models with BatchNorm."""
    by_name = {model.name: model for model in MODELS}
    few = {"ce", "ce_ignored", "mse"}
    return [
        *(combine(by_name["mlp"], loss) for loss in BARRIER_LOSSES),
        *(combine(by_name["cnn"], loss) for loss in BARRIER_LOSSES[:6]),
        *(combine(model, ls) for model in BATCH_NORM_MODELS for ls in LOSSES if ls.name in few),
        combine(BATCH_NORM_MODELS[1], BARRIER_LOSSES[0]),
    ]


ONE_PASS = [*products(), *SPECIAL]
BARRIER = [*barrier_products(), *BARRIER_STEPS]
PROGRAMS = [*ONE_PASS, *BARRIER]
#: One program for each model, and all that are not a model and one of many losses.
VARIED = [
    *(next(p for p in PROGRAMS if p.name.startswith(f"{model.name}-")) for model in MODELS),
    *SPECIAL,
    *BARRIER,
]
