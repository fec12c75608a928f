# SPDX-License-Identifier: Apache-2.0
"""The losses of pytorch-metric-learning on a small encoder, and its miners with their losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.entries import Entry, Step

CLASSES, WIDTH = 5, 16

#: Name: arguments. Losses with weights of their own are told of classes and widths. One is missing:
#: DynamicSoftMarginLoss keeps the graph of one step for the next, which plain torch refuses.
_OF_CLASSES = {"num_classes": CLASSES, "embedding_size": WIDTH}
LOSSES: dict[str, dict[str, Any]] = {
    "AngularLoss": {},
    "ArcFaceLoss": _OF_CLASSES,
    "CircleLoss": {},
    "ContrastiveLoss": {},
    "CosFaceLoss": _OF_CLASSES,
    "FastAPLoss": {},
    "GeneralizedLiftedStructureLoss": {},
    "HistogramLoss": {},
    "InstanceLoss": {},
    "IntraPairVarianceLoss": {},
    "LargeMarginSoftmaxLoss": _OF_CLASSES,
    "LiftedStructureLoss": {},
    "MarginLoss": {},
    "MultiSimilarityLoss": {},
    "NCALoss": {},
    "NPairsLoss": {},
    "NTXentLoss": {},
    "NormalizedSoftmaxLoss": _OF_CLASSES,
    "P2SGradLoss": {"descriptors_dim": WIDTH, "num_classes": CLASSES},
    "PNPLoss": {},
    "ProxyAnchorLoss": _OF_CLASSES,
    "ProxyNCALoss": _OF_CLASSES,
    "RankedListLoss": {"margin": 0.4, "Tn": 0.1},
    "SignalToNoiseRatioContrastiveLoss": {},
    "SmoothAPLoss": {},
    "SoftTripleLoss": _OF_CLASSES,
    "SphereFaceLoss": _OF_CLASSES,
    "SubCenterArcFaceLoss": _OF_CLASSES,
    "SupConLoss": {},
    "ThresholdConsistentMarginLoss": {},
    "TripletMarginLoss": {},
    "TupletMarginLoss": {},
}
#: Losses of two views of each sample.
VIEWS = ("NTXentLoss", "SupConLoss", "VICRegLoss")
#: A miner, and the loss that is given what it finds.
MINED = {
    "AngularMiner": "TripletMarginLoss",
    "BatchEasyHardMiner": "TripletMarginLoss",
    "BatchHardMiner": "TripletMarginLoss",
    "DistanceWeightedMiner": "MarginLoss",
    "MultiSimilarityMiner": "MultiSimilarityLoss",
    "PairMarginMiner": "ContrastiveLoss",
    "TripletMarginMiner": "TripletMarginLoss",
    "UniformHistogramMiner": "ContrastiveLoss",
}


def _network() -> nn.Module:
    """Return an encoder of images: activations of some MiB, and parameters of a few KiB."""
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16 * 16, WIDTH))


def _labels(rows: int) -> Tensor:
    return torch.arange(rows) % CLASSES


def _step(model: nn.Module, criterion: nn.Module, loss: Callable[..., Tensor]) -> Step:
    def batch(rows: int) -> dict[str, Tensor]:
        # The two smooth average precisions want the samples of a class side by side.
        return {"x": torch.randn(rows, 1, 16, 16), "y": _labels(rows).sort().values}

    return Step([model, criterion], batch, loss)


def _plain(name: str, arguments: dict[str, Any]) -> Step:
    from pytorch_metric_learning import losses

    model, criterion = _network(), getattr(losses, name)(**arguments)
    return _step(model, criterion, lambda x, y: criterion(model(x), y))


def _of_views(name: str) -> Step:
    from pytorch_metric_learning import losses

    model = _network()
    if name == "VICRegLoss":
        criterion = losses.VICRegLoss()
        return _step(model, criterion, lambda x, y: criterion(model(x), ref_emb=model(x + 0.1)))
    criterion = losses.SelfSupervisedLoss(getattr(losses, name)())
    return _step(model, criterion, lambda x, y: criterion(model(x), model(x + 0.1)))


def _mined(miner_name: str, loss_name: str) -> Step:
    from pytorch_metric_learning import losses, miners

    model, criterion = _network(), getattr(losses, loss_name)()
    miner = getattr(miners, miner_name)()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        embeddings = model(x)
        made: Tensor = criterion(embeddings, y, miner(embeddings, y))
        return made

    return _step(model, criterion, loss)


def _remembered() -> Step:
    from pytorch_metric_learning import losses

    model = _network()
    criterion = losses.CrossBatchMemory(losses.ContrastiveLoss(), WIDTH, memory_size=64)
    generator = torch.Generator().manual_seed(3)
    before = torch.randn(40, WIDTH, generator=generator), torch.arange(40) % CLASSES

    def loss(x: Tensor, y: Tensor) -> Tensor:
        embeddings = model(x)
        criterion.reset_queue()
        criterion(before[0].to(next(model.parameters()).dtype), before[1])
        made: Tensor = criterion(embeddings, y)
        return made

    return _step(model, criterion, loss)


def entries() -> Iterator[Entry]:
    """Yield an entry for each loss, for each miner, and for the memory of batches."""
    library = "pytorch-metric-learning"
    for name, arguments in LOSSES.items():
        yield Entry(f"metric/{name}", library, partial(_plain, name, arguments))
    for name in VIEWS:
        yield Entry(f"metric/{name}-views", library, partial(_of_views, name))
    for miner, name in MINED.items():
        yield Entry(f"metric/{miner}", library, partial(_mined, miner, name))
    yield Entry("metric/CrossBatchMemory", library, _remembered)
