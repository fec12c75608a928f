# SPDX-License-Identifier: Apache-2.0
"""The errors of torch.distributions name the class of a value, and say of a lazy what they say of a
tensor."""

from __future__ import annotations

from typing import Any

from torch.distributions import Distribution, Geometric

from koila.patches import patching


@patching.wrapper
def _with_torchs_name(original: Any, args: Any, kwargs: Any) -> Any:
    try:
        return original(*args, **kwargs)
    except ValueError as error:
        said = (str(arg) for arg in error.args)
        error.args = tuple(arg.replace("(LazyTensor of", "(Tensor of") for arg in said)
        raise


def patch() -> None:
    """Replace the functions that check parameters and values."""
    patching.wrap(Distribution, ("__init__", "_validate_sample"), _with_torchs_name)
    patching.wrap(Geometric, ("__init__",), _with_torchs_name)
