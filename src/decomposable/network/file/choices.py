"""The part of a file that a choice of size depends on: costs, scores, limits, the sizes that are calibrated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decomposable.core.factors import Factors
from decomposable.fields import MOST, MOST_VALUES, Fields, require
from decomposable.network.calibration.statistics import Statistics
from decomposable.network.file.container import FLOATS, Container
from decomposable.network.file.skeleton import StoredLayer, join
from decomposable.network.parts import stored_ranks
from decomposable.sizing.cost import LayerCost, dense_size, factor_sizes
from decomposable.sizing.plans import RankPlan
from decomposable.sizing.ranks import Ints, RankSelector
from decomposable.sizing.record import alignments_from, grids_from, left_alone_from
from decomposable.sizing.shrunk import plan_of, with_stored


@dataclass(frozen=True)
class Source:
    """A file, and the tensors of it that nothing has taken yet."""

    container: Container
    unused: dict[str, Tensor]

    def array(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """The content of a small tensor, which has to be of this type and shape."""
        tensor = take(self.unused, name)
        is_right = tensor.dtype == dtype and tuple(tensor.shape) == shape
        require(is_right, f"tensor '{name}' is {tensor.dtype} of shape {tuple(tensor.shape)}, not {dtype} of {shape}")
        return self.container.read(name).numpy()


def take(tensors: dict[str, Tensor], name: str) -> Tensor:
    """A tensor that has to be there, and is not there any more afterwards."""
    require(name in tensors, f"tensor '{name}' is missing")
    return tensors.pop(name)


def read_selector(
    top: Fields,
    layers: Sequence[StoredLayer],
    records: Sequence[Fields],
    factors: Mapping[str, Factors],
    source: Source,
) -> RankSelector:
    """All that a choice of size depends on."""
    costs, scores = [], []
    for layer, record in zip(layers, records, strict=True):
        cost = LayerCost(
            name=layer.name,
            full_rank=layer.full_rank,
            dense_macs=record.integer("dense_macs"),
            macs_per_rank=record.integer("macs_per_rank"),
            dense_params=dense_size(layer.shape),
            params_per_rank=sum(factor_sizes(layer.shape, layer.form)),
        )
        score = source.array(f"scores/{layer.name}", torch.float64, (cost.full_rank,))
        in_order = bool(np.isfinite(score).all() and (np.diff(score) <= 0).all())
        require(in_order, f"the scores of layer '{layer.name}' are not in order")
        costs.append(cost)
        scores.append(score)
    full = np.array([cost.full_rank for cost in costs], dtype=np.int64)
    stored = stored_ranks(factors)
    lower, upper = (source.array(f"limits/{end}", torch.int64, full.shape) for end in ("lower", "upper"))
    require(bool(((lower >= 1) & (lower <= upper) & (upper <= stored)).all()), "the limits of the ranks are wrong")
    fixed_macs = None if top.get("fixed_macs") is None else top.integer("fixed_macs")
    fixed_params = top.integer("fixed_params")
    most = sum(max(c.dense_macs, c.full_rank * c.macs_per_rank) for c in costs) + (fixed_macs or 0)
    require(most < MOST and sum(c.full_rank * c.params_per_rank for c in costs) < MOST, "the costs are too large")
    is_free = fixed_macs is not None and fixed_macs + sum(c.dense_macs for c in costs) == 0
    require(not is_free, "the network has no MACs")  # sizes are parts of that
    selector = RankSelector(
        costs=tuple(costs),
        scores=tuple(scores),
        fixed_macs=fixed_macs,
        fixed_params=fixed_params,
        lower=lower,
        upper=upper,
        left_alone=left_alone_from(top),
    )
    return with_stored(selector, stored)


def read_plan(top: Fields, selector: RankSelector, stored: Ints) -> RankPlan:
    """The size in force."""
    rows = top.get("plan")
    is_list = isinstance(rows, list) and len(rows) == len(selector.costs)
    require(is_list and all(isinstance(row, list) and len(row) == 2 for row in rows), "the plan is not a list of pairs")
    for (rank, is_dense), most, cost in zip(rows, stored.tolist(), selector.costs, strict=True):
        is_right = type(rank) is int and 1 <= rank <= most and type(is_dense) is bool
        is_right = is_right and (is_dense or rank < cost.full_rank)
        require(is_right, f"the plan has rank {rank!r:.40} for layer '{cost.name}'")
    return plan_of(selector, [rank for rank, _ in rows], [is_dense for _, is_dense in rows])


def read_statistics(
    top: Fields, selector: RankSelector, feeders: Mapping[str, str], state: Mapping[str, Tensor], source: Source
) -> Statistics | None:
    """The statistics of normalisation layers; their means and variances are on the meta device."""
    layer_names = {cost.name for cost in selector.costs}
    require(set(feeders.values()) <= layer_names, "a normalisation layer is fed by a layer that is not there")
    if top.get("statistics") is None:
        return None
    record = Fields(top.get("statistics"), "statistics")
    names = tuple(record.texts("names"))
    means = [state.get(join(name, "running_mean")) for name in names]
    require(all(mean is not None and mean.dim() == 1 for mean in means), "statistics are of layers that are not there")
    channels = tuple(len(mean) for mean in means if mean is not None)
    rows = (
        source.unused.get("statistics/ranks", torch.empty(0)).numel() // len(selector.costs) - 1
    )  # the last is the end
    total = sum(channels)
    require(bool(names) and rows > 0, "statistics are empty")
    require((rows + 1) * len(selector.costs) <= MOST_VALUES, f"statistics are of {rows:,} sizes")
    ranks = source.array("statistics/ranks", torch.int64, (rows + 1, len(selector.costs)))
    dense = source.array("statistics/dense", torch.bool, (rows + 1, len(selector.costs)))
    is_full = ranks == selector.full_ranks
    require(bool(((ranks >= 1) & (ranks <= selector.full_ranks)).all()), "statistics are of ranks that cannot be")
    require(bool((dense | ~is_full).all()), "statistics are of a full rank that is not dense")
    places = source.array("statistics/positions", torch.float64, (rows,))
    require(bool(np.isfinite(places).all() and (np.diff(places) >= 0).all()), "statistics are not in order")
    tensors = [take(source.unused, f"statistics/{name}") for name in ("mean", "var", "original_mean", "original_var")]
    for tensor, shape in zip(tensors, [(rows, total)] * 2 + [(total,)] * 2, strict=True):
        is_right = tuple(tensor.shape) == shape and tensor.dtype in FLOATS and tensor.dtype == tensors[0].dtype
        require(is_right, "statistics have the wrong shape or type")
    plans = [plan_of(selector, r, d) for r, d in zip(ranks, dense, strict=True)]
    return Statistics(
        names=names,
        channels=channels,
        feeders=tuple(map(feeders.get, names)),
        positions=tuple(places.tolist()),
        plans=tuple(plans[:-1]),
        mean_SC=tensors[0],
        var_SC=tensors[1],
        has_explicit_full=record.flag("has_explicit_full"),
        full_plan=plans[-1],
        alignments=alignments_from(record),
        grids=grids_from(record),
        original=(tensors[2], tensors[3]),
    )
