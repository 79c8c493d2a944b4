"""Recipes for runs that several processes share (`test_distributed.py`): small, without batch normalisation."""

import os
import signal

import torch
import torch.nn.functional as F
from torch import nn

import decomposable as dn
from decomposable.data.augment import PadCropFlip, Standardise
from decomposable.data.base import Images, InMemory
from decomposable.recipes import Task
from decomposable.training.methods.elastic import ElasticSettings

SETTINGS = dn.recipes.Settings(
    epochs=2,
    batch_size=25,
    learning_rate=0.05,
    sizes=(1.0, 0.5),
    calibrated_sizes=(1.0, 0.5),
    calibration_images=50,
    of_methods=(ElasticSettings(elastic_macs=(0.2, 0.6), elastic_start=0.0, elastic_refresh=3),),
)
_calls = [0]


def _data() -> InMemory:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (220, 3, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 3, (220,), generator=generator)
    pixels[:, :, :4][labels == 1] //= 4
    pixels[:, :, 4:][labels == 2] //= 4
    standardise = Standardise((0.5,) * 3, (0.25,) * 3)
    return InMemory(
        classes=3,
        train=Images(pixels[:160], labels[:160]),
        test=Images(pixels[160:], labels[160:]),
        augment=PadCropFlip(standardise, padding=1),
        prepare=standardise,
    )


def _network(dropout: float, norm: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def _loss(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy; a process of which the environment says so ends on the way."""
    _calls[0] += 1
    if os.environ.get("END_AT") == f"{os.environ.get('RANK')}:{_calls[0]}":
        os.kill(os.getpid(), getattr(signal, os.environ["END_BY"]))
    return F.cross_entropy(net(batch[0]), batch[1])


def _broken(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    if os.environ.get("RANK") == "1":
        raise RuntimeError("out of luck")
    return _loss(net, batch)


def small(data, settings: dn.recipes.Settings = SETTINGS) -> Task:
    return Task(build_model=lambda: _network(0.0), load_data=_data, loss=_loss)


def bare(data, settings: dn.recipes.Settings = SETTINGS) -> Task:
    return Task(build_model=lambda: _network(0.0, norm=False), load_data=_data, loss=_loss)


def dropped(data, settings: dn.recipes.Settings = SETTINGS) -> Task:
    return Task(build_model=lambda: _network(0.5), load_data=_data, loss=_loss)


def broken(data, settings: dn.recipes.Settings = SETTINGS) -> Task:
    return Task(build_model=lambda: _network(0.0), load_data=_data, loss=_broken)
