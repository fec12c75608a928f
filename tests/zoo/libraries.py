# SPDX-License-Identifier: Apache-2.0
"""Make the zoo's libraries importable beside a CPU build of torch, and keep them offline and quiet.

Import this before any of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from pathlib import Path

import torch

#: What takes longest to import: imported once, before a process is forked for each entry.
SHARED = (
    "torch._dynamo",  # the first optimizer imports it
    "transformers.modeling_utils",
    "transformers.trainer",
    "timm",
    "diffusers.models.unets.unet_2d_condition",
    "pytorch_metric_learning.losses",
    "torchmetrics",
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.simplefilter("ignore")

# torchvision's own extension does not load beside another build of torch, and its Python then fails
# to describe two operators that are not there. Nothing here calls them.
_FOUND = importlib.util.find_spec("torchvision")
for _path in Path(_FOUND.origin).parent.glob("_C*.so") if _FOUND and _FOUND.origin else ():
    with contextlib.suppress(OSError):
        torch.ops.load_library(_path)
_VISION = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _VISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
