"""A part of a module's weights as a `Linear` of its own, and the module that stands in for one with several parts.

    in_proj_weight (3E × E) of an attention ── rows 0 … E ──▶ q_proj     weight of a Conv1D ── transposed ──▶ Linear

Training takes views: the parameter stays the user's own, by its own name, and gradients go to it. A network that is
decomposed takes copies, and has no tie to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from decomposable.core.tree import hollow


@dataclass(frozen=True, kw_only=True)
class ParameterSlice:
    """Say which part of a parameter a weight is: some of its rows, or all; and whether inputs lie before outputs."""

    rows: tuple[int, int] | None = None
    transposed: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor that is shaped as the parameter is: a view."""
        part = tensor if self.rows is None else tensor[slice(*self.rows)]
        return part.transpose(0, 1) if self.transposed else part


WHOLE = ParameterSlice()


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeight:
    """Say where a `Linear` inside a module has its weight and bias from, by the names of the module's parameters."""

    owner: nn.Module
    weight: str
    bias: str | None
    cut: ParameterSlice = WHOLE
    bias_cut: ParameterSlice = WHOLE

    @property
    def parameter(self) -> nn.Parameter:
        """Return the parameter that the weight is a part of."""
        found = self.owner._parameters[self.weight]
        assert isinstance(found, nn.Parameter)
        return found

    @property
    def bias_parameter(self) -> nn.Parameter | None:
        """Return the parameter that the bias is a part of."""
        return None if self.bias is None else self.owner._parameters[self.bias]


class ViewLinear(nn.Linear):
    """Hold nothing, as a `Linear` whose weight and bias are views, made when they are asked for."""

    part: PackedWeight

    def __init__(self, part: PackedWeight) -> None:
        nn.Module.__init__(self)
        self.__dict__["part"] = part  # its owner is no submodule
        self.out_features, self.in_features = part.cut.of(part.parameter).shape
        self.training = part.owner.training
        if part.weight == "weight":  # a module of its own, whose parameters are known by these names
            self._parameters["weight"] = part.parameter
            if part.bias is not None:
                self._parameters["bias"] = part.bias_parameter

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return the part of the user's parameter, through which a gradient goes."""
        return self.part.cut.of(self.part.parameter)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """Return the same of the bias."""
        bias = self.part.bias_parameter
        return None if bias is None else self.part.bias_cut.of(bias)


Make = Callable[[PackedWeight], nn.Linear]
"""From where a weight is to the `Linear` that has it."""


class Copies:
    """Make `Linear` layers with parameters of their own; what is one part of one parameter stays one."""

    def __init__(self) -> None:
        self._made: dict[tuple[nn.Parameter, ParameterSlice], nn.Parameter] = {}

    def __call__(self, part: PackedWeight) -> nn.Linear:
        """Return the layer of a part."""
        linear = nn.Linear(1, 1, bias=False, device="meta")
        linear.weight = self._copied(part.parameter, part.cut)
        linear.out_features, linear.in_features = linear.weight.shape
        if (bias := part.bias_parameter) is not None:
            linear.bias = self._copied(bias, part.bias_cut)
        return linear.train(part.owner.training)

    def _copied(self, parameter: nn.Parameter, cut: ParameterSlice) -> nn.Parameter:
        if (parameter, cut) not in self._made:
            values = cut.of(parameter.detach()).clone().contiguous()
            self._made[parameter, cut] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        return self._made[parameter, cut]


class Opened(nn.Module):
    """Stand in for a module: its weights are those of `Linear` layers inside, its outputs are the same.

    The module's options are there, by their names. Its parameters are None here, unless it was opened for training:
    then they are the user's own, by their own names.
    """

    @classmethod
    def of(cls, module: nn.Module, make: Make) -> Opened:
        """Return the parts of a module, with layers that `make` makes."""
        opened = hollow(cls, module)
        opened._parameters.update(dict.fromkeys(module._parameters))
        opened._modules.update({name: make(part) for name, part in cls.parts(module).items()})
        return opened

    @classmethod
    def parts(cls, module: nn.Module) -> dict[str, PackedWeight]:
        """Return the weights of a module, by the names that their layers get."""
        raise NotImplementedError

    def with_layers(self, module: nn.Module, layers: Mapping[nn.Module, nn.Module]) -> Opened:
        """Return the same around other layers, in the module's mode, with the module's own parameters."""
        twin = hollow(type(self), module)
        twin._parameters.update(module._parameters)
        twin._modules.update({name: layers.get(layer, layer) for name, layer in self._modules.items() if layer})
        return twin
