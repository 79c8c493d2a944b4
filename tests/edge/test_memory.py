"""A bundle is read as far as it is needed: memory for the size, and damage noticed all the same."""

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from decomposable_edge import AnySizeSession
from decomposable_edge.bundle import read_bundle
from decomposable_edge.container import seal
from decomposable_edge.errors import ArtifactError
from decomposable_edge.source import BLOCK, Source, Stored

WIDTH = 1600
PROGRAM = """
    import json, sys
    import numpy as np
    from decomposable_edge import AnySizeSession


    def peak():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


    small, large, x = sys.argv[1:]
    AnySizeSession(small, threads=1).run(np.zeros((1, 6), np.float32))  # what imports and the runtime take
    before = peak()
    session = AnySizeSession(large, macs=0.1, threads=1)
    y = session.run(np.load(x))
    opened = peak() - before
    session.resize(macs=0.5)
    session.run(np.load(x))
    print(json.dumps([opened, peak() - before, float(np.abs(y).sum())]))
"""


@pytest.fixture(scope="module")
def large(tiny_parts, tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "large.onnx"
    path.write_bytes(seal(*tiny_parts(width=WIDTH)))
    return path


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from Linux's /proc")
def test_opening_a_bundle_at_a_tenth_takes_memory_for_a_tenth(large, tiny, tmp_path):
    x = np.random.default_rng(0).standard_normal((1, WIDTH)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tiny), str(large), str(tmp_path / "x.npy")]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    opened, resized, total = json.loads(done.stdout)
    # At 0.1 of the MACs the factors have 0.05 of the file's bytes, as those of full rank have twice the dense MACs.
    assert large.stat().st_size > 40e6
    assert opened < 0.25 * large.stat().st_size  # the whole file, read and parsed, would take 2.1 of it
    assert resized > opened + 0.1 * large.stat().st_size  # more is read when more is needed
    assert total == pytest.approx(float(np.abs(AnySizeSession(large, macs=0.1, threads=1).run(x)).sum()), rel=1e-4)


def test_what_is_read_of_a_factor_is_what_lies_there(large, tiny_parts):
    model, _, _ = tiny_parts(width=WIDTH)
    weights = {tensor.name: np.frombuffer(tensor.raw_data, np.float32) for tensor in model.graph.initializer}
    for layer in read_bundle(large).layers:
        first, second = (weights[f"{layer.name}/{part}"].reshape(WIDTH, WIDTH) for part in ("first", "second"))
        assert isinstance(layer.weights[0], Stored)
        for rank in (3, 1, 40, WIDTH, 7):
            ours = layer.slices((rank,))
            np.testing.assert_array_equal(ours[0], first[:rank])
            np.testing.assert_array_equal(ours[1], second[:, :rank])
            assert not any(part.flags.writeable for part in ours)
        np.testing.assert_array_equal(layer.weights[0][5], first[5])
        np.testing.assert_array_equal(layer.weights[1].all(), second)


def test_a_slice_that_cannot_be_read_is_refused(large):
    [layer, *_] = read_bundle(large).layers
    for key in (np.s_[2:5], np.s_[::2], np.s_[:, 1:], np.s_[..., 0], np.s_[:3, :3]):
        with pytest.raises(TypeError, match="only"):
            layer.weights[0][key]


@pytest.mark.parametrize("kind", ["flipped", "shorter"])
def test_damage_after_it_was_opened_is_noticed_when_more_is_read(tiny_parts, tmp_path, kind):
    path = tmp_path / "net.onnx"
    path.write_bytes(seal(*tiny_parts(width=400)))
    session = AnySizeSession(path, macs=0.1)
    x = np.ones((1, 400), np.float32)
    y, size = session.run(x), path.stat().st_size
    with path.open("r+b") as file:
        if kind == "shorter":
            file.truncate(size // 2)
        else:
            for at in range(BLOCK // 2, size, BLOCK):  # in every block
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ArtifactError, match=r"net.onnx: it (was changed|became shorter) after it was opened"):
        session.resize(macs=0.9)
    np.testing.assert_array_equal(session.run(x), y)  # it goes on at the size it had


def test_a_file_that_is_replaced_while_it_is_open_is_still_the_one_that_was_opened(tiny_parts, tmp_path):
    path, other = tmp_path / "net.onnx", tmp_path / "other.onnx"
    path.write_bytes(seal(*tiny_parts(width=400)))
    other.write_bytes(seal(*tiny_parts(width=400, seed=1)))
    x = np.ones((1, 400), np.float32)
    expected = AnySizeSession(path, macs=0.9).run(x)
    session = AnySizeSession(path, macs=0.1)
    other.replace(path)  # as an export does
    session.resize(macs=0.9)
    np.testing.assert_array_equal(session.run(x), expected)


def test_a_source_reads_across_its_blocks(tmp_path):
    content = np.random.default_rng(0).bytes(3 * BLOCK + 17)
    (tmp_path / "file").write_bytes(content)
    source = Source(tmp_path / "file", most=1 << 30, without=64)
    for begin, count in ((0, 5), (BLOCK - 3, 7), (10, 3 * BLOCK), (3 * BLOCK + 16, 1), (5, 0)):
        assert source.read(begin, count) == content[begin : begin + count]
