"""Layers that only training uses: they count in every plan, and no memory is taken for what they claim."""

import tracemalloc

import numpy as np
import pytest

from decomposable_edge import AnySizeSession
from decomposable_edge.container import seal
from decomposable_edge.errors import ArtifactError


@pytest.fixture
def written(tiny_parts, tmp_path):
    """A bundle with a third layer of this record, which is not in the graph."""

    def write(**record):
        model, description, arrays = tiny_parts()
        cost = {"form": "channel", "shape": [20_000, 30_000], "dense_macs": 0, "macs_per_rank": 0, "stored": 20_000}
        description["layers"].append({"name": "unused", **cost, **record})
        arrays["scores"] = np.concatenate([arrays["scores"], np.zeros(20_000)])
        for end, value in (("lower", 1), ("upper", 20_000)):
            arrays[f"limits/{end}"] = np.append(arrays[f"limits/{end}"], value)
        path = tmp_path / "unused.onnx"
        path.write_bytes(seal(model, description, arrays))
        return path

    return write


def test_they_count_and_take_no_memory(written, tiny):
    x = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
    path = written()
    tracemalloc.start()
    session = AnySizeSession(path, threads=1)
    session.prepare()
    plan = session.resize(ranks={"a": 2, "unused": 30})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000_000  # its weights would be 2.4 GB
    assert plan.ranks["unused"] == 30
    other = AnySizeSession(tiny, ranks={"a": 2}, threads=1)
    np.testing.assert_array_equal(session.run(x), other.run(x))


@pytest.mark.parametrize("wrong", [{"stored": 0}, {"stored": 20_001}, {"stored": "1"}, {"stored": None}, {"name": "a"}])
def test_what_cannot_be_is_refused(written, wrong):
    with pytest.raises(ArtifactError):
        AnySizeSession(written(**wrong))


def test_a_layer_of_the_graph_has_its_weights(tiny_parts, tmp_path):
    model, description, arrays = tiny_parts()
    description["layers"][0]["stored"] = 6
    path = tmp_path / "claims.onnx"
    path.write_bytes(seal(model, description, arrays))
    with pytest.raises(ArtifactError, match="not where they should be"):
        AnySizeSession(path)
