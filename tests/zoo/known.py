# SPDX-License-Identifier: Apache-2.0
"""Entries of the zoo in which a promise is known to be broken, each with the reason.

They are run and shown like all others, and do not make a run fail. An entry that is mended goes.
"""

FAULTS: dict[str, str] = {}
