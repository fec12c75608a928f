"""A callback for the Trainer of transformers.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[KoilaCallback("8GiB")])
    trainer.train()

Choose `per_device_train_batch_size` as large as you want to train with, and leave
`gradient_accumulation_steps` at 1: koila cuts each batch into chunks that fit.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from koila import launch
from koila.summary import Summary


class KoilaCallback(TrainerCallback):  # type: ignore[misc]
    """The batches of a training, and of the evaluations in it, are lazy.

    Args:
        memory_limit: as for `koila.config`; None: what holds stays as it is.
        chunks: likewise.

    Attributes:
        summary: what the training did; None before one has begun.

    Example:
        >>> from koila.integrations.transformers import KoilaCallback  # doctest: +SKIP
        >>> trainer.add_callback(KoilaCallback(memory_limit="8GiB"))  # doctest: +SKIP
    """

    def __init__(
        self, memory_limit: int | float | str | None = None, *, chunks: int | None = None
    ) -> None:
        self._session = launch.Session(memory_limit, chunks)

    @property
    def summary(self) -> Summary | None:
        return self._session.summary

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._session.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._session.end()
