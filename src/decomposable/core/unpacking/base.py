"""What a module is that stands in for one with several weights: plain layers, and the code that calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from decomposable.core.unpacking.parts import Make, PackedWeight

_OWN = frozenset(vars(nn.Module()))  # hooks, parameters, flags: every module has its own


class Opened(nn.Module):
    """A module whose weights are those of `Linear` layers inside it; its outputs are the same.

    The options of the module that it stands for are there, by their names. Of its parameters those that have become
    layers are None here, unless it was opened for training: then they are the user's own, by their own names.
    """

    @classmethod
    def of(cls, module: nn.Module, make: Make) -> Opened:
        """That of a module, with layers that `make` makes."""
        opened = cls()
        opened.__dict__.update({name: value for name, value in vars(module).items() if name not in _OWN})
        opened.training = module.training
        opened._parameters.update(dict.fromkeys(module._parameters))
        for name, part in cls.parts(module).items():
            opened._modules[name] = make(part)
        return opened

    @classmethod
    def parts(cls, module: nn.Module) -> dict[str, PackedWeight]:
        """The weights of a module, by the names that their layers get."""
        raise NotImplementedError

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """The reason to leave a module as it is, or None."""
        raise NotImplementedError

    def with_layers(self, module: nn.Module, layers: Mapping[nn.Module, nn.Module]) -> Opened:
        """The same around other layers, in the mode that the module is in, with the module's own parameters."""
        twin = type(self)()
        twin.__dict__.update({name: value for name, value in vars(self).items() if name not in _OWN})
        twin.training = module.training
        twin._parameters.update(module._parameters)
        twin._modules.update({name: layers.get(layer, layer) for name, layer in self._modules.items() if layer})
        return twin

    def layer(self, name: str) -> Any:
        """One of the layers."""
        return self._modules[name]
