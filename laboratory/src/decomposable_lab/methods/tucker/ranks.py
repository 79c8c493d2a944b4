"""The ranks of a network by VBMF, what they cost, and the sizes that parts of them make.

At a part ρ of the ranks, a rank r becomes max(1, ⌊ρ r⌋). Of the layers that these ranks allow, the cheapest ones are
taken: a 1×1 convolution that costs more multiply-accumulates than it saves is left out, and a layer for which all
factors do so is dense. So the cost of every layer, and that of the network, can only rise with ρ.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from decomposable.core.forms import FORMS, MATRIX_FORMS, to_matrix
from decomposable.core.layers import Layer, find_layers, require_layers, without_transposed
from decomposable.core.svd import check_finite, svd
from decomposable.core.tracing import Trace, on_device_of, other_macs, trace
from decomposable.core.tree import plain_name
from decomposable_edge.checks import is_integer
from decomposable_edge.errors import ArtifactError
from decomposable_edge.sizing.chain import Chain
from decomposable_lab.methods.sized import MethodSize
from decomposable_lab.methods.tucker.layers import FactorForm, form_of
from decomposable_lab.methods.tucker.tensors import Kept, possible_ranks, unfold
from decomposable_lab.methods.tucker.vbmf import vbmf_rank

WHOLE_UP_TO = 4
"""Channels of a mode that Tucker leaves whole. Of L singular values VBMF keeps at most ⌈L/(1+α)⌉ − 1, so the three
colours of an image would always lose one."""


SMALLER = (0.75, 0.5, 0.25)
"""Parts of the MACs of the size that was trained, where no other sizes below it are asked for."""


class Positions(NamedTuple):
    """Hold how often a layer applies its weights to one sample: at each input position, at those of the map between two
    spatial factors, and at every output position.
    """

    inputs: int
    between: int
    outputs: int


@dataclass(frozen=True, kw_only=True)
class LayerRanks:
    """Hold one weight, the ranks that VBMF gives it, and what it costs at parts of them.

    Attributes:
        name: of the first layer that has the weight.
        modules: the paths of all layers that share it.
        ranks: (R, S) of the output and the input mode for Tucker, (R,) for two factors; None for a mode that is whole.
    """

    name: str
    modules: tuple[str, ...]
    shape: tuple[int, ...]
    form: FactorForm
    ranks: Kept
    positions: Positions

    def kept(self, part: float) -> Kept:
        """Return the ranks of the cheapest layers at a part of the VBMF ranks; if equal, the fewest layers."""
        # 1e-9: a part m/r was divided, and must give m again.
        scaled = [None if r is None else max(1, math.floor(part * r + 1e-9)) for r in self.ranks]
        options: Iterable[Kept] = itertools.product(*((rank, None) for rank in scaled))
        if self.form == "tucker":
            options = [possible_ranks(self.shape, option) for option in options]
        return min(options, key=lambda kept: (self.macs(kept), -kept.count(None)))

    def macs(self, kept: Kept) -> int:
        """Return the MACs for one sample: each weight at each position where it is applied."""
        return sum(weights * positions for weights, positions in self._layers(kept))

    def params(self, kept: Kept) -> int:
        """Return the number of weights of the layers, without biases."""
        return sum(weights for weights, _ in self._layers(kept))

    def _layers(self, kept: Kept) -> list[tuple[int, int]]:
        """The weights of each layer in order, of Tucker's I·S, S·R·H·W and R·O, and at how many positions they act."""
        inputs, between, outputs = self.positions
        if is_dense(kept):
            return [(math.prod(self.shape), outputs)]
        if self.form == "tucker":
            (out_rank, in_rank), (out_channels, in_channels, *kernel) = kept, self.shape
            core = (out_rank or out_channels) * (in_rank or in_channels) * math.prod(kernel)
            return [((in_rank or 0) * in_channels, inputs), (core, outputs), ((out_rank or 0) * out_channels, outputs)]
        chain, rank = FORMS[self.form].chain(self.shape), kept[0] or 0
        first, second = chain.sizes
        return [(rank * first, outputs if all(chain.stages[0]) else between), (rank * second, outputs)]


