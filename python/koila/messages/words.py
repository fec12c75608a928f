# SPDX-License-Identifier: Apache-2.0
"""Format numbers: bytes as "12.5 MiB", counts as "2 calls"; and the hint below a repr."""

from __future__ import annotations


def count(n: int, noun: str) -> str:
    """Format a number with its noun: "1 call", "2 calls", "2 batches"."""
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{n} {noun}" if n == 1 else f"{n} {noun}{ending}"


def size(n_bytes: float) -> str:
    """Format bytes: "12.5 MiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "bytes" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.2f} GiB"


def sizes(left: float, right: float) -> tuple[str, str]:
    """Format two sizes, with enough digits that the texts differ if the sizes do."""
    texts = size(left), size(right)
    digits, unit = 2, 2**20 if max(left, right) >= 2**20 else 2**10
    name = "MiB" if unit == 2**20 else "KiB"
    while texts[0] == texts[1] and left != right and digits < 7:
        texts = f"{left / unit:.{digits}f} {name}", f"{right / unit:.{digits}f} {name}"
        digits += 1
    return texts


def hint_to_save(name: str) -> str:
    """Return the last line of a text's repr in a REPL: how to print it, and save it to a file."""
    return f"(print() leaves this line out; to save it: Path({name!r}).write_text(...))"
