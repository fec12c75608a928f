# SPDX-License-Identifier: Apache-2.0
"""Check that no other package named koila is installed in this folder, such as PyPI's koila 0.1."""

from __future__ import annotations

from pathlib import Path

#: A file that only the other package has.
_OF_THE_OTHER = "prepasses.py"


def check(file: str) -> None:
    """Refuse to be imported from a folder that holds files of both packages.

    Files that both packages have would be those of the one that was installed last.

    Args:
        file: a file of this package.

    Raises:
        ImportError: the other package is there too.
    """
    folder = Path(file).parent
    if (folder / _OF_THE_OTHER).exists():
        raise ImportError(
            f"{folder} holds two packages: this one, koila-c, and PyPI's older koila; remove both "
            "and install this one again: pip uninstall koila koila-c, then pip install koila-c"
        )
