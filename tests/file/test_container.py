"""The container of all files, without PyTorch: what is written comes back, by parts too, and other readers read it."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from decomposable_edge.errors import ArtifactError, InvalidArgumentError
from decomposable_edge.file.container import Container, InNumpy, opened, write

ARRAYS = {
    "a": np.arange(60_000, dtype=np.float32).reshape(300, 200),
    "bytes": np.arange(7, dtype=np.uint8),
    "empty": np.zeros((0, 3), np.int64),
    "flags": np.array([True, False, True]),
    "half": np.ones((2, 3, 4), np.float16),
    "one": np.array(5.0),
}


@pytest.fixture
def path(tmp_path):
    tensors = {name: (str(a.dtype), a.shape, InNumpy().bytes_of(a)) for name, a in ARRAYS.items()}
    size = write(tmp_path / "file", {"kind": "test", "info": {"é": [1, None]}}, tensors)
    assert size == (tmp_path / "file").stat().st_size
    return tmp_path / "file"


def test_what_is_written_comes_back(path):
    with opened(path, InNumpy()) as container:
        assert container.description["info"] == {"é": [1, None]}
        found = container.read_all()
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
        assert (found[name].dtype, found[name].flags.writeable) == (array.dtype, False)


def test_safetensors_itself_reads_it(path):
    found = load_file(path)
    assert found.keys() == ARRAYS.keys()
    assert all(np.array_equal(found[name], array) for name, array in ARRAYS.items())


def test_rows_are_read_alone_and_verified_alone(path):
    content, [place] = path.read_bytes(), [200 * 4 * 150 + 1]  # in row 150 of "a", which lies behind "one" and "empty"
    start = content.index(ARRAYS["a"].tobytes())
    path.write_bytes(content[: start + place] + b"\xff" + content[start + place + 1 :])
    stored = Container(path, InNumpy()).tensors["a"]
    for key in (slice(0, 3), slice(None, 100), slice(200, None), slice(5, 5), 0, -1, [1, 0, 20]):
        np.testing.assert_array_equal(stored[key], ARRAYS["a"][key])
    for key in (150, slice(149, 152), slice(None, None)):
        with pytest.raises(ArtifactError, match="the checksum of tensor 'a' is wrong"):
            stored[key]
    for key in (slice(None, None, 2), (0, 0), None):
        with pytest.raises(TypeError, match="only"):
            stored[key]


def test_a_type_that_numpy_has_not_is_refused_when_it_is_read(tmp_path):
    write(tmp_path / "file", {}, {"x": ("bfloat16", (2,), memoryview(bytes(4)))})
    refused = pytest.raises(ArtifactError, match="bfloat16, which a device has not")
    with refused, opened(tmp_path / "file", InNumpy()) as container:
        container.tensors["x"].all()


def test_a_description_that_is_too_large_is_not_written(tmp_path):
    with pytest.raises(InvalidArgumentError, match="info: the description takes"):
        write(tmp_path / "file", {"info": [0] * 600_000}, {})
    assert list(tmp_path.iterdir()) == []
