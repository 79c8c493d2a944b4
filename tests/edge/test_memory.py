"""A bundle is read as far as it is needed: memory for the size, and damage noticed all the same."""

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from sealing import seal

from decomposable_edge import AnySizeSession
from decomposable_edge.errors import ArtifactError
from decomposable_edge.network import open_network

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
    path = tmp_path_factory.mktemp("large") / "large.safetensors"
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
    arrays = tiny_parts(width=WIDTH)[2]
    for layer in open_network(large).layers:
        first, second = (arrays[f"{part}/{layer.name}"] for part in ("first", "second"))
        for rank in (3, 1, 40, WIDTH, 7):
            ours = layer.first((rank,))
            np.testing.assert_array_equal(ours[0], first[:rank])
            np.testing.assert_array_equal(ours[1], second[:rank].T)
            assert not any(part.flags.writeable for part in ours)
            theirs = layer.beyond(rank)
            np.testing.assert_array_equal(theirs[0], first[rank:])
            np.testing.assert_array_equal(theirs[1], second[rank:].T)
        np.testing.assert_array_equal(layer.weight(), arrays[f"state/{layer.name}.weight"])


def test_a_slice_that_cannot_be_read_is_refused(large):
    [layer, *_] = open_network(large).layers
    for key in (np.s_[::2], np.s_[:, 1:], np.s_[..., 0], np.s_[:3, :3]):
        with pytest.raises(TypeError, match="only"):
            layer.stages_stored[0][key]


@pytest.mark.parametrize("kind", ["flipped", "shorter"])
def test_damage_after_it_was_opened_is_noticed_when_more_is_read(tiny_parts, tmp_path, kind):
    path = tmp_path / "net.safetensors"
    path.write_bytes(seal(*tiny_parts(width=400)))
    session = AnySizeSession(path, macs=0.1)
    x = np.ones((1, 400), np.float32)
    y, size = session.run(x), path.stat().st_size
    with path.open("r+b") as file:
        if kind == "shorter":
            file.truncate(size // 2)
        else:
            for at in range(size // 2, size, 1000):
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ArtifactError, match=r"net.safetensors: (the checksum of tensor .* is wrong|.* cut short)"):
        session.resize(macs=0.9)
    np.testing.assert_array_equal(session.run(x), y)  # it goes on at the size it had


def test_a_file_that_is_replaced_while_it_is_open_is_still_the_one_that_was_opened(tiny_parts, tmp_path):
    path, other = tmp_path / "net.safetensors", tmp_path / "other.safetensors"
    path.write_bytes(seal(*tiny_parts(width=400)))
    other.write_bytes(seal(*tiny_parts(width=400, seed=1)))
    x = np.ones((1, 400), np.float32)
    expected = AnySizeSession(path, macs=0.9).run(x)
    session = AnySizeSession(path, macs=0.1)
    other.replace(path)  # as an export does
    session.resize(macs=0.9)
    np.testing.assert_array_equal(session.run(x), expected)
