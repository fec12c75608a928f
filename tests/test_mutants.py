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
        assert not word.startswith("tests/") or (ROOT / word.split("::")[0]).is_file()
