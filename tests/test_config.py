# SPDX-License-Identifier: Apache-2.0
"""config() and off(): of the process by a call, of a context in a block."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import koila
from binding_kit import in_a_thread
from koila.basics import machine
from koila.basics.config import Settings, read_environment, settings


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    koila.config(chunks=None, memory_limit=None)


def n_chunks() -> int:
    koila.lazy(torch.ones(12, 2)).sum().item()
    report = koila.report()
    return 0 if report is None else report.n_chunks


def test_a_call_is_for_all_threads() -> None:
    koila.config(chunks=3)
    assert n_chunks() == in_a_thread(n_chunks) == 3
    kept = koila.config(chunks=4)
    assert n_chunks() == in_a_thread(n_chunks) == 4
    del kept
    assert n_chunks() == 4
    koila.config(chunks=None)
    assert in_a_thread(settings) == Settings()


def test_a_block_is_of_its_thread() -> None:
    with koila.config(chunks=3):
        assert n_chunks() == 3
        assert in_a_thread(settings) == Settings(), "also of a thread that is started in it"
    assert settings() == Settings()


def test_blocks_of_two_threads() -> None:
    both = threading.Barrier(2, timeout=900)
    seen: dict[int, list[int]] = {2: [], 3: []}

    def body(chunks: int) -> None:
        for _ in range(200):
            with koila.config(chunks=chunks):
                seen[chunks].append(n_chunks())
            assert settings() == Settings()

    def start(chunks: int) -> threading.Thread:
        thread = threading.Thread(target=lambda: (both.wait(), body(chunks)))
        thread.start()
        return thread

    for thread in [start(2), start(3)]:
        thread.join(60)
    assert seen == {2: [2] * 200, 3: [3] * 200}
    assert settings() == Settings()


def test_other_threads_see_nothing_of_a_block_that_begins() -> None:
    """Between the call and the with: the call alone would be for all."""
    made = koila.config(chunks=3)
    assert in_a_thread(settings) == Settings()
    with made:
        assert in_a_thread(settings) == Settings()
        assert settings() == Settings(chunks=3)
    del made
    assert settings() == Settings()


def test_tasks_have_settings_of_their_own() -> None:
    async def task(chunks: int) -> int:
        with koila.config(chunks=chunks):
            await asyncio.sleep(0.01)
            return n_chunks()

    async def both() -> list[int]:
        return await asyncio.gather(task(2), task(3))

    assert asyncio.run(both()) == [2, 3]


def test_blocks_in_blocks() -> None:
    koila.config(memory_limit="4G")
    with koila.config(chunks=2, memory_limit=None):
        with koila.config(chunks=3):
            assert settings() == Settings(chunks=3)
        assert settings() == Settings(chunks=2)
        koila.config(chunks=4)  # for the rest of the block
        assert settings() == Settings(chunks=4)
    assert settings() == Settings(memory_limit=4 * 2**30)


def test_an_error_ends_a_block() -> None:
    with pytest.raises(ZeroDivisionError), koila.config(chunks=3):
        _ = 1 // 0
    assert settings() == Settings()


def test_both_at_once() -> None:
    with pytest.raises(ValueError, match="only one of them can hold"):
        koila.config(chunks=3, memory_limit="4G")
    assert settings() == Settings()


@pytest.mark.parametrize(
    ("outer", "inner", "words"),
    [
        ({"chunks": 3}, {"memory_limit": 4096}, "config(chunks=None, memory_limit=4096)"),
        ({"memory_limit": 4096}, {"chunks": 3}, "config(chunks=3, memory_limit=None)"),
    ],
)
@pytest.mark.parametrize("is_block", [True, False])
def test_one_replaces_the_other(
    outer: dict[str, Any], inner: dict[str, Any], words: str, is_block: bool
) -> None:
    def check() -> None:
        with pytest.raises(ValueError, match="is in force") as told:
            koila.config(**inner)
        assert words in str(told.value)
        assert settings() == Settings(**outer)
        with koila.config(**dict.fromkeys(outer), **inner):
            assert settings() == Settings(**inner)
        assert settings() == Settings(**outer)

    if is_block:
        with koila.config(**outer):
            check()
    else:
        koila.config(**outer)
        check()


def test_what_it_shows() -> None:
    assert repr(koila.config(chunks=3)) == "koila.config(chunks=3)"
    assert repr(koila.config(chunks=None, memory_limit="1K")) == "koila.config(memory_limit=1024)"
    assert repr(koila.config(memory_limit=None)) == "koila.config()"


def test_off_alone_is_told_to_change_nothing() -> None:
    with pytest.warns(UserWarning, match=r"write `with koila\.off\(\):` before the block"):
        koila.off()
    assert koila.is_lazy(koila.lazy(torch.ones(3)))


def test_off_as_a_decorator() -> None:
    @koila.off()
    def n_lazy(depth: int) -> int:
        return int(koila.is_lazy(koila.lazy(torch.ones(3)))) + (n_lazy(depth - 1) if depth else 0)

    assert n_lazy(2) == 0
    assert koila.is_lazy(koila.lazy(torch.ones(3)))


def test_off_is_of_its_context() -> None:
    x = torch.ones(3)
    with koila.off():
        assert not koila.is_lazy(koila.lazy(x))
        assert koila.is_lazy(in_a_thread(lambda: koila.lazy(x)))
        with koila.off():
            pass
        assert not koila.is_lazy(koila.lazy(x))
    assert koila.is_lazy(koila.lazy(x))


@pytest.mark.parametrize(("limit", "n_bytes"), [("50%", 2**29), (0.25, 2**28), (" 100 % ", 2**30)])
def test_a_share_of_all_memory(
    limit: str | float, n_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "total", lambda: 2**30)
    with koila.config(memory_limit=limit):
        assert settings() == Settings(memory_limit=n_bytes)
    for wrong in ("0%", "101%", 1.5, 0.0, -0.5):
        with pytest.raises(ValueError, match="is no share of memory"):
            koila.config(memory_limit=wrong)
    assert settings() == Settings()


def test_a_text_of_few_bytes_needs_a_unit() -> None:
    with pytest.raises(ValueError, match=r"'8' has no unit, and would be 8 bytes: write .* .8GiB."):
        koila.config(memory_limit="8")
    with koila.config(memory_limit="8B"):
        assert settings() == Settings(memory_limit=8)
    with koila.config(memory_limit="8589934592"):
        assert settings() == Settings(memory_limit=2**33)


def test_what_all_memory_is() -> None:
    known = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < machine.total() <= known


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KOILA_MEMORY_LIMIT", "2G")
    try:
        read_environment()
        assert settings() == Settings(memory_limit=2**31, option="KOILA_MEMORY_LIMIT")
        with pytest.raises(ValueError, match="KOILA_MEMORY_LIMIT is in force; to replace it"):
            koila.config(chunks=3)
        koila.config(memory_limit="1G")  # it replaces what the variable set
        assert settings() == Settings(memory_limit=2**30)
    finally:
        koila.config(memory_limit=None)
    monkeypatch.setenv("KOILA_MEMORY_LIMIT", "2 apples")
    with pytest.raises(ValueError, match="KOILA_MEMORY_LIMIT='2 apples'"):
        read_environment()
