# SPDX-License-Identifier: Apache-2.0
"""The base class of koila's own dispatch modes."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    """A dispatch mode whose first call does not import torch._dynamo.

    torch imports it there to keep dynamo from compiling the mode, which takes more than a second
    and 70 MiB. koila tells dynamo itself, once a script has imported it (`patches/tracers.py`).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
