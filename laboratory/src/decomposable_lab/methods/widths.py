"""A network at a part of its channels: its *width*.

At width w every hidden channel count C becomes scaled(C) = ⌊wC⌋, while the network's input and its output keep their
size. All widths share the weights, each taking the first slices of them, as in slimmable networks (Yu et al. 2019):

    layer ℓ at width w          W_ℓ[: scaled(outputs), : what it receives]

What a layer receives follows from what feeds it, be it a layer, a sum, a concatenation or a flattened map. It is seen
by running the network once at that width, on a single image. (On the meta device that takes several times as long.)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from decomposable.core.tracing import first_entry, trace
from decomposable.core.tree import clone_buffers_, deep_copy, plain_name, rewire, unwrap
from decomposable_edge.checks import check_count, is_number
from decomposable_edge.errors import BudgetError, DecomposableError, InvalidArgumentError, UnsupportedModelError
from decomposable_edge.text import first_line
from decomposable_lab.methods import cutting
from decomposable_lab.methods.cutting import ChannelCounts, extents_of, is_depthwise, shell_of, size_of
from decomposable_lab.methods.sized import MethodSize

Modules = Mapping[nn.Module, nn.Module]
"""What takes the places of the model's modules."""

STEPS = 1024
"""`Widths.largest` looks at multiples of 1 / STEPS."""


def scaled(channels: int, width: float, multiple: int = 1) -> int:
    """Return a channel count at some width, rounded down to a multiple; all of it at width 1.

    >>> [scaled(64, width, multiple=8) for width in (0.01, 0.25, 0.37, 1.0)]
    [8, 16, 16, 64]
    """
    if width >= 1:
        return channels
    kept = math.floor(width * channels + 1e-9) // multiple * multiple  # 0.29 · 100 is 28.999…
    return min(max(kept, multiple), channels)


class Cost(NamedTuple):
    """Hold the cost of a network of some width: multiply-accumulates for one sample, and parameters."""

    macs: int
    params: int


