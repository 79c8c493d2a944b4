"""Residual networks: ResNet-20, -34 and -56 for CIFAR, ResNet-50 for ImageNet.

Parameter names are those of the published weights, so that these load as they are: for ResNet-20 and
ResNet-56 ``conv1, bn1, layer1.0.conv1, ..., linear``; for ResNet-50 torchvision's.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from decomposable.models.origin import builder

Block = Callable[[int, int, int], nn.Module]  # (input width, output width, stride) -> block


@builder
def resnet20(num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """Build the CIFAR ResNet-20: 16-32-64 channels, shortcuts without parameters.

    With 3 channels and 10 classes: 269,722 parameters, 40,551,040 MACs at 32 x 32.

    >>> import torch
    >>> resnet20()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return _cifar_resnet((3, 3, 3), (16, 32, 64), _padded_block, num_classes, in_channels)


@builder
def resnet56(num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """Build the CIFAR ResNet-56, as ResNet-20: 853,018 parameters, 125,485,696 MACs at 32 x 32."""
    return _cifar_resnet((9, 9, 9), (16, 32, 64), _padded_block, num_classes, in_channels)


@builder
def resnet34(num_classes: int = 100, in_channels: int = 3) -> nn.Sequential:
    """Build the CIFAR ResNet-34: 64-128-256-512 channels, 3x3 stem, no max-pool, 1x1 projection shortcuts.

    With 3 channels and 100 classes: 21,328,292 parameters, 1,159,448,576 MACs at 32 x 32.
    """
    return _cifar_resnet((3, 4, 6, 3), (64, 128, 256, 512), _projected_block, num_classes, in_channels)


@builder
def resnet50(num_classes: int = 1000, in_channels: int = 3) -> nn.Sequential:
    """Build the ImageNet ResNet-50, with torchvision's names and its stride in the 3x3 convolution.

    With 3 channels and 1000 classes: 25,557,032 parameters, 4,089,184,256 MACs at 224 x 224.
    """
    return _started(
        conv1=nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False),
        bn1=nn.BatchNorm2d(64),
        relu=nn.ReLU(),
        maxpool=nn.MaxPool2d(3, stride=2, padding=1),
        **_stages(64, (256, 512, 1024, 2048), (3, 4, 6, 3), Bottleneck),
        avgpool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(2048, num_classes),
    )


class Subsample(nn.Module):
    """Take every second pixel and add zero channels on both sides: the shortcut without parameters."""

    def __init__(self, in_width: int, width: int) -> None:
        super().__init__()
        self.in_width, self.width = in_width, width

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, width, H / 2, W / 2) of (N, in_width, H, W)."""
        added = self.width - self.in_width
        before = added // 2
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, before, added - before))

    def at_width(self, scaled: Callable[[int], int]) -> nn.Module:
        """Return the shortcut of a narrower network, whose channel counts `scaled` gives."""
        return Subsample(scaled(self.in_width), scaled(self.width))

    def extra_repr(self) -> str:
        """Show the number of channels before and after."""
        return f"{self.in_width}, {self.width}"


def _shortcut(in_width: int, width: int, stride: int, *, is_padded: bool = False) -> nn.Module:
    """Return the identity where the shape stays, else a strided 1x1 convolution with batch norm, or padding."""
    if stride == 1 and in_width == width:
        return nn.Identity()
    if is_padded:
        return Subsample(in_width, width)
    return nn.Sequential(nn.Conv2d(in_width, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width))


class BasicBlock(nn.Module):
    """Add a shortcut to two 3x3 convolutions."""

    def __init__(self, in_width: int, width: int, stride: int, *, is_padded: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_width, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(in_width, width, stride, is_padded=is_padded)

    def forward(self, x: Tensor) -> Tensor:
        """Return ReLU(residual + shortcut)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class Bottleneck(nn.Module):
    """Run 1x1, 3x3 and 1x1 convolutions; the inner ones have a quarter of the width, the 3x3 one has the stride."""

    def __init__(self, in_width: int, width: int, stride: int) -> None:
        super().__init__()
        inner = width // 4
        self.conv1 = nn.Conv2d(in_width, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(in_width, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return ReLU(residual + shortcut)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x))


_padded_block = partial(BasicBlock, is_padded=True)
_projected_block = partial(BasicBlock, is_padded=False)


def _stages(in_width: int, widths: Sequence[int], depths: Sequence[int], block: Block) -> dict[str, nn.Module]:
    """Return layer1, layer2, ...; each but the first halves the image in its first block."""
    stages: dict[str, nn.Module] = {}
    for index, (width, depth) in enumerate(zip(widths, depths, strict=True), start=1):
        first = block(in_width, width, 1 if index == 1 else 2)
        stages[f"layer{index}"] = nn.Sequential(first, *(block(width, width, 1) for _ in range(depth - 1)))
        in_width = width
    return stages


def _cifar_resnet(
    depths: Sequence[int], widths: Sequence[int], block: Block, num_classes: int, in_channels: int
) -> nn.Sequential:
    return _started(
        conv1=nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(widths[0]),
        relu=nn.ReLU(),
        **_stages(widths[0], widths, depths, block),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        linear=nn.Linear(widths[-1], num_classes),
    )


def _started(**modules: nn.Module) -> nn.Sequential:
    """Join the modules and start them as in appendix D: He-normal weights, zero biases, BN at 1 and 0."""
    model = nn.Sequential(OrderedDict(modules))
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
