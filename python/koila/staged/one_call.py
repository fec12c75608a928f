# SPDX-License-Identifier: Apache-2.0
"""Run one recorded call by itself, on tensors that are given or on stand-ins."""

from __future__ import annotations

from typing import Any

import torch

from koila import _core
from koila.basics import rows
from koila.basics.table import Args, Func, Words


def stand_in(value: int, place: rows.Place | None, n_rows: int) -> torch.Tensor:
    """Return ones in place of a value, whole or on a chunk, for a call that is run only to advance
    the generator. Ones are legal as weights, probabilities and standard deviations."""
    info = _core.value(value)
    shape = info[1] if place is None else rows.chunk_shape(info[1], place, n_rows)
    return torch.ones(shape, dtype=info[0], device=info[10])


def make(_: int, func: Func, args: Args, kwargs: Words) -> Any:
    """Run a call as it was recorded."""
    return func(*args, **kwargs)


def run(
    i: int, n_rows: int, inputs: dict[int, torch.Tensor], n_values: int, is_grad_off: bool
) -> list[Any]:
    """Run one call by itself on its inputs, by value, of a chunk of `n_rows` rows (-1: the whole
    batch). Return, by value, the inputs and the outputs. `n_values`: of the tape. `is_grad_off`:
    without a graph."""
    env: list[Any] = [None] * n_values
    for value, tensor in inputs.items():
        env[value] = tensor
    _core.run_alone(i, env, n_rows, is_grad_off, make)
    return env