class Widths:
    """Give a model at any width; the model itself stays as it is, and its owner can train it further.

    Args:
        model: made of convolutions, linear layers, batch normalisation, and modules without parameters. One of the
            latter whose channels are fixed may offer ``at_width(scaled)``, which returns it for the channel counts that
            the function `scaled` gives; it has to ask for the same counts at every width.
        example_input: a batch that the model runs, best of one sample; only its shape matters.
        multiple: channel counts are rounded down to multiples of this.

    The last convolution or linear layer that a pass calls is the classifier, which keeps all its outputs. Where a model
    concatenates maps, a layer's first slices are not the same maps at every width: such a network works at each width,
    but its widths have less in common.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 3))
    >>> widths = Widths(model, torch.zeros(1, 4))
    >>> widths.extract(0.5), widths.cost(0.5)
    (Sequential(
      (0): Linear(in_features=4, out_features=5, bias=True)
      (1): ReLU()
      (2): Linear(in_features=5, out_features=3, bias=True)
    ), Cost(macs=35, params=43))
    """

    def __init__(self, model: nn.Module, example_input: Any, *, multiple: int = 1) -> None:
        self.model, self.multiple = unwrap(model), check_count("multiple", multiple)
        example = first_entry(example_input)
        if not isinstance(example, Tensor):
            raise InvalidArgumentError(f"example_input: got {type(example).__name__}; allowed: a tensor")
        self._example = example
        self._names = {module: plain_name(name) for name, module in self.model.named_modules()}
        self._scalable = cutting.scalable_modules(self._names)
        self._counts: set[int] = set()  # all that were ever scaled: two widths that agree on them are the same
        self._shapes: dict[tuple[int, ...], _Shape] = {}
        self._classifier: nn.Module | None = None
        self._outputs: list[Any] | None = None
        full = self._explore(1.0)
        self._shapes[self._key(1.0)] = full
        layers = [module for module in full.cuts if not isinstance(module, _BatchNorm)]
        self._classifier = layers[-1] if layers else None
        self._outputs = full.outputs
        self._shape_at(0.5)  # a model that has only one width is refused here and not in the middle of a training

    @property
    def norms(self) -> tuple[nn.Module, ...]:
        """Return the batch normalisation layers that a pass calls, in the model's order."""
        called = self._shape_at(1.0).cuts
        return tuple(m for m in self._scalable if isinstance(m, _BatchNorm) and m in called)

    def at(self, width: float, norms: Modules | None = None) -> nn.Module:
        """Return the network at this width for one training step: its weights are views of the model's parameters.

        Gradients flow into the slices of the model's parameters. It has buffers of its own, so that the model keeps
        the statistics of its own passes. `norms` are other normalisation layers, of that width, to be used in place of
        some of the model's; their parameters and statistics are the ones that learn.
        """
        cuts = self._shape_at(width).cuts
        parts = {module: cutting.as_views(module, cut) for module, cut in cuts.items()}
        return self._assembled(width, parts, norms or {})

    def extract(self, width: float, norms: Modules | None = None, *, is_fresh: bool = False) -> nn.Module:
        """Return the network at this width as a plain module with tensors of its own; `norms` as in `at`.

        Where the model's weights are fresh, so are those of the narrower network: each layer's are multiplied by the
        root of its full fan-in over its own, so that whatever initialisation by fan-in they are of, they stay so.
        """
        made: dict[nn.Parameter, nn.Parameter] = {}  # a weight that two modules share stays one
        cuts = self._shape_at(width).cuts
        parts = {module: cutting.as_parameters(module, cut, made, is_fresh) for module, cut in cuts.items()}
        return deep_copy(self._assembled(width, parts, norms or {}))

    def private_norms(self, width: float) -> nn.ModuleList:
        """Return batch normalisation layers of this width, one for each of `norms`, first slices of the model's."""
        cuts = self._shape_at(width).cuts
        norms = nn.ModuleList(cutting.as_parameters(norm, cuts[norm], {}, False) for norm in self.norms)
        clone_buffers_(norms)
        return cast(nn.ModuleList, deep_copy(norms))

    def cost(self, width: float) -> Cost:
        """Return MACs by the convention of `cost.py`, and all parameters of the network at this width."""
        shape = self._shape_at(width)
        sizes = {parameter: parameter.numel() for parameter in self.model.parameters()}
        sizes |= {parameter: size_of(parameter, extents) for _, _, parameter, extents in _cut_parameters(shape.cuts)}
        return Cost(shape.macs, sum(sizes.values()))

    def size(self, width: float) -> MethodSize:
        """Return the same as a `MethodSize`; its name tells widths apart that differ by 1 / STEPS."""
        cost, (full_macs, full_params) = self.cost(width)._asdict(), self.cost(1.0)
        return MethodSize(name=f"width {width:.4g}", value=width, **cost, full_macs=full_macs, full_params=full_params)

    def largest(self, *, macs: float, smallest: float, largest: float = 1.0) -> float:
        """Return the largest width between two whose MACs are within a budget."""
        if self.cost(largest).macs <= macs:
            return largest
        least = self.cost(smallest).macs
        if least > macs:
            raise BudgetError(f"macs={macs:,.0f}; allowed: at least {least:,}, those of width {smallest:g}")
        between = range(math.floor(smallest * STEPS) + 1, math.ceil(largest * STEPS))
        widths = [smallest, *(step / STEPS for step in between)]
        return widths[bisect_right(widths, macs, key=lambda width: self.cost(width).macs) - 1]

    def _assembled(self, width: float, parts: Modules, norms: Modules) -> nn.Module:
        """Return the model with these parts, and with buffers of its own but for those of the other `norms`."""
        others = {norm: shell_of(private) for norm, private in norms.items()}
        network = rewire(self.model, {**parts, **self._resized(width), **others})
        clone_buffers_(network)
        for norm, private in norms.items():
            others[norm]._buffers.update(private._buffers)
        return network

    def _shape_at(self, width: float) -> _Shape:
        """Return the channels of every module at this width, which are looked for once."""
        if not is_number(width) or not 0 < width <= 1:
            raise InvalidArgumentError(f"width={width!r}; allowed: a number above 0, up to 1")
        key = self._key(width)
        if key not in self._shapes:
            self._shapes[key] = self._explore(width)
        return self._shapes[key]

    def _key(self, width: float) -> tuple[int, ...]:
        return tuple(scaled(count, width, self.multiple) for count in sorted(self._counts))

    def _resized(self, width: float) -> dict[nn.Module, nn.Module]:
        """Return the modules without parameters that know how to be of another width."""
        resized = {}
        for module in self._names:
            at_width = getattr(module, "at_width", None)
            if callable(at_width) and not any(module.children()):
                resized[module] = at_width(partial(self._scaled, width=width)).train(module.training)
        return resized

    def _scaled(self, channels: int, *, width: float) -> int:
        self._counts.add(channels)
        return scaled(channels, width, self.multiple)

    def _explore(self, width: float) -> _Shape:
        """Run the network at this width; every layer takes as much of its weight as fits what it receives."""
        probes = {module: shell_of(module) for module in self._scalable}
        network = rewire(self.model, {**probes, **self._resized(width)})
        clone_buffers_(network)
        cuts: dict[nn.Module, ChannelCounts] = {}
        for module, probe in probes.items():
            probe.register_forward_pre_hook(partial(self._see, module, width, cuts), with_kwargs=True)
        outputs: list[Any] = []
        try:
            seen = trace(network, self._example_here(), lambda net, x: outputs.extend(tree_leaves(net(x))))
        except DecomposableError:
            raise
        except Exception as error:  # whatever a model of somebody else raises
            came = f"an input of shape {tuple(self._example.shape)}: {first_line(error)}"
            raise UnsupportedModelError(f"model: at width {width:g} it cannot run {came}") from error
        self._check_ties(cuts)
        macs = sum(_macs(module, cut, seen.outputs.get(probes[module], 0)) for module, cut in cuts.items())
        shapes = [tuple(o.shape) if isinstance(o, Tensor) else type(o) for o in outputs]
        if self._outputs is not None and shapes != self._outputs:
            raise UnsupportedModelError(
                f"model: at width {width:g} its output is of shape {_in_words(shapes)} and not of "
                f"{_in_words(self._outputs)}; allowed: one whose output comes from its last layer, "
                f"'{self._names[self._classifier] if self._classifier else ''}'"
            )
        return _Shape(cuts, seen.per_sample(macs), shapes)

    def _example_here(self) -> Tensor:
        """Return the example where the model is now, and of its type."""
        parameter = next(self.model.parameters(), self._example)
        return self._example.to(parameter if self._example.is_floating_point() else parameter.device)

    def _see(
        self,
        module: nn.Module,
        width: float,
        cuts: dict[nn.Module, ChannelCounts],
        probe: nn.Module,
        args: Any,
        kwargs: Any,
    ) -> None:
        """Note what a layer receives, and fit the probe in its place to it."""
        inputs = cutting.channels_of(module, args[0] if args else next(iter(kwargs.values())))
        if isinstance(module, _BatchNorm) or is_depthwise(module):
            cut = ChannelCounts(inputs, inputs)
        elif module is self._classifier:
            cut = ChannelCounts(cutting.outputs_of(module), inputs)
        else:
            cut = ChannelCounts(self._scaled(cutting.outputs_of(module), width=width), inputs)
        before = cuts.pop(module, None)
        cuts[module] = cut  # in the order of the last calls
        if before is None:
            cutting.replace_by_views_(probe, cut)
        elif before != cut:
            raise UnsupportedModelError(
                f"model: module '{self._names[module]}' is called with {before.inputs} and with {cut.inputs} channels "
                f"at width {width:g}; allowed: as many in every call"
            )

    def _check_ties(self, cuts: Mapping[nn.Module, ChannelCounts]) -> None:
        """A weight that several modules hold has to be cut alike in all of them."""
        found: dict[nn.Parameter, tuple[str, tuple[int, ...]]] = {}
        for module, name, parameter, extents in _cut_parameters(cuts):
            first, other = found.setdefault(parameter, (self._names[module], extents))
            if other != extents:
                raise UnsupportedModelError(
                    f"model: modules '{first}' and '{self._names[module]}' share a {name} and need {other} and "
                    f"{extents} of it; allowed: the same part"
                )


