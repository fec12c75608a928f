# SPDX-License-Identifier: Apache-2.0
"""Entries of the zoo in which a promise is known to be broken, each with the reason.

They are run and shown like all others, and do not make a run fail. An entry that is mended goes.
"""

_LEAF_INSIDE = (
    "without its CUDA kernel the library gives zeros_like(query).requires_grad_() for attention: a "
    "leaf in mid-model, whose number and gradient are there of all rows"
)

FAULTS: dict[str, str] = dict.fromkeys(("masked/mra", "classify/mra", "spans/mra"), _LEAF_INSIDE)
