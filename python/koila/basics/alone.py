# SPDX-License-Identifier: Apache-2.0
"""Whether another package called koila is installed in this folder: PyPI's koila 0.1 is one."""

from __future__ import annotations

from pathlib import Path

#: A file that the other package has, and this one has not.
_OF_THE_OTHER = "prepasses.py"


def check(file: str) -> None:
    """Refuse to be imported from a folder that holds files of two packages.

    Args:
        file: a file of this package.

    Raises:
        ImportError: the other package is there too. Of files that both have the one that was
            installed last is there.
    """
    folder = Path(file).parent
    if (folder / _OF_THE_OTHER).exists():
        raise ImportError(
            f"{folder} holds two packages: this one, koila-c, and PyPI's older koila; remove both "
            "and install this one again: pip uninstall koila koila-c, then pip install koila-c"
        )
