"""Networks without branches: VGG-15, the paper's for CIFAR-10, and one for small images."""

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from decomposable.models.origin import builder

GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
HIDDEN = 512

_TRUNCATED_STD = 0.87962566103423978  # of a unit normal cut at two standard deviations


@builder
def vgg15(num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """Build VGG-15 for images of 32 x 32 pixels: ``64 64 M 128 128 M 256x3 M 512x3 M 512x3 M``, ``512``, classes.

    M is a 2x2 max-pool, what stands before one a 3x3 convolution, what comes after the last one a linear layer.
    Every convolution, and the first linear layer, is followed by batch norm and ReLU and has no bias.
    Dropout is 0.3 after the first convolution, 0.4 after every other one that no pool follows, 0.5 before
    each linear layer. The weights start as in the paper's appendix D (He-normal, here truncated).

    With 3 channels and 10 classes: 14,987,210 parameters, 313,463,808 MACs.
    """
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    width, index = in_channels, 0
    for group_index, group in enumerate(GROUPS, start=1):
        for position, out_width in enumerate(group, start=1):
            index += 1
            modules[f"conv{index}"] = nn.Conv2d(width, out_width, 3, padding=1, bias=False)
            modules[f"bn{index}"] = nn.BatchNorm2d(out_width)
            modules[f"relu{index}"] = nn.ReLU()
            if position < len(group):
                modules[f"drop{index}"] = nn.Dropout(0.3 if index == 1 else 0.4)
            width = out_width
        modules[f"pool{group_index}"] = nn.MaxPool2d(2)
    modules["flatten"] = nn.Flatten()
    modules["fc1_drop"] = nn.Dropout(0.5)
    modules["fc1"] = nn.Linear(width, HIDDEN, bias=False)
    modules["fc1_bn"] = nn.BatchNorm1d(HIDDEN)
    modules["fc1_relu"] = nn.ReLU()
    modules["fc2_drop"] = nn.Dropout(0.5)
    modules["fc2"] = nn.Linear(HIDDEN, num_classes)
    for module in modules.values():  # variance 2 / fan-in; batch norm is as torch makes it (1 and 0)
        if isinstance(module, nn.Conv2d | nn.Linear):
            std = math.sqrt(2 / module.weight[0].numel()) / _TRUNCATED_STD
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return nn.Sequential(modules)


@builder
def small_cnn(
    widths: Sequence[int] = (32, 64, 64, 64, 64), num_classes: int = 10, in_channels: int = 1
) -> nn.Sequential:
    """Build a convolution with batch normalisation and ReLU for each width, two poolings, then a linear layer.

    >>> import torch
    >>> small_cnn()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    layers: list[nn.Module] = []
    for i, (before, width) in enumerate(zip((in_channels, *widths), widths, strict=False)):
        layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        if i in (1, 3):
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes))
