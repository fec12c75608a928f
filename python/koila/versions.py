"""The versions of torch that koila was tried with."""

import logging

import torch

#: major.minor of the versions that the tests pass on.
TESTED = ("2.13",)

_logger = logging.getLogger("koila")


def note_untested(version: str) -> None:
    """Say so where this torch is another: what ops keep for backward may have changed in it.

    A program in chunks is held against that in every run, so a change is an error, no number.
    """
    if ".".join(version.split(".")[:2]) not in TESTED:
        _logger.warning(
            "koila is tested with torch %s, and this is %s: where it differs, koila raises rather "
            "than give another number than torch",
            ", ".join(TESTED),
            version,
        )


def note_this() -> None:
    """Say so of the torch that is imported."""
    note_untested(torch.__version__)
