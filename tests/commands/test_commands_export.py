"""`decomposable export`, called as users call it; and everything that can be wrong."""

import importlib
import json
import shutil
import sys

import numpy as np
import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable import models
from decomposable.commands import main as cli
from decomposable.network import artifact
from decomposable_edge.errors import how_to_install
from decomposable_edge.sizing.plans import SizeRequest

# Few sizes are calibrated here, on purpose: what a size far from them does is looked at in test_grid.py.
pytestmark = pytest.mark.filterwarnings("ignore:batch normalisation was calibrated")

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def build():
    return models.small_cnn((8, 8, 8))


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    net = dn.decompose(build(), example_input=torch.randn(1, 1, 8, 8))
    net.calibrate_([torch.randn(32, 1, 8, 8)], sizes=[0.25, 0.5, 1.0])
    return net.eval()


@pytest.fixture(scope="module")
def file(net, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "network.safetensors"
    net.save(path)
    return path


@pytest.fixture
def call(capsys):
    def call(*arguments):
        code = cli.main(["export", *(str(argument) for argument in arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def run(path, x):
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"input": x.numpy()})[0]


def test_a_size_as_onnx_and_what_is_said_about_it(net, file, call, tmp_path):
    out_file = tmp_path / "small.onnx"
    code, out, err = call(file, "--macs", "25%", "-o", out_file)
    assert code == 0, err
    plan = net.plan(macs=0.25, align="auto")
    lines = out.splitlines()
    assert lines[0].startswith("size: macs=0.25 (wide layers' ranks rounded to multiples of 16, 8 or 4 where")
    assert lines[1].startswith(f"MACs: {plan.macs:,} (0.2")
    assert lines[2].startswith(f"parameters: {plan.params:,} (")
    assert lines[3].startswith("largest difference from PyTorch: ")
    assert lines[4] == f"{out_file}: {out_file.stat().st_size:,} bytes"
    assert lines[5].startswith(
        f"run it with: onnxruntime.InferenceSession({str(out_file)!r}).run(None, {{'input': x}})"
    )
    assert lines[5].endswith("# x: float32, (batch, 1, 8, 8)")
    x = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        np.testing.assert_allclose(run(out_file, x), net.extract(plan)(x).numpy(), atol=1e-4)
    assert err == "reading the network\nexporting and comparing with PyTorch\n"


def test_as_json_and_as_torch_export(net, file, call, tmp_path):
    out_file = tmp_path / "small.pt2"
    code, out, _ = call(file, "--params", "0.3", "-o", out_file, "--json")
    assert code == 0
    report, plan = json.loads(out), net.plan(params=0.3, align="auto")
    assert report["align"] == "auto"
    assert (report["format"], report["path"], report["bytes"]) == (
        "torch-export",
        str(out_file),
        out_file.stat().st_size,
    )
    assert (report["macs"], report["params"], report["ranks"]) == (plan.macs, plan.params, dict(plan.ranks))
    assert report["largest_difference"] <= 1e-4
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(torch.export.load(out_file).module()(x), net.extract(plan)(x))


@pytest.mark.slow
def test_a_file_of_one_size(net, file, call, tmp_path):
    contents = artifact.read(file)
    small = tmp_path / "small.safetensors"
    plan = contents.selector.plan_for(SizeRequest(macs=0.25))
    artifact.save_size(contents, plan, small)
    arguments = [small, "-o", tmp_path / "small.onnx"]
    code, out, err = call(*arguments, "--input", "1x8x8")
    assert code == 0, err
    assert out.startswith("size: as it was saved\nMACs: ")
    x = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        np.testing.assert_allclose(run(tmp_path / "small.onnx", x), net.extract(plan)(x).numpy(), atol=1e-4)
    code, _, err = call(*arguments, "--input", "1x8x8", "--macs", "0.5", "--force")
    assert code == 2
    assert "one size" in err


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A network whose ranks "auto" rounds, and its file."""
    torch.manual_seed(0)
    net = dn.decompose(models.small_cnn((96, 96, 96)).eval(), example_input=torch.randn(1, 1, 8, 8))
    net.calibrate_([torch.randn(32, 1, 8, 8)], sizes=[0.25, 0.5, 0.75])
    path = tmp_path_factory.mktemp("wide") / "network.safetensors"
    net.save(path, info={"recipe": "digits"})
    return net, path


@pytest.mark.parametrize("ending", [pytest.param("onnx", marks=pytest.mark.slow), "pt2"])
def test_auto_is_the_default_which_it_says(wide, ending, call, tmp_path):
    net, file = wide
    plans = {align: net.plan(macs=0.5, align=align) for align in ("auto", 1, 8)}
    assert len({plan.ranks for plan in plans.values()}) == 3
    out_file = tmp_path / f"small.{ending}"
    for align, plan in plans.items():
        arguments = [] if align == "auto" else ["--align", align]
        code, out, err = call(file, "--macs", "0.5", *arguments, "-o", out_file, "--json", "--force")
        assert code == 0, err
        report = json.loads(out)
        assert (report["align"], report["ranks"]) == (align, dict(plan.ranks))
        assert ("warning" in err) == (align != "auto")  # whose sizes were calibrated


@pytest.mark.slow
def test_in_python_auto_is_the_default_too_and_align_1_leaves_ranks_unrounded(wide, tmp_path):
    net, _ = wide
    plain, auto = (net.plan(macs=0.5, align=align).ranks for align in (1, "auto"))
    for export, name in ((dn.export_onnx, "a.onnx"), (dn.export_torch, "a.pt2")):
        assert export(net, tmp_path / name, macs=0.5).ranks == auto
        assert export(net, tmp_path / f"plain-{name}", macs=0.5, align=1).ranks == plain
    assert net.resize_(macs=0.5).ranks == auto
    assert net.resize_(macs=0.5, align=1).ranks == plain


@pytest.mark.slow
def test_the_hint_and_the_warning_lead_to_calibrate(wide, call, tmp_path):
    """What is hinted at can be done, and then nothing is warned of."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    file, out_file = shutil.copy(wide[1], tmp_path / "network.safetensors"), tmp_path / "small.onnx"
    _, out, err = call(file, "--macs", "0.25", "-o", out_file, "--force")
    assert "warning" not in err
    hint = out.splitlines()[-1]
    command = f"decomposable calibrate {file} --align 16"
    assert hint.startswith("hint: --align 16 ")
    assert hint.endswith(f": {command}")
    code, _, err = call(file, "--macs", "0.25", "--align", "16", "-o", out_file, "--force")
    assert code == 0
    assert "not rounded to multiples of 16" in err
    assert "or: decomposable calibrate FILE --align 16" in err
    assert cli.main([*command.split()[1:], "--images", "50", "--sizes", "0.25,0.3"]) == 0
    code, _, err = call(file, "--macs", "0.25", "--align", "16", "-o", out_file, "--force")
    assert code == 0
    assert "warning" not in err
    _, out, _ = call(file, "--macs", "0.25", "-o", out_file, "--force")
    assert out.splitlines()[-1] == "hint: --align 16 rounds every rank, which ONNX Runtime often runs faster"


def test_any_size(net, file, call, tmp_path):
    edge = pytest.importorskip("decomposable_edge")
    code, out, err = call(file, "--any-size", "-o", tmp_path / "net.safetensors")
    assert code == 0, err
    assert "size: all" in out
    assert "decomposable_edge.AnySizeSession(" in out
    session = edge.AnySizeSession(tmp_path / "net.safetensors")
    session.resize(macs=0.25)
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        wanted = net.extract(net.plan(macs=0.25))(x).numpy()
    np.testing.assert_allclose(np.asarray(session.run(x.numpy())).reshape(wanted.shape), wanted, atol=1e-4)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A network of a model of one's own, that does not know its input, and the module that builds it."""
    (tmp_path / "own_models.py").write_text(
        "from torch import nn\n"
        "def build(): return nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 5), nn.BatchNorm1d(7))\n"
        "def number(): return 3\n"
        "def fails(): raise RuntimeError('no luck')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_models", raising=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 5), nn.BatchNorm1d(7))
    dn.decompose(model.eval()).save(tmp_path / "own.safetensors")
    return tmp_path / "own.safetensors"


@pytest.mark.slow
def test_a_model_of_ones_own(own, call, tmp_path):
    arguments = ["--model", "own_models:build", "-o", tmp_path / "own.onnx", "--params", "0.9"]
    code, _, err = call(own, *arguments)
    assert code == 2
    assert "--input is needed" in err
    assert "as in --input 3x32x32" in err
    code, out, err = call(own, *arguments, "--input", "7:int64", "--batch", "2")
    assert code == 0, err
    assert "# x: int64, (2, 7)\n" in out
    assert "decomposable export: warning: batch normalisation still has the full network's statistics" in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], ["--model or --recipe is needed"]),
        (["--model", "own_models"], ["--model own_models", "package.module:function"]),
        (["--model", "nowhere:build"], ["--model nowhere:build", "cannot be imported"]),
        (["--model", "own_models:nothing"], ["nothing"]),
        (["--model", "own_models:number"], ["int", "torch.nn.Module"]),
        (["--model", "own_models:fails"], ["no luck"]),
        (["--model", "torch.nn:Linear"], ["without arguments"]),
        (["--model", "torch.nn:ReLU"], ["not the one of"]),
        (["--model", "own_models:build", "--recipe", "digits"], ["one of them"]),
        (["--recipe", "digit"], ["did you mean digits"]),
        (["--model", "own_models:build", "--input", "7xx3"], ["--input 7xx3", "3x32x32"]),
        (["--model", "own_models:build", "--input", "7:int63"], ["--input 7:int63"]),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line(own, arguments, named, call, tmp_path):
    code, out, err = call(own, "-o", tmp_path / "own.onnx", *arguments)
    assert (code, out) == (2, "")
    line = [line for line in err.splitlines() if line.startswith("decomposable export: error: ")]
    assert len(line) == 1
    assert all(word in line[0] for word in named), err
    assert not (tmp_path / "own.onnx").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-o", "small.pt"], ["small.pt", "'.pt'", ".onnx or .pt2"]),
        (["-o", "small"], ["''"]),
        (["-o", "small.onnx", "--format", "torch-export"], ["'.onnx'", ".pt2"]),
        (["-o", "small.onnx", "--any-size"], ["'.onnx'", "allowed: .safetensors"]),
        (["-o", "small.safetensors", "--any-size", "--macs", "0.5"], ["--any-size", "got --macs", "no size"]),
        (["-o", "small.safetensors", "--any-size", "--align", "8"], ["--any-size", "got --align", "no --align"]),
        (["-o", "small.onnx", "--format", "jpeg"], ["jpeg"]),
        (["-o", "nowhere/small.onnx"], ["nowhere", "one that exists"]),
        (["-o", "there.onnx"], ["there.onnx", "exists", "--force"]),
        (["-o", "small.onnx", "--macs", "0.5", "--ratio", "0.5"], ["--macs and --ratio"]),
        (["-o", "small.onnx", "--macs", "half"], ["half", "0.25"]),
        (["-o", "small.onnx", "--macs", "0.00001"], ["too small", "smallest possible"]),
        (["-o", "small.onnx", "--align", "8"], ["--align", "--macs"]),
        (["-o", "small.onnx", "--macs", "0.5", "--align", "0"], ["--align", "at least 1"]),
        (["-o", "small.onnx", "--batch", "0"], ["batch=0"]),
        (["-o", "small.onnx", "--batch", "99999999"], ["batch=99999999", "at most 65,536"]),
        (["-o", "small.pt2", "--batch", "99999999"], ["batch=99999999", "at most 65,536"]),
        (["-o", "small.onnx", "--dynamic", "input"], ["--dynamic", "input_ids:1=length"]),
        (["-o", "small.onnx", "--dynamic", "input:x=side"], ["input:x=side"]),
        (["-o", "small.onnx", "--dynamic", "image:2=side"], ["no input 'image'", "allowed: input"]),
        (["-o", "small.onnx", "--dynamic", "input:0=side"], ["no axis 0", "1 to 3"]),
        (["-o", "small.onnx", "--dynamic", "input:2=a", "--dynamic", "input:2=b"], ["two names"]),
        (["-o", "small.onnx", "--tolerance", "-1"], ["tolerance=-1"]),
        ([], ["-o"]),
    ],
)
def test_a_wrong_call_is_one_line_and_code_2(file, arguments, named, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.onnx").write_bytes(b"old")
    code, out, err = call(file, *arguments)
    assert (code, out) == (2, "")
    assert all(word in err.splitlines()[-1] for word in named), err
    assert [path.name for path in tmp_path.iterdir()] == ["there.onnx"]
    assert (tmp_path / "there.onnx").read_bytes() == b"old"


def test_what_cannot_be_done_is_one_line_and_code_1(file, call, tmp_path, monkeypatch):
    out_file = tmp_path / "small.onnx"
    code, _, err = call(file, "-o", out_file, "--tolerance", "0")
    assert code == 1
    assert "differ from PyTorch's by" in err.splitlines()[-1]
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    assert call(tmp_path / "broken.safetensors", "-o", out_file)[0] == 1
    assert call(tmp_path / "missing.safetensors", "-o", out_file)[0] == 1
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    code, _, err = call(file, "-o", out_file)
    assert code == 1
    assert how_to_install("onnx") in err
    assert not out_file.exists()


@pytest.mark.slow
def test_force_replaces(file, call, tmp_path):
    out_file = tmp_path / "small.onnx"
    out_file.write_bytes(b"old")
    assert call(file, "-o", out_file, "--macs", "0.5", "--align", "4", "--force", "--format", "onnx")[0] == 0
    ranks = json.loads({p.key: p.value for p in onnx.load(out_file).metadata_props}["decomposable.ranks"])
    assert any(rank % 4 == 0 for rank in ranks.values())


# --- several inputs ------------------------------------------------------------------------------------------------

PAIRS = """
import torch
from torch import nn


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.linear, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, ids, mask):
        h = self.linear(self.table(ids)).relu() * mask.unsqueeze(-1)
        return self.head(h.sum(1) / mask.sum(1, keepdim=True))
"""


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    """A network of two inputs, its file, and the folder; the code is in the module own_pairs."""
    (tmp_path / "own_pairs.py").write_text(PAIRS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_pairs", raising=False)
    torch.manual_seed(0)
    batch = {"ids": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), "mask": torch.ones(2, 4)}
    net = dn.decompose(importlib.import_module("own_pairs").Pairs().eval(), batch, forward=lambda n, b: n(**b))
    net.save(tmp_path / "pairs.safetensors")
    return net, tmp_path / "pairs.safetensors"


def padded(length):
    ids, mask = torch.arange(2 * length).reshape(2, length) % 9, torch.ones(2, length)
    mask[1, 1:] = 0
    return {"ids": ids, "mask": mask}


def test_a_network_of_several_inputs(pairs, call, tmp_path):
    net, file = pairs
    out_file = tmp_path / "pairs.onnx"
    how = [file, "--model", "own_pairs:Pairs", "-o", out_file]
    code, out, err = call(*how, "--dynamic", "ids:1=length", "--dynamic", "mask:1=length")
    assert code == 0, err
    assert "inputs: ids, mask\n" in out
    assert "{'ids': ids, 'mask': mask})  # ids: int64, (batch, length); mask: float32, (batch, length)\n" in out
    batch = padded(7)
    session = ort.InferenceSession(out_file, providers=["CPUExecutionProvider"])
    with torch.no_grad():
        [found] = session.run(None, {name: x.numpy() for name, x in batch.items()})
        np.testing.assert_allclose(found, net(**batch).numpy(), atol=1e-4)
    code, _, err = call(*how, "--force", "--input", "4:int64")
    assert code == 2
    assert "says what the network takes (ids, mask); allowed: no --input" in err.splitlines()[-1]


@pytest.mark.slow
def test_any_size_of_several_inputs(pairs, call, tmp_path):
    net, file = pairs
    out_file, batch = tmp_path / "device.safetensors", padded(4)
    code, out, err = call(file, "--model", "own_pairs:Pairs", "--any-size", "-o", out_file)
    assert code == 0, err
    assert "session.run({'ids': ids, 'mask': mask})" in out
    session = pytest.importorskip("decomposable_edge").AnySizeSession(out_file, ratio=0.5)
    net.resize_(ratio=0.5)
    with torch.no_grad():
        found = session.run({name: x.numpy() for name, x in batch.items()})
        np.testing.assert_allclose(found, net(**batch).numpy(), atol=1e-4)
    made = ["bench", str(file), "--model", "own_pairs:Pairs", "--sizes", "0.5", "--seconds", "0", "--threads", "1"]
    assert cli.main([*made, "--runtime", "torch,onnxruntime"]) == 0


def test_inputs_that_are_not_clear_are_said_to_be_so_on_the_command_line(pairs, call, tmp_path):
    net, _ = pairs
    batch = padded(4)
    net = dn.decompose(net.extract(), batch, forward=lambda n, b: n(b["ids"], b["mask"] * 2))
    net.save(tmp_path / "unclear.safetensors")
    code, _, err = call(tmp_path / "unclear.safetensors", "--model", "own_pairs:Pairs", "-o", tmp_path / "net.onnx")
    assert code == 1
    assert "forward= computes 'mask'" in err.splitlines()[-1]
