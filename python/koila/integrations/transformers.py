# SPDX-License-Identifier: Apache-2.0
"""A callback for the Trainer of transformers.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[KoilaCallback("8GiB")])
    trainer.train()

Choose `per_device_train_batch_size` as large as you want to train with, and leave
`gradient_accumulation_steps` at 1: koila cuts each batch into chunks that fit.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from koila.launch import Session


class KoilaCallback(Session, TrainerCallback):  # type: ignore[misc]
    """Make the batches of a training, and of the evaluations in it, lazy.

    Args:
        memory_limit: as for `koila.config`; None: keep the current setting.
        chunks: as for `koila.config`; None: keep the current setting.

    Attributes:
        summary: what the last training did; None before the first.

    Examples:
        >>> from koila.integrations.transformers import KoilaCallback  # doctest: +SKIP
        >>> trainer.add_callback(KoilaCallback(memory_limit="8GiB"))  # doctest: +SKIP
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.end()
