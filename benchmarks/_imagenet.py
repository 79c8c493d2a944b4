"""The ImageNet ResNet-50 that somebody else trained, and a few of ImageNet's images: real weights for benchmarks."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

MEAN = (123.68, 116.779, 103.939)  # of RGB 0 to 255, which is all that its inputs were normalised by
SIDE = 224


class _Bottleneck(nn.Module):
    """As in the first ResNets, with the stride in the first 1×1 convolution; `models.resnet50` has it in the 3×3."""

    def __init__(self, in_width: int, width: int, stride: int) -> None:
        super().__init__()
        inner = width // 4
        self.conv1, self.bn1 = nn.Conv2d(in_width, inner, 1, stride=stride, bias=False), _norm(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False), _norm(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, width, 1, bias=False), _norm(width)
        self.downsample: nn.Module = nn.Identity()
        if in_width != width:
            self.downsample = nn.Sequential(nn.Conv2d(in_width, width, 1, stride=stride, bias=False), _norm(width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


def _norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3)


class _ZeroPadded(nn.Module):
    """Max pooling that pads with zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, stride=2)


def pretrained_resnet50(weights: Path) -> nn.Module:
    """The network with its weights, in eval mode."""
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    modules["conv1"], modules["bn1"] = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), _norm(64)
    modules["relu"], modules["pool"] = nn.ReLU(), _ZeroPadded()
    in_width = 64
    for stage, depth in enumerate((3, 4, 6, 3), 1):
        width = 128 * 2**stage
        strides = [1 if stage == 1 else 2] + [1] * (depth - 1)
        blocks = [_Bottleneck(in_width if i == 0 else width, width, stride) for i, stride in enumerate(strides)]
        modules[f"layer{stage}"] = nn.Sequential(*blocks)
        in_width = width
    modules["mean"], modules["flatten"], modules["fc"] = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)
    model = nn.Sequential(modules)
    missing, unknown = model.load_state_dict(load_file(weights), strict=False)
    assert not unknown, unknown
    assert all(name.endswith("num_batches_tracked") for name in missing), missing
    return model.eval()


def images_of(folder: Path) -> tuple[Tensor, Tensor]:
    """The images of a folder of classes, cropped and normalised as the network was trained, and their labels."""
    from PIL import Image

    files = sorted(folder.glob("*/*.jpg"))
    edge = (256 - SIDE) // 2
    crops = [np.asarray(Image.open(file).convert("RGB"))[edge : edge + SIDE, edge : edge + SIDE] for file in files]
    images_BHWC = torch.from_numpy(np.stack(crops)).float() - torch.tensor(MEAN)
    labels = torch.tensor([int(file.parent.name) for file in files])
    return images_BHWC.permute(0, 3, 1, 2).contiguous(), labels
