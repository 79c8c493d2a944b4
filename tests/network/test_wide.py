"""Outputs as wide as a vocabulary: moments in blocks, so that time and memory are bounded."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable.core import moments, sums

CUT = """
import resource
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))  # seconds of the processor: a busy machine makes no difference
import torch
from torch import nn
import decomposable as dn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 50_000)).eval()
data = [torch.randn(32, 32) for _ in range(10)]
lines = []
net = dn.decompose(model, data=data, progress=lines.append)
net.resize_(macs=0.25)
assert net(data[0]).shape == (32, 50_000)
print(next(line for line in lines if line.startswith('measuring')))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.slow
def test_fifty_thousand_outputs_end_within_a_minute_and_two_gib():
    """G would be 10 GB as a whole."""
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", CUT], capture_output=True, text=True, check=True, env=one_thread)
    first, gib = ran.stdout.splitlines()[-2:]
    assert float(gib) < 2
    assert first.startswith("measuring 320 samples, about ")
    assert "MiB of moments" in first


def test_memory_grows_with_the_width_and_not_with_its_square():
    def layer(width):
        model = nn.Sequential(nn.Linear(8, width, device="meta"))
        from decomposable.core.layers import find_layers

        return find_layers(model, "channel")[0]

    narrow, wide = (moments.moments_bytes(layer(width), with_gradients=True) for width in (25_600, 51_200))
    assert wide < 2.01 * narrow < 2**29


def test_a_wide_network_is_cut_as_well_in_blocks_as_whole(monkeypatch):
    """On samples that neither saw: at least half of what whole moments are better by than singular values."""
    torch.manual_seed(0)
    x = torch.randn(512, 24) @ torch.randn(24, 24)
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 96)).eval()
    lost = {}
    for name, widest in (("whole", 4096), ("blocks", 32)):
        monkeypatch.setattr(sums, "WIDEST", widest)
        monkeypatch.setattr(sums, "BLOCK", 16)
        net = dn.decompose(model, data=list(x[:400].split(20)), criterion="output")
        assert net.cut_report.kept == "data"
        net.resize_(macs=0.5)
        with torch.no_grad():
            lost[name] = float((net(x[400:]) - model(x[400:])).square().mean())
    net = dn.decompose(model, x[:1])
    net.resize_(macs=0.5)
    with torch.no_grad():
        plain = float((net(x[400:]) - model(x[400:])).square().mean())
    assert lost["whole"] < plain
    assert lost["blocks"] <= (lost["whole"] + plain) / 2
