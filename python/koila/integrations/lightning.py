# SPDX-License-Identifier: Apache-2.0
"""A callback for Lightning's Trainer.

    trainer = Trainer(max_epochs=3, callbacks=[KoilaCallback("8GiB")])
    trainer.fit(model, loader)

Choose the loader's batch size as large as you want to train with, and leave
`accumulate_grad_batches` at 1: koila cuts each batch into chunks that fit.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from koila.launch import Session


class KoilaCallback(Session, Callback):  # type: ignore[misc]
    """Make the batches of fit(), validate(), test() and predict() lazy.

    Args:
        memory_limit: as for `koila.config`; None: keep the current setting.
        chunks: as for `koila.config`; None: keep the current setting.

    Attributes:
        summary: what the last of these did; None before the first.

    Examples:
        >>> from koila.integrations.lightning import KoilaCallback  # doctest: +SKIP
        >>> Trainer(callbacks=[KoilaCallback(memory_limit="8GiB")])  # doctest: +SKIP
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.begin()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.end()
