"""A small convolutional network for small images, such as 8 × 8 digits or 28 × 28 clothes."""

from collections.abc import Sequence

from torch import nn

from decomposable.models.origin import noting


def small_cnn(
    widths: Sequence[int] = (32, 64, 64, 64, 64), num_classes: int = 10, in_channels: int = 1
) -> nn.Sequential:
    """A convolution with batch normalisation and ReLU for each width, two poolings in between, then a linear layer.

    >>> import torch
    >>> small_cnn()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    layers: list[nn.Module] = []
    for i, (before, width) in enumerate(zip((in_channels, *widths), widths, strict=False)):
        layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        if i in (1, 3):
            layers.append(nn.MaxPool2d(2))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes))
    return noting("small_cnn", model, widths=widths, num_classes=num_classes, in_channels=in_channels)