def is_dense(kept: Kept) -> bool:
    """Return whether nothing is factored."""
    return all(rank is None for rank in kept)


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Hold all that must be known of the original network, apart from its code, as JSON."""

    layers: tuple[LayerRanks, ...]
    fixed_macs: int  # of what is not decomposed
    fixed_params: int

    def size(self, part: float) -> MethodSize:
        """Return the network at a part of the VBMF ranks, as a `MethodSize`."""
        kept = [(layer, layer.kept(part)) for layer in self.layers]
        dense = [(layer, (None,) * len(layer.ranks)) for layer in self.layers]
        return MethodSize(
            name="VBMF ranks" if part == 1 else f"{part:.4g} of the VBMF ranks",
            value=part,
            macs=self.fixed_macs + sum(layer.macs(ranks) for layer, ranks in kept),
            params=self.fixed_params + sum(layer.params(ranks) for layer, ranks in kept),
            full_macs=self.fixed_macs + sum(layer.macs(ranks) for layer, ranks in dense),
            full_params=self.fixed_params + sum(layer.params(ranks) for layer, ranks in dense),
        )

    def sizes(self, budgets: Iterable[float]) -> list[MethodSize]:
        """Return the size that was trained, and for every smaller budget the largest part of the ranks within it.

        Where it is smaller than all of them, so that none would say what another size costs, parts of it are taken.
        """
        trained, parts = self.size(1.0), self._parts()
        limits = [budget * trained.full_macs * (1 + 1e-12) for budget in budgets]  # a part that was divided must fit
        limits = [limit for limit in limits if limit < trained.macs] or [part * trained.macs for part in SMALLER]
        counts = [bisect_right(parts, limit, key=lambda part: self.size(part).macs) for limit in limits]
        sizes = [trained, *(self.size(parts[count - 1]) for count in counts if count)]
        distinct = {size.macs: size for size in reversed(sizes)}
        return sorted(distinct.values(), key=lambda size: -size.macs)

    def _parts(self) -> list[float]:
        """Return every ρ at which some rank goes up, ascending: only there does the network change."""
        ranks = {rank for layer in self.layers for rank in layer.ranks if rank is not None}
        return sorted({m / rank for rank in ranks for m in range(1, rank + 1)})

    def as_json(self) -> dict[str, Any]:
        """Return it as numbers, text and lists."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Structure:
        """Return what `as_json` gave."""
        try:
            layers = tuple(_layer_from_json(entry) for entry in stored["layers"])
            modules = [module for layer in layers for module in layer.modules]
            fixed = {name: stored[name] for name in ("fixed_macs", "fixed_params")}
            if len(set(modules)) < len(modules) or not all(is_integer(n) and n >= 0 for n in fixed.values()):
                raise ArtifactError("structure: it is damaged (a layer twice, or a cost that is no number)")
            return cls(layers=layers, **fixed)
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"structure: it is damaged ({type(error).__name__}: {error})") from error


def _layer_from_json(entry: Mapping[str, Any]) -> LayerRanks:
    """Nothing in a file is trusted: no rank that the layer cannot have, no cost below zero."""
    tuples = {name: tuple(entry[name]) for name in ("modules", "shape", "ranks")}
    layer = LayerRanks(name=entry["name"], form=entry["form"], positions=Positions(*entry["positions"]), **tuples)
    shape = layer.shape
    is_right = 2 <= len(shape) <= 5 and all(is_integer(n) and n > 0 for n in shape) and bool(layer.modules)
    is_right = is_right and layer.form in FORMS and FORMS[layer.form].takes(shape)
    is_right = is_right and all(is_integer(n) and n >= 0 for n in layer.positions)
    if is_right:
        most = shape[:2] if layer.form == "tucker" else FORMS[layer.form].chain(shape).full_ranks
        is_right = len(layer.ranks) == len(most) and all(
            rank is None or (is_integer(rank) and 1 <= rank <= full)
            for rank, full in zip(layer.ranks, most, strict=True)
        )
    if not is_right:
        raise ArtifactError(
            f"structure: it is damaged (layer {layer.name!r:.40} of shape {shape} has {layer.ranks!r:.40})"
        )
    return layer


