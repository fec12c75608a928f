# SPDX-License-Identifier: Apache-2.0
"""What every test gets: seeded generators, one thread or as many as are asked for, and hypothesis
without luck or clocks."""

import datetime
import gc
import os
import random
import signal
import types
from collections.abc import Generator, Iterator

import hypothesis
import numpy
import pytest
import torch

import koila
import rotation
import sanitizers
from koila.planning.logs import logged

# torch.manual_seed notes for each kind of device that is not there who asked, as a text of the
# whole stack, to be shown if the device fails later: in a test, 2 ms each time.
for _device in (torch.cuda, torch.mtia, torch.xpu):
    _device.traceback = types.SimpleNamespace(format_stack=lambda: [])  # type: ignore[attr-defined]

# The same examples in every run: a red build is caused by a change, never by chance.
hypothesis.settings.register_profile("koila", derandomize=True, deadline=None)
hypothesis.settings.load_profile("koila")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rotated",
        default="all",
        metavar="all|today|DATE",
        help="of the tests marked `rotated`, run all, or those of a day (tests/rotation.py)",
    )
    parser.addoption(
        "--threads", type=int, default=1, metavar="N", help="threads of torch within one call"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let the processes that tests start import the same koila, and all workers of one run choose
    the tests of the same day."""
    torch.set_num_threads(config.option.threads)
    # A command in the background is started deaf to interrupts, and Python then leaves it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, config.getini("pythonpath")))
    if config.option.rotated == "today":
        config.option.rotated = datetime.date.today().isoformat()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let no collection of garbage look at tens of thousands of tests while they are collected."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if sanitizers.IS_SANITIZED:
        items[:] = sanitizers.without_further_counts(items)
    if config.option.rotated != "all":
        day = datetime.date.fromisoformat(config.option.rotated).toordinal()
        others = rotation.not_of(day, items)
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=list(others))


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Let no collection look again at what lives to the end: thousands of tests, and what torch
    imports when it is first needed.

    Nor any walk over all objects, and no child that is forked has to copy them. So no test may
    thaw what it froze: all of this would thaw with it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    """End each test with an empty tape: a failed one must not run again in the next."""
    yield
    koila._core.forget()


@pytest.fixture
def nothing_logged() -> Iterator[None]:
    """Let koila log again what it logs once in a process."""
    logged.clear()
    yield
    logged.clear()


@pytest.fixture(scope="session")
def is_sanitized() -> bool:
    """Whether this run is `make sanitize`."""
    return sanitizers.IS_SANITIZED
