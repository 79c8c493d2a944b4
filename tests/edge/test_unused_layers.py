"""Layers that only training uses: they count in every plan, and no memory is taken for what they claim."""

import tracemalloc

import numpy as np
import pytest
from sealing import seal

from decomposable_edge import AnySizeSession
from decomposable_edge.errors import ArtifactError


@pytest.fixture
def written(tiny_parts, tmp_path):
    """A file with a third layer of this record, which is not in the graph."""

    def write(**record):
        model, description, arrays = tiny_parts()
        cost = {"form": "channel", "shape": [2000, 3000], "dense_macs": 0, "macs_per_rank": 0}
        description["layers"].append({"name": "unused", **cost, **record})
        description["state"]["unused.weight"] = {"trainable": True}
        shapes = {"first/unused": (2000, 3000), "second/unused": (2000, 2000), "state/unused.weight": (2000, 3000)}
        arrays |= {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        arrays["scores/unused"] = np.zeros(2000)
        for end, value in (("lower", 1), ("upper", 2000)):
            arrays[f"limits/{end}"] = np.append(arrays[f"limits/{end}"], value)
        path = tmp_path / "unused.safetensors"
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
    assert peak < 10_000_000  # its weights are 64 MB
    assert plan.ranks["unused"] == 30
    other = AnySizeSession(tiny, ranks={"a": 2}, threads=1)
    np.testing.assert_array_equal(session.run(x), other.run(x))


@pytest.mark.parametrize("wrong", [{"shape": [2000, 2000]}, {"shape": [2**20, 2**20]}, {"name": "a"}])
def test_what_cannot_be_is_refused(written, wrong):
    with pytest.raises(ArtifactError):
        AnySizeSession(written(**wrong))