def vbmf_ranks(layers: Sequence[Layer], form: FactorForm) -> dict[str, Kept]:
    """Return the VBMF ranks by layer: for Tucker of both channel modes' unfoldings, else of the form's matrix.

    Where VBMF takes a matrix for noise altogether, its rank 0 would cut the network in two. It then says nothing of
    what could be left out, and the mode, or the layer, stays whole.
    """
    matrices: dict[str, list[Tensor | None]] = {}
    for layer in layers:
        weight, layer_form = layer.weight.detach(), form_of(layer.shape, form)
        check_finite(layer.name, weight)
        if layer_form == "tucker":
            modes = zip((0, 1), layer.shape[:2], strict=True)
            matrices[layer.name] = [None if n <= WHOLE_UP_TO else unfold(weight, mode) for mode, n in modes]
        else:
            matrices[layer.name] = [to_matrix(weight, layer_form)]
    flat = {f"{name}:{i}": m for name, entries in matrices.items() for i, m in enumerate(entries) if m is not None}
    sigmas = {key: decomposition.s.double().cpu().numpy() for key, decomposition in svd(flat).items()}
    found = {key: vbmf_rank(sigma, flat[key].shape) or None for key, sigma in sigmas.items()}
    return {name: tuple(found.get(f"{name}:{i}") for i in range(len(entries))) for name, entries in matrices.items()}


def structure_of(
    model: nn.Module,
    example_input: Tensor,
    form: FactorForm,
    choose: Callable[[Sequence[Layer], FactorForm], Mapping[str, Kept]] = vbmf_ranks,
) -> Structure:
    """Return the ranks of every layer that can be decomposed, from its weight; one pass tells the positions.

    The classifier, a linear layer or 1 × 1 convolution that runs last, stays as it is. Its rows, one for each class,
    are trained to point away from each other, all alike. So its singular values are nearly equal, VBMF takes all of
    them for noise, and with the one basis that is left a classifier can hardly tell more than two classes apart,
    however long it is fine-tuned.
    """
    layers, skipped = find_layers(model, form if form in MATRIX_FORMS else "channel", without_transposed())
    seen = trace(model, on_device_of(model, example_input))
    last = next(reversed(seen.outputs), None)
    for layer in layers:
        if last in layer.modules and form_of(layer.shape, "tucker") == "channel":
            skipped[layer.name] = "the last layer"
    layers = tuple(layer for layer in layers if layer.name not in skipped)
    require_layers(layers, skipped)
    paths: dict[nn.Module, str] = {module: plain_name(name) for name, module in model.named_modules()}
    ranks = choose(layers, form)
    return Structure(
        layers=tuple(
            LayerRanks(
                name=layer.name,
                modules=tuple(paths[module] for module in layer.modules),
                shape=layer.shape,
                form=form_of(layer.shape, form),
                ranks=ranks[layer.name],
                positions=_positions(seen, layer),
            )
            for layer in layers
        ),
        fixed_macs=other_macs(layers, seen),
        fixed_params=sum(p.numel() for p in model.parameters()) - sum(layer.weight.numel() for layer in layers),
    )


def _positions(seen: Trace, layer: Layer) -> Positions:
    """Return where a layer applies its weights: at its inputs, behind a first spatial factor, at its outputs."""
    axes = len(layer.shape) - 2
    inputs, outputs = seen.positions(layer, Chain(layer.shape, ((False,) * axes, (True,) * axes)))
    between = seen.positions(layer, FORMS["spatial"].chain(layer.shape))[0] if axes == 2 else outputs
    return Positions(*map(seen.per_sample, (inputs, between, outputs)))
