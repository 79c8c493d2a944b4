"""One size as a program of `torch.export`: read again, the same numbers, nothing private."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable import models
from decomposable.export import one_size
from decomposable.export.program import ExportError
from decomposable_edge.errors import InvalidArgumentError

# Few sizes are calibrated here, on purpose: what a size far from them does is looked at in test_grid.py.
pytestmark = pytest.mark.filterwarnings("ignore:batch normalisation was calibrated")


@pytest.fixture(scope="module", params=["spatial", "channel"])
def net(request):
    torch.manual_seed(0)
    net = dn.decompose(models.small_cnn((8, 8, 12)), example_input=torch.randn(1, 1, 8, 8), form=request.param)
    net.calibrate_([torch.randn(64, 1, 8, 8) + 1 for _ in range(2)], sizes=[0.3, 1.0])
    return net.train()


def test_a_size_runs_without_the_model_at_any_batch_size_and_tells_nothing_of_where_it_was_made(net, tmp_path):
    path = tmp_path / "net.pt2"
    report = dn.export_torch(net, path, macs=0.4)
    assert net.plan().is_full
    assert net.training
    at_size = net.extract(net.plan(macs=0.4)).eval()
    program = torch.export.load(path).module()
    for batch in (1, 4):
        x = torch.randn(batch, 1, 8, 8)
        torch.testing.assert_close(program(x), at_size(x))
    assert (report.format, report.batches, report.outputs) == ("torch-export", (1, 2, 5), ("output",))
    assert report.bytes == path.stat().st_size
    assert report.largest_difference < 1e-6
    assert list(tmp_path.iterdir()) == [path]
    with zipfile.ZipFile(path) as archive:
        texts = [archive.read(name) for name in archive.namelist() if "/weights/" not in name]
        assert any("full_macs" in name for name in archive.namelist())
    for private in (b".py\\", b'.py"', b"site-packages", b"stack_trace"):
        assert not any(private in text for text in texts), private


def test_a_plain_module_of_several_outputs_and_a_fixed_batch(tmp_path):
    class Two(nn.Module):
        def forward(self, x):
            return {"sum": x.sum(1), "halves": x.reshape(3, 2, -1)}

    example = torch.randn(3, 6)
    with pytest.raises(ExportError, match="batch=1 or another"):
        dn.export_torch(Two(), tmp_path / "net.pt2", example_input=example)
    report = dn.export_torch(Two(), tmp_path / "net.pt2", example_input=example, batch=3)
    assert report.outputs == ("sum", "halves")
    got = torch.export.load(tmp_path / "net.pt2").module()(example)
    assert torch.equal(got["sum"], example.sum(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_types_that_onnx_has_not(dtype, tmp_path):
    net = nn.Linear(6, 2).to(dtype)
    report = dn.export_torch(net, tmp_path / "net.pt2", example_input=torch.randn(1, 6).to(dtype))
    assert report.largest_difference == 0


def test_a_difference_or_a_wrong_call_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "net.pt2"
    path.write_bytes(b"the old one")
    example = torch.randn(2, 6)
    with pytest.raises(InvalidArgumentError, match=r"got the ending '.onnx'; allowed: .pt2"):
        dn.export_torch(nn.Linear(6, 2), tmp_path / "net.onnx", example_input=example)
    monkeypatch.setattr(one_size, "largest_difference", lambda *_: 0.5)
    with pytest.raises(ExportError, match=r"by 5.00e-01, and nothing was written"):
        dn.export_torch(nn.Linear(6, 2), path, example_input=example)
    assert path.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [path]


WITHOUT_ONNX = """
import sys
sys.modules.update(onnx=None, onnxruntime=None, onnxscript=None)
import torch
import decomposable as dn
from decomposable_edge.errors import MissingExtraError
from decomposable.export.measuring import measure
net = dn.decompose(torch.nn.Linear(6, 4), torch.zeros(1, 6))
dn.export_torch(net, sys.argv[1], ratio=0.5)
measure(net, [0.5], seconds=0)
try:
    dn.export_onnx(net, sys.argv[1].replace("pt2", "onnx"))
except MissingExtraError as error:
    print(error)
"""


@pytest.mark.slow
def test_without_the_extra_onnx_torch_is_enough(tmp_path):
    """For an export to PyTorch's own file, and to measure in PyTorch."""
    source = str(Path(dn.__file__).parents[1])
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_ONNX, str(tmp_path / "net.pt2")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": source}, capture_output=True, text=True)
    assert done.stdout.startswith("onnx is not installed; run "), done.stderr
    assert (tmp_path / "net.pt2").exists()
