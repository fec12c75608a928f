# SPDX-License-Identifier: Apache-2.0
"""Check that no other package named koila is installed in this folder, such as PyPI's koila 0.1."""

from __future__ import annotations

from pathlib import Path

#: A file that only the other package has.
_OF_THE_OTHER = "prepasses.py"


def check(file: str) -> None:
    """Raise an ImportError if the folder of `file`, one of this package, holds files of both
    packages: those that both have would be of the one installed last."""
    folder = Path(file).parent
    if (folder / _OF_THE_OTHER).exists():
        raise ImportError(
            f"{folder} holds two packages: this one, koila-c, and PyPI's older koila; remove both "
            "and install this one again: pip uninstall koila koila-c, then pip install koila-c"
        )
