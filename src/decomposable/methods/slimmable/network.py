"""A model at a few widths, each with its own batch normalisation."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from decomposable.methods.width.network import WidthsNet
from decomposable.network.sized import Size


class SlimmableNet(WidthsNet):
    """The model, whose batch normalisation is that of width 1, and the normalisation layers of all other widths.

    Attributes:
        model: as it was given.
        norms: for each of the `narrow` widths, the layers that stand in for the model's.
        narrow: the widths below 1, the largest first.
    """

    def __init__(self, model: nn.Module, example_input: Tensor, widths: Iterable[float], *, multiple: int) -> None:
        super().__init__(model, example_input, multiple=multiple)
        self.narrow = tuple(sorted((width for width in widths if width < 1), reverse=True))
        self.norms = nn.ModuleList(self.widths.private_norms(width) for width in self.narrow)

    def at(self, width: float) -> nn.Module:
        """The network at one of its widths, for training: the model itself, or views of its weights."""
        return self.model if width == 1 else self.widths.at(width, self._norms_of(width))

    def build(self, size: Size) -> nn.Module:
        """The plain module of a size."""
        return self.widths.extract(size.value, self._norms_of(size.value))

    def _norms_of(self, width: float) -> dict[nn.Module, nn.Module]:
        if width == 1:
            return {}
        private = self.norms[self.narrow.index(width)]
        assert isinstance(private, nn.ModuleList)
        return dict(zip(self.widths.norms, private, strict=True))
