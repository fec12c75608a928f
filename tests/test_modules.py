# SPDX-License-Identifier: Apache-2.0
"""Every module of torch's own `module_db` through koila in one chunk equals torch, bit for bit.

Each tensor that a module's forward is given enters by a `lazy` call of its own; outputs, gradients
of inputs and parameters, parameters, buffers and the generator are compared.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch.utils import _pytree as pytree

import koila
import sanitizers
from outcome import SEED, Program, assert_same, copy_fresh, observe

MODULES: dict[str, ModuleInfo] = {info.formatted_name: info for info in module_db}
assert len(MODULES) == len(module_db)

MODES = ("train", "eval", "eval without gradient")
N_SAMPLES = sanitizers.fewer(None, 1)


def samples_of(info: ModuleInfo, mode: str) -> Iterator[ModuleInput]:
    """Yield the module's inputs in float64, or in its first dtype where it has none."""
    torch.default_generator.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    dtype = torch.float64 if torch.float64 in info.dtypes else info.dtypes[0]
    inputs = info.module_inputs_func(
        info,
        device="cpu",
        dtype=dtype,
        requires_grad=mode != "eval without gradient",
        training=mode == "train",
    )
    yield from (sample for sample in inputs if sample.forward_input is not None)


def program_of(info: ModuleInfo, sample: ModuleInput, mode: str) -> Program:
    """Make the module, and fresh copies of what it is given."""
    dtype = torch.float64 if torch.float64 in info.dtypes else info.dtypes[0]
    made = sample.constructor_input
    (made_args, made_kwargs), _ = copy_fresh((made.args, made.kwargs))
    torch.default_generator.manual_seed(SEED)
    module = info.module_cls(*made_args, **made_kwargs).to(dtype).train(mode == "train")
    given = sample.forward_input
    given, leaves = copy_fresh((given.args, given.kwargs))
    flat, spec = pytree.tree_flatten(given)
    tensors = {id(x): x for x in flat if isinstance(x, torch.Tensor)}

    def run(entered: list[torch.Tensor]) -> Any:
        known = dict(zip(tensors, entered, strict=True))
        args, kwargs = pytree.tree_unflatten([known.get(id(x), x) for x in flat], spec)
        with torch.no_grad() if mode == "eval without gradient" else contextlib.nullcontext():
            return module(*args, **kwargs)

    parameters = list(module.parameters())
    state = parameters + list(module.buffers())
    return Program(run, list(tensors.values()), leaves + parameters, state)


@pytest.mark.sanitize
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODULES)
def test_equals_torch(name: str, mode: str) -> None:
    """All that a module leaves behind is torch's, whichever is asked for first."""
    info = MODULES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, sample in enumerate(samples_of(info, mode)):
            if number == N_SAMPLES:
                break
            is_read_first = number % 2 == 0
            wanted = observe(program_of(info, sample, mode), is_read_first=is_read_first)
            got = observe(program_of(info, sample, mode), koila.lazy, is_read_first)
            try:
                assert_same(wanted, got)
            except AssertionError as error:
                raise AssertionError(f"sample {number} {sample.desc}: {error}") from None