class _Shape(NamedTuple):
    """A network at some width: the cut of every module that a pass calls, in the order of their last calls."""

    cuts: Mapping[nn.Module, ChannelCounts]
    macs: int
    outputs: list[Any]


def _cut_parameters(
    cuts: Mapping[nn.Module, ChannelCounts],
) -> Iterator[tuple[nn.Module, str, nn.Parameter, tuple[int, ...]]]:
    """Every parameter of these modules: its module, its name, itself, and how much of its leading axes is left."""
    for module, cut in cuts.items():
        for name, extents in extents_of(module, cut).items():
            parameter = module._parameters.get(name)
            if parameter is not None:
                yield module, name, parameter, extents


def _macs(module: nn.Module, cut: ChannelCounts, positions: int) -> int:
    if positions == 0 or isinstance(module, _BatchNorm):
        return 0
    return positions * size_of(cast(Tensor, module.weight), extents_of(module, cut)["weight"])


def _in_words(outputs: list[Any]) -> str:
    return " and ".join(str(o) if isinstance(o, tuple) else o.__name__ for o in outputs)


class WidthsNet(nn.Module):
    """Hold a model that knows itself at any width; as a module it is the model."""

    def __init__(self, model: nn.Module, example_input: Tensor, *, multiple: int) -> None:
        super().__init__()
        self.model = model
        self.widths = Widths(model, example_input, multiple=multiple)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network at width 1."""
        return self.model(*args, **kwargs)

    def build(self, size: MethodSize) -> nn.Module:
        """Return the plain module of a size, with the model's batch normalisation statistics, which are not its own."""
        return self.widths.extract(size.value)

    def structure(self, example_input: Tensor) -> dict[str, Any]:
        """Return what a file has to say so that it can be made again."""
        return {"multiple": self.widths.multiple, "input_shape": list(example_input.shape[1:])}
