import gzip
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decomposable.data import fashion_mnist
from decomposable_edge.errors import DataError, InvalidArgumentError

COUNTS = {"train": 7, "t10k": 5}
few = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the folder may be used again
)


def as_idx(array):
    return struct.pack(f">{1 + array.ndim}I", 0x0800 | array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def write(tmp_path):
    def write(compress=True, name="fashion-mnist"):
        rng = np.random.default_rng(0)
        folder = tmp_path / name
        folder.mkdir()
        arrays = {}
        for part, count in COUNTS.items():
            arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            arrays[f"{part}-labels-idx1-ubyte"] = rng.integers(0, 10, count, dtype=np.uint8)
        for file, array in arrays.items():
            path = folder / (f"{file}.gz" if compress else file)
            path.write_bytes(gzip.compress(as_idx(array)) if compress else as_idx(array))
        return folder, arrays

    return write


def refused(folder):
    with pytest.raises(DataError) as caught:
        fashion_mnist.load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("in_parent", [False, True], ids=["the folder itself", "its parent"])
@pytest.mark.parametrize("compress", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize("name", ["fashion-mnist", "dataset-fashion-mnist"])
def test_what_is_loaded_is_what_was_written(write, compress, in_parent, name):
    folder, arrays = write(compress, name)
    data = fashion_mnist.load(folder.parent if in_parent else folder)
    for part, images in (("train", data.train), ("t10k", data.test)):
        np.testing.assert_array_equal(images.pixels.numpy(), arrays[f"{part}-images-idx3-ubyte"][:, None])
        np.testing.assert_array_equal(images.labels.numpy(), arrays[f"{part}-labels-idx1-ubyte"])
        assert images.labels.dtype == torch.int64
    assert (data.classes, data.train_count, data.test_count) == (10, 7, 5)


def test_batches(write):
    folder, arrays = write()
    data = fashion_mnist.load(folder)
    x, y = data.test_batch(torch.tensor([3]))
    expected = (arrays["t10k-images-idx3-ubyte"][3] / 255 - 0.2860) / 0.3530
    torch.testing.assert_close(x[0, 0], torch.from_numpy(expected).float())
    assert y.tolist() == [arrays["t10k-labels-idx1-ubyte"][3]]
    x, _ = data.train_batch(torch.arange(7), torch.Generator().manual_seed(0))
    assert x.shape == (7, 1, 28, 28)


def test_debians_folder_is_the_default(write, monkeypatch):
    folder, _ = write()
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", folder)
    assert fashion_mnist.load(None).train_count == 7
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", folder / "nowhere")
    with pytest.raises(InvalidArgumentError) as caught:
        fashion_mnist.load(None)
    assert caught.value.option == "--data"
    assert "dataset-fashion-mnist" in caught.value.allowed


def test_folders_that_are_no_data_set(tmp_path):
    assert "no such folder" in refused(tmp_path / "nowhere")
    line = refused(tmp_path)
    assert "no file of Fashion-MNIST" in line
    assert "dataset-fashion-mnist" in line


def test_a_missing_file_is_named(write):
    folder, _ = write()
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    assert "without t10k-labels-idx1-ubyte.gz;" in refused(folder)


ONE = np.zeros((1, 28, 28), np.uint8)
WRONG_FILES = {
    "empty": (b"", "its header is [0, 0, 0, 0]"),
    "no header": (b"\0\0\x08", "its header is [2048, 0, 0, 0]"),
    "labels": (as_idx(np.zeros(20, np.uint8)), "its header is [2049, 20, "),
    "text": (b"<html> this is an error page", "its header is [1013478509, "),
    "other images": (as_idx(np.zeros((2, 32, 32), np.uint8)), "its header is [2051, 2, 32, 32]"),
    "no images": (as_idx(ONE[:0]), "its header is [2051, 0, 28, 28]"),
    "too many images": (struct.pack(">4I", 2051, 60_001, 28, 28), "its header is [2051, 60001, 28, 28]"),
    "truncated": (as_idx(ONE)[:-1], "says 784 bytes and only 783 follow"),
    "too long": (as_idx(ONE) + b"x", "says 784 bytes and more follow"),
}


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize(("content", "message"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_files_of_something_else(write, content, message, compress):
    folder, _ = write()
    file = folder / "train-images-idx3-ubyte.gz"  # what it is, is told by its content
    file.write_bytes(gzip.compress(content) if compress else content)
    line = refused(folder)
    assert line.startswith(f"{file}: ")
    assert message in line
    assert "allowed: an idx file whose header is [2051, '1 to 60000', 28, 28]" in line


def test_labels_that_do_not_fit(write):
    folder, arrays = write()
    file = folder / "t10k-labels-idx1-ubyte.gz"
    file.write_bytes(gzip.compress(as_idx(np.zeros(4, np.uint8))))
    assert f"{file}: 4 labels; allowed: 5" in refused(folder)
    labels = arrays["t10k-labels-idx1-ubyte"].copy()
    labels[2] = 10
    file.write_bytes(gzip.compress(as_idx(labels)))
    assert f"{file}: image 3 has label 10; allowed: 0 to 9" in refused(folder)


def test_broken_gzip(write):
    folder, _ = write()
    file = folder / "train-images-idx3-ubyte.gz"
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[-6] ^= 1  # in the checksum
    for content in (whole[:-300], bytes(damaged), whole[:10] + b"\xff" * 100):
        file.write_bytes(content)
        assert f"{file}: cannot be read (" in refused(folder)


def test_a_gzip_bomb_is_not_inflated(write):
    folder, _ = write()
    file = folder / "t10k-images-idx3-ubyte.gz"
    with gzip.open(file, "wb", compresslevel=1) as stream:
        stream.write(struct.pack(">4I", 2051, 5, 28, 28))
        for _ in range(200):
            stream.write(bytes(1_000_000))
    tracemalloc.start()
    try:
        assert "more follow" in refused(folder)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@few
@given(st.binary(max_size=40), st.booleans())
def test_any_bytes_give_an_array_or_one_line(tmp_path, content, compress):
    file = tmp_path / "file"
    file.write_bytes(gzip.compress(content) if compress else content)
    line = ""
    try:
        assert len(fashion_mnist.read_idx(file, shape=(), most=100)) <= 100
    except DataError as error:
        line = str(error)
    assert not line or line.startswith(f"{file}: ")


@few
@given(st.integers(1, 5), st.lists(st.integers(1, 4), max_size=3), st.integers(0, 2**32 - 1), st.booleans())
def test_what_is_written_is_read(tmp_path, count, shape, seed, compress):
    array = np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)
    file = tmp_path / "file"
    file.write_bytes(gzip.compress(as_idx(array)) if compress else as_idx(array))
    np.testing.assert_array_equal(fashion_mnist.read_idx(file, shape=tuple(shape), most=5), array)


def test_the_full_set(full_data):
    data = fashion_mnist.load(full_data("fashion-mnist"))
    assert (data.train_count, data.test_count) == (60_000, 10_000)
    assert data.train.labels.bincount().tolist() == [6000] * 10
    values = data.train.pixels.double() / 255
    assert float(values.mean()) == pytest.approx(fashion_mnist.MEAN[0], abs=6e-5)
    assert float(values.std()) == pytest.approx(fashion_mnist.STD[0], abs=6e-5)
