"""Files that an earlier version wrote: they load, and give what they gave.

`tests/fixtures` holds a network of `small_cnn(widths=(8, 16, 16, 8))`, calibrated for a grid, saved and exported by the
version before the package was put into rooms, and what that version computed with them at three sizes.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import decomposable as dn
from decomposable.network import artifact

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
FILE, BUNDLE = FIXTURES / "network.safetensors", FIXTURES / "network.anysize.onnx"
PLANS = json.loads((FIXTURES / "plans.json").read_text(encoding="utf-8"))
EXPECTED = np.load(FIXTURES / "expected.npz")


def check(plan, size):
    assert (dict(plan.ranks), plan.macs, plan.params) == tuple(PLANS[size][key] for key in ("ranks", "macs", "params"))


@pytest.mark.parametrize("size", PLANS)
def test_a_file_of_before_gives_what_it_gave(size):
    net = dn.load(FILE)
    check(net.resize_(macs=float(size)), size)
    with torch.no_grad():
        y = net(torch.from_numpy(EXPECTED["x"])).numpy()
    np.testing.assert_allclose(y, EXPECTED[f"torch-{size}"], rtol=0, atol=1e-5)


def test_all_of_it_is_still_there():
    net, stored = dn.load(FILE), artifact.read(FILE)
    assert net.info == stored.info == {"made": "before the rooms", "accuracy": [0.5, 0.9]}
    assert net.plan().is_full
    assert net.input.shape == (1, 8, 8)
    assert stored.statistics is not None
    assert stored.statistics.grids == (1,)


@pytest.mark.parametrize("size", [size for size in PLANS if size != "1.0"])
def test_a_part_of_a_file_of_before_is_read(size):
    net = dn.load(FILE, macs=float(size))
    check(net.plan(), size)
    with torch.no_grad():
        y = net(torch.from_numpy(EXPECTED["x"])).numpy()
    np.testing.assert_allclose(y, EXPECTED[f"torch-{size}"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", PLANS)
def test_a_bundle_of_before_gives_what_it_gave(size):
    pytest.importorskip("onnxruntime")
    from decomposable_edge import AnySizeSession

    session = AnySizeSession(BUNDLE, threads=1)
    check(session.resize(macs=float(size), align=1), size)
    np.testing.assert_allclose(session.run(EXPECTED["x"]), EXPECTED[f"edge-{size}"], rtol=0, atol=1e-5)


def test_a_file_of_before_is_written_again_byte_for_byte(tmp_path):
    """The format has not changed."""
    dn.load(FILE).save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == FILE.read_bytes()
