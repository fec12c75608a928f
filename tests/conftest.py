"""What every test gets: seeded generators, one thread, and hypothesis without luck or clocks."""

import os
import random
from collections.abc import Iterator

import hypothesis
import numpy
import pytest
import torch

import koila

torch.set_num_threads(1)

# The same examples in every run: a red build is caused by a change, never by chance.
hypothesis.settings.register_profile("koila", derandomize=True, deadline=None)
hypothesis.settings.load_profile("koila")


def pytest_configure(config: pytest.Config) -> None:
    """Let the processes that tests start import the same koila."""
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, config.getini("pythonpath")))


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


@pytest.fixture(scope="session")
def is_sanitized() -> bool:
    """Whether this run is `make sanitize`: slow, so tests of many samples take one of each kind."""
    return os.environ.get("KOILA_SANITIZED") == "1"
