# SPDX-License-Identifier: Apache-2.0
"""Calls that fail for their numbers, where a `try` catches the error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import koila
from koila.recording import caught
from oracle import eager

N_ROWS = 7
JITTERS = 0.0, 1e-3, 1e-1
Found = tuple[Tensor, int]
OwnError = ValueError, RuntimeError


def root_of(kernel: Tensor, jitter: float) -> Tensor:
    """It fails without jitter: `kernel` has rank 2."""
    return torch.linalg.cholesky(kernel + (jitter - 1e-6) * torch.eye(N_ROWS).double())


def by_name(kernel: Tensor) -> Found:
    for n, jitter in enumerate(JITTERS):
        try:
            return torch.linalg.cholesky(kernel + (jitter - 1e-6) * torch.eye(7).double()), n
        except torch.linalg.LinAlgError:
            continue
    raise AssertionError


def in_a_function(kernel: Tensor) -> Found:
    n = -1
    while True:
        n += 1
        try:
            root = root_of(kernel, JITTERS[n])
            break
        except (ValueError, RuntimeError) as error:
            assert "positive-definite" in str(error)
    return root, n


def in_a_module(kernel: Tensor) -> Found:
    class Root(torch.nn.Module):
        def forward(self, kernel: Tensor, jitter: float) -> Tensor:
            return torch.linalg.cholesky(kernel + (jitter - 1e-6) * torch.eye(7).double())

    root, n = Root(), -1
    while True:
        n += 1
        try:
            return root(kernel, JITTERS[n]), n
        except Exception:
            assert n < 2


def in_two_clauses(kernel: Tensor) -> Found:
    try:
        return root_of(kernel, 0.0), 0
    except KeyboardInterrupt:
        raise
    except OwnError:
        return root_of(kernel, 1e-3), 1


def by_a_bare_except(kernel: Tensor) -> Found:
    try:
        return root_of(kernel, 0.0), 0
    except:  # noqa: E722
        return root_of(kernel, 1e-3), 1


def in_a_block_within(kernel: Tensor) -> Found:
    try:
        with torch.enable_grad(), contextlib.nullcontext():
            try:
                return root_of(kernel, 0.0), 0
            finally:
                kernel = kernel * 2
    except torch.linalg.LinAlgError as error:
        assert error.args
        return root_of(kernel, 1e-3), 1


def of_an_inverse(kernel: Tensor) -> Found:
    n = 0
    while True:
        n += 1
        try:
            flat = kernel.sum().reshape(1, 1) * (n - 1)
            return torch.linalg.inv(flat.expand(1, 1)) + kernel * 0.1, n
        except RuntimeError as error:
            assert "singular" in str(error)


CAUGHT = [by_name, in_a_function, in_a_module, in_two_clauses, by_a_bare_except]
CAUGHT += [in_a_block_within, of_an_inverse]


def step(find: Callable[[Tensor], Found], lazy: Any) -> list[Any]:
    torch.manual_seed(0)
    scale = torch.ones(2, dtype=torch.float64, requires_grad=True)
    z = lazy(torch.randn(N_ROWS, 2, dtype=torch.float64)) * scale
    root, n_failed = find(z @ z.T)
    assert n_failed >= 1
    (root.diagonal().square().log().sum() + (root @ z).sin().sum()).backward()
    return [root.detach() + 0, scale.grad, n_failed]


@pytest.mark.parametrize("chunks", [None, 1, 2, 3, N_ROWS])
@pytest.mark.parametrize("find", CAUGHT)
def test_an_error_is_caught_as_in_eager(find: Any, chunks: int | None) -> None:
    want = step(find, eager)
    with koila.config(**({} if chunks is None else {"chunks": chunks})):  # type: ignore[arg-type]
        got = step(find, koila.lazy)
    assert got.pop() == want.pop()
    for one, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-10, atol=1e-12)


def other_error(kernel: Tensor) -> Tensor:
    try:
        return root_of(kernel, 1.0)
    except (KeyboardInterrupt, StopIteration, koila.KoilaError):
        raise
    except OSError:
        return kernel


def only_finally(kernel: Tensor) -> Tensor:
    try:
        with torch.enable_grad():
            return root_of(kernel, 1.0)
    finally:
        del kernel


def in_the_handler(kernel: Tensor) -> Tensor:
    try:
        raise ValueError
    except ValueError:
        return root_of(kernel, 1.0)


def in_else(kernel: Tensor) -> Tensor:
    try:
        shape = kernel.shape
    except RuntimeError:
        shape = torch.Size()
    else:
        kernel = root_of(kernel, 1.0)
    assert shape
    return kernel


def far_out(kernel: Tensor) -> Tensor:
    """As a script whose main function catches all: each call would be read."""

    def within() -> Tensor:
        return root_of(kernel, 1.0)

    def around() -> Tensor:
        return within()

    try:
        return around()
    except Exception:
        return kernel


@pytest.mark.parametrize("find", [other_error, only_finally, in_the_handler, in_else, far_out])
def test_what_nobody_catches_is_not_read(find: Any) -> None:
    with koila.config(chunks=2):
        z = koila.lazy(torch.randn(N_ROWS, 2, dtype=torch.float64))
        assert "pending" in repr(find(z @ z.T))


def test_the_ops_are_torch_s() -> None:
    for name in caught.OPS:
        known = torch._C._linalg if name.startswith("linalg_") else torch
        assert hasattr(known, name), name
