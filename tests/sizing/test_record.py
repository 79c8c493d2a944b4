"""What choosing a size needs, written and read again, and what is refused."""

import json

import numpy as np
import pytest

from decomposable_edge.fields import Damaged, Fields
from decomposable_edge.sizing.cost import LayerCost, LayerShape, LeftAlone
from decomposable_edge.sizing.interpolation import CalibratedSizes, position
from decomposable_edge.sizing.plans import SizeRequest
from decomposable_edge.sizing.ranks import RankSelector
from decomposable_edge.sizing.record import (
    Arrays,
    describe,
    layer_entry,
    read_layer,
    read_selector,
    read_statistics,
)

LAYERS = (
    LayerShape(name="conv", form="spatial", shape=(6, 4, 3, 3)),
    LayerShape(name="fc", form="channel", shape=(5, 8)),
)
FEEDERS = {"norm": "conv"}
BUFFERS = {"norm.running_mean": (6,), "norm.running_var": (6,), "fc.bias": (5,)}


def chosen(selector, **size):
    return selector.plan_for(SizeRequest(**size))


def make_selector():
    costs = tuple(LayerCost.of(layer, dense_macs=900, macs_per_rank=100) for layer in LAYERS)
    full = np.array([cost.full_rank for cost in costs])
    return RankSelector(
        costs=costs,
        scores=tuple(np.linspace(2, 1, rank) for rank in full),
        fixed_macs=50,
        fixed_params=17,
        lower=np.ones(2, np.int64),
        upper=full - 1,
        left_alone=(LeftAlone(name="lstm", macs=50, params=17),),
        stored=full - 1,
    )


def make_statistics(selector):
    plans = (chosen(selector, macs=0.4), chosen(selector, macs=0.7))
    random = np.random.default_rng(0)
    return CalibratedSizes(
        names=("norm",),
        channels=(6,),
        layer_before_norm=("conv",),
        positions=tuple(map(position, plans)),
        plans=plans,
        has_explicit_full=True,
        full_plan=selector.full_plan(),
        mean_SC=random.random((2, 6), np.float32),
        var_SC=random.random((2, 6), np.float32),
        original=(random.random(6, np.float32), random.random(6, np.float32)),
        alignments=(1, 8),
        grids=(1,),
    )


def written():
    selector = make_selector()
    fields, arrays = describe(selector, FEEDERS, make_statistics(selector), None)
    entries = [layer_entry(layer, cost) for layer, cost in zip(LAYERS, selector.costs, strict=True)]
    return json.loads(json.dumps({"layers": entries, **fields})), arrays


def read(description, arrays):
    top, found = Fields(description, "the file"), Arrays(arrays, lambda array: array, "array")
    layers = [read_layer(record) for record in top.record_list("layers")]
    stored = np.array([layer.full_rank - 1 for layer in layers])
    selector = read_selector(top, layers, stored, found)
    statistics = read_statistics(top, selector, BUFFERS, found, CalibratedSizes)
    found.require_all_taken()
    return selector, statistics


def test_what_was_written_is_read_again():
    selector, statistics = read(*written())
    whole = make_selector()
    assert (selector.costs, selector.left_alone) == (whole.costs, whole.left_alone)
    assert (selector.fixed_macs, selector.fixed_params) == (50, 17)
    for size in (0.3, 0.5, 1.0):
        assert chosen(selector, macs=size) == chosen(whole, macs=size)
    assert selector.full_plan() == whole.full_plan()
    before = make_statistics(whole)
    for name in ("names", "channels", "layer_before_norm", "positions", "plans", "full_plan", "alignments", "grids"):
        assert getattr(statistics, name) == getattr(before, name)
    assert statistics.has_explicit_full
    for one, other in ((statistics.mean_SC, before.mean_SC), (statistics.var_SC, before.var_SC)):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(statistics.original, before.original)


def setting(*path_and_value):
    *path, last, value = path_and_value

    def spoil(description, arrays):
        place = description
        for key in path:
            place = place[key]
        place[last] = value

    return spoil


def array(name, change):
    def spoil(description, arrays):
        for each in [key for key in arrays if key.startswith(name)]:
            arrays[each] = change(arrays[each])

    return spoil


def extra(description, arrays):
    arrays["extra"] = np.zeros(2)


def without_macs(description, arrays):
    description["fixed_macs"] = 0
    for layer in description["layers"]:
        layer["dense_macs"] = 0


SPOILT = {
    "an array that belongs to nothing": extra,
    "no MACs": without_macs,
    "costs beyond 64 bits": setting("fixed_params", 2**62),
    "MACs beyond 64 bits": setting("layers", 0, "macs_per_rank", 2**61),
    "a shape of nothing": setting("layers", 0, "shape", [6, 0, 3, 3]),
    "too many bases": setting("layers", 0, "shape", [2**30, 2**30, 3, 3]),
    "a form that a matrix has not": setting("layers", 1, "form", "spatial"),
    "scores that rise": array("scores", lambda a: a[::-1].copy()),
    "scores that are no numbers": array("scores", lambda a: a * np.nan),
    "too few scores": array("scores", lambda a: a[1:]),
    "scores of another type": array("scores", lambda a: a.astype(np.float32)),
    "a limit of 0": array("limits/lower", lambda a: a * 0),
    "a limit above what is stored": array("limits/upper", lambda a: a + 1),
    "fed by nobody": setting("layer_before_norm", {"norm": "nobody"}),
    "statistics of nothing": setting("statistics", "names", []),
    "statistics twice": setting("statistics", "names", ["norm", "norm"]),
    "alignments of 0": setting("statistics", "alignments", [0]),
    "a grid that was not calibrated": setting("statistics", "grids", [4]),
    "no size": array("statistics/ranks", lambda a: a[:1]),
    "ranks of 0": array("statistics/ranks", lambda a: a * 0),
    "sizes that are not in order": array("statistics/positions", lambda a: a[::-1].copy()),
    "sizes without end": array("statistics/positions", lambda a: a + np.inf),
    "means of whole numbers": array("statistics/mean", lambda a: a.astype(np.int64)),
    "means of another type": array("statistics/mean", lambda a: a.astype(np.float64)),
    "variances of fewer channels": array("statistics/var", lambda a: a[:, 1:]),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_a_claim_that_cannot_be_is_refused(spoil):
    description, arrays = written()
    spoil(description, arrays)
    with pytest.raises(Damaged) as caught:
        read(description, arrays)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["left_alone", "layer_before_norm", "fixed_params"])
def test_a_description_that_leaves_something_out_is_refused(key):
    description, arrays = written()
    del description[key]
    with pytest.raises(Damaged, match=key):
        read(description, arrays)
