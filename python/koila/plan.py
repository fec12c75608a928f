"""How many chunks a program is run in."""

from __future__ import annotations

from koila import config


def n_chunks() -> int:
    """The number of chunks that config() asks for; 1: run it whole."""
    return config.get("chunks") or 1
