# SPDX-License-Identifier: Apache-2.0
"""Each mistake of `make mutants` can still be made: its text is once in the file."""

from __future__ import annotations

import pytest

from mutant import Mutant
from mutants import MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_can_be_made(mutant: Mutant) -> None:
    text = (ROOT / mutant.path).read_text()
    assert text.count(mutant.text) == 1
    assert mutant.instead not in text
    for word in mutant.tests.split():
        if word.startswith("tests/"):
            path, _, test = word.partition("::")
            assert f"def {test.partition('[')[0]}" in (ROOT / path).read_text()
