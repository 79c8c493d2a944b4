"""A part of a module's weights as a `Linear` of its own: a view of the user's parameter, or a copy of that view.

    in_proj_weight (3E × E) of an attention ── rows 0 … E ──▶ q_proj     weight of a Conv1D ── transposed ──▶ Linear

A view is for training: the parameter stays the user's own, by its own name, and gradients go to it. A copy is for the
network that is decomposed, which has no tie to the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class ParameterSlice:
    """Which part of a parameter a weight is: some of its rows, or all; and whether inputs lie before outputs in it."""

    rows: tuple[int, int] | None = None
    transposed: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor that is shaped as the parameter is: a view."""
        part = tensor if self.rows is None else tensor[slice(*self.rows)]
        return part.transpose(0, 1) if self.transposed else part


WHOLE = ParameterSlice()


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeight:
    """Where a `Linear` inside a module has its weight and its bias from, by the names of the module's parameters.

    `rows` are those of the bias.
    """

    owner: nn.Module
    weight: str
    bias: str | None
    cut: ParameterSlice = WHOLE
    rows: tuple[int, int] | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that the weight is a part of."""
        found = self.owner._parameters[self.weight]
        assert isinstance(found, nn.Parameter)
        return found

    @property
    def bias_parameter(self) -> nn.Parameter | None:
        """The same of the bias."""
        return None if self.bias is None else self.owner._parameters[self.bias]

    def of_bias(self, bias: Tensor) -> Tensor:
        """The part of a bias."""
        return bias if self.rows is None else bias[slice(*self.rows)]


class ViewLinear(nn.Linear):
    """A `Linear` that holds nothing: its weight and bias are views, made when they are asked for."""

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
        """The part of the user's parameter, through which a gradient goes."""
        return self.part.cut.of(self.part.parameter)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The same of the bias."""
        bias = self.part.bias_parameter
        return None if bias is None else self.part.of_bias(bias)


Make = Callable[[PackedWeight], nn.Linear]
"""From where a weight is to the `Linear` that has it."""


class Copies:
    """Makes `Linear` layers with parameters of their own; what is one part of one parameter stays one."""

    def __init__(self) -> None:
        self._made: dict[tuple[nn.Parameter, ParameterSlice], nn.Parameter] = {}

    def __call__(self, part: PackedWeight) -> nn.Linear:
        """The layer of a part."""
        linear = nn.Linear(1, 1, bias=False, device="meta")
        linear.weight = self._copied(part.parameter, part.cut, part.cut.of)
        linear.out_features, linear.in_features = linear.weight.shape
        if (bias := part.bias_parameter) is not None:
            linear.bias = self._copied(bias, ParameterSlice(rows=part.rows), part.of_bias)
        return linear.train(part.owner.training)

    def _copied(self, parameter: nn.Parameter, cut: ParameterSlice, view: Callable[[Tensor], Tensor]) -> nn.Parameter:
        if (parameter, cut) not in self._made:
            values = view(parameter.detach()).clone().contiguous()
            self._made[parameter, cut] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        return self._made[parameter, cut]
