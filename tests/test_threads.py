"""Several threads record, read each other's values and run: no crash, no error, eager's numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import koila

pytestmark = pytest.mark.sanitize


def run_threads(*bodies: Callable[[], object], seconds: float = 120) -> None:
    """Run each in a thread of its own; the first exception of any is raised here."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], object]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "the threads wait for each other"
    if errors:
        raise errors[0]


def test_calls_with_index_tensors_are_recorded_on_two_threads() -> None:
    rows = torch.arange(64)

    def body() -> None:
        labels, z = torch.randint(0, 10, (64,)), torch.randn(64, 10)
        for _ in range(500):
            picked = (koila.lazy(z) * 2)[rows, labels]
        assert torch.equal(picked + 0, (z * 2)[rows, labels])

    run_threads(body, body)
