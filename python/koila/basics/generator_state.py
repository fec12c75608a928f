# SPDX-License-Identifier: Apache-2.0
"""Read and set the state of a generator, past koila's patches of these methods: the patched ones
first let pending random calls draw."""

from __future__ import annotations

from typing import Any

import torch

get: Any = torch._C.Generator.get_state
set_to: Any = torch._C.Generator.set_state
