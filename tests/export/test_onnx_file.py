"""One size as one ONNX file: every model and form, the size in force untouched, and no file where anything is wrong."""

import copy
import json
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable import models
from decomposable.export import checking, one_size
from decomposable.export.program import ExportError
from decomposable_edge.errors import ExampleNeededError, InvalidArgumentError
from decomposable_edge.sizing.latency import LatencyProfile, TimedSize, timed_now

# Few sizes are calibrated here, on purpose: what a size far from them does is looked at in test_grid.py.
pytestmark = pytest.mark.filterwarnings("ignore:batch normalisation was calibrated")

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def randomised(model):
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor, low, high in (
                (module.running_mean, -0.5, 0.5),
                (module.running_var, 0.5, 2),
                (module.weight, 0.5, 1.5),
                (module.bias, -0.5, 0.5),
            ):
                tensor.data = torch.rand(tensor.shape, generator=generator) * (high - low) + low
    return model


@pytest.fixture(scope="module")
def net():
    """A small calibrated network, at half its size."""
    torch.manual_seed(0)
    net = dn.decompose(randomised(models.small_cnn((8, 8, 12))), example_input=torch.randn(1, 1, 8, 8))
    net.calibrate_([torch.randn(32, 1, 8, 8) for _ in range(2)], sizes=[0.3, 0.6, 1.0])
    net.resize_(macs=0.5)
    return net.train()


def run(path, x):
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"input": x.numpy()})


def difference(path, module, x):
    with torch.no_grad():
        wanted = copy.deepcopy(module).eval()(x).numpy()
    [got] = run(path, x)
    return np.abs(got - wanted).max() / max(1, np.abs(wanted).max())


# Thin and with two blocks in a stage, so that it is fast: the others are like the second. benchmarks/exports.py exports
# all of them at all sizes.
ZOO = [
    ("vgg15", "spatial", "smallest"),
    ("resnet20", "channel", 0.5),
    ("resnet34", "spatial", 0.25),
    ("resnet50", "channel", 0.25),
    ("resnet56", "spatial", 1.0),
]


def test_the_zoo_is_complete():
    assert {name for name, _, _ in ZOO} == set(models.MODELS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form", "size"), ZOO)
def test_every_model_of_the_zoo(name, form, size, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(1, 3, 32, 32)
    model = models.build(name).eval()
    for stage in [child for child in model.named_children() if child[0].startswith("layer")]:
        setattr(model, stage[0], stage[1][:2])
    net = dn.decompose(randomised(model), example_input=x, form=form)
    plan = net.selector.smallest_plan() if size == "smallest" else net.plan(macs=size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = dn.export_onnx(net, tmp_path / "net.onnx", ranks=plan.ranks)
    assert report.largest_difference < 1e-4
    assert net.plan().is_full
    net.resize_(plan)
    assert difference(tmp_path / "net.onnx", net, torch.randn(3, 3, 32, 32)) < 1e-4
    ops = {node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node}
    assert "BatchNormalization" not in ops


@pytest.mark.parametrize(
    ("form", "sizes"), [("spatial", (1.0, 0.3)), pytest.param("channel", (0.4, 0.1), marks=pytest.mark.slow)]
)
def test_a_calibrated_network(form, sizes, tmp_path):
    torch.manual_seed(1)
    net = dn.decompose(randomised(models.small_cnn((8, 8, 12))), example_input=torch.randn(1, 1, 8, 8), form=form)
    net.calibrate_([torch.randn(32, 1, 8, 8)], sizes=[0.25, 0.5])
    for part in sizes:
        size = max(part, net.selector.smallest_size)
        report = dn.export_onnx(net, tmp_path / "net.onnx", macs=size)
        at_size = copy.deepcopy(net)
        at_size.resize_(macs=size)
        assert (report.macs, report.params, report.ranks) == (
            at_size.plan().macs,
            at_size.plan().params,
            at_size.plan().ranks,
        )
        assert difference(tmp_path / "net.onnx", at_size.module, torch.randn(7, 1, 8, 8)) < 1e-4


@pytest.mark.slow
def test_the_network_stays_as_it_is_and_without_a_size_the_current_one_is_taken(net, tmp_path):
    before = net.plan(), net.module, net.training, {k: v.clone() for k, v in net.state_dict().items()}
    report = dn.export_onnx(net, tmp_path / "in-force.onnx")
    assert report.macs == net.plan().macs
    smaller = dn.export_onnx(net, tmp_path / "smaller.onnx", params=0.3)
    assert smaller.params < report.params
    assert (net.plan(), net.module, net.training) == before[:3]
    assert all(torch.equal(tensor, before[3][key]) for key, tensor in net.state_dict().items())
    assert difference(tmp_path / "in-force.onnx", net.module, torch.randn(4, 1, 8, 8)) < 1e-4


def test_the_file_says_what_it_is(net, tmp_path):
    path = tmp_path / "net.onnx"
    report = dn.export_onnx(net, path, macs=0.3)
    assert report.path == path
    assert report.bytes == path.stat().st_size
    assert (report.format, report.outputs, report.batches) == ("onnx", ("output",), (1, 2, 5))
    assert report.input == net.input
    props = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert props["decomposable.version"] == dn.__version__
    assert int(props["decomposable.macs"]) == report.macs
    assert int(props["decomposable.full_params"]) == report.full_params
    assert json.loads(props["decomposable.ranks"]) == dict(report.ranks)
    assert list(tmp_path.iterdir()) == [path]
    for word in (f"{report.macs:,}", f"{report.params:,}", f"{report.bytes:,}", f"{report.largest_difference:.1e}"):
        assert word in str(report)


def test_an_uncalibrated_network_is_exported_with_a_warning_where_it_was_asked_for(tmp_path):
    net = dn.decompose(models.small_cnn((4, 4)), example_input=torch.zeros(1, 1, 8, 8))
    with pytest.warns(UserWarning, match="calibrate_") as caught:
        dn.export_onnx(net, tmp_path / "net.onnx", macs=0.5)
    assert [warning.filename for warning in caught] == [__file__]


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        y = self.linear(x).relu()
        return {"logits": self.head(y), "best": y.argmax(1)}


def test_a_plain_module_with_an_example(tmp_path):
    report = dn.export_onnx(TwoOutputs(), tmp_path / "net.onnx", example_input=(torch.randn(3, 6), torch.zeros(3)))
    assert (report.macs, report.full_macs, report.params, report.ranks) == (45, 45, 53, None)
    assert report.outputs == ("logits", "best")
    assert report.input.shape == (6,)


def test_the_example_is_what_it_is_tried_with(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(one_size, "largest_difference", lambda module, run, batches: seen.extend(batches) or 0.0)
    rows = torch.arange(18.0).reshape(3, 6)
    report = dn.export_onnx(nn.Linear(6, 2), tmp_path / "net.onnx", example_input=rows)
    assert report.batches == (1, 2, 3, 5)
    itself, *sizes, others = [batch["input"] for batch in seen]
    assert torch.equal(itself, rows)
    assert [len(batch) for batch in sizes] == [1, 2, 5]
    assert torch.equal(sizes[2], rows[[0, 1, 2, 0, 1]])
    assert (others != sizes[2]).any(1).all()  # rows that are not of the example


def test_another_size_of_image_has_no_known_macs(tmp_path):
    net = dn.decompose(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()), example_input=torch.zeros(1, 1, 8, 8))
    report = dn.export_onnx(net, tmp_path / "net.onnx", example_input=torch.zeros(1, 1, 9, 9))
    assert (report.macs, report.full_macs, report.input.shape) == (None, None, (1, 9, 9))


def test_a_fixed_batch(tmp_path):
    report = dn.export_onnx(nn.Linear(6, 2), tmp_path / "net.onnx", example_input=torch.zeros(1, 6), batch=3)
    assert report.batches == (3,)
    [value] = onnx.load(tmp_path / "net.onnx").graph.input
    assert value.type.tensor_type.shape.dim[0].dim_value == 3


# --- what is wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"path": "net.pt"}, ["net.pt", "'.pt'", ".onnx"]),
        ({"path": "nowhere/net.onnx"}, ["nowhere", "one that exists"]),
        ({"path": "folder.onnx"}, ["folder.onnx", "is a folder"]),
        ({"macs": 0.5, "params": 0.5}, ["macs", "params"]),
        ({"macs": 2.5}, ["macs=2.5"]),
        ({"macs": 1e-6}, ["too small"]),
        ({"ranks": {"nothing": 1}}, ["nothing"]),
        ({"tolerance": -1}, ["tolerance=-1", "at least 0"]),
        ({"tolerance": float("nan")}, ["tolerance=nan"]),
        ({"batch": 0}, ["batch=0", "at least 1"]),
        ({"example_input": "image"}, ["example_input", "str"]),
        ({"example_input": torch.zeros(1, 2, 8, 8)}, ["example_input", "(1, 2, 8, 8)"]),
    ],
)
def test_a_wrong_call_is_refused_in_one_line_and_leaves_no_file(net, options, named, tmp_path):
    (tmp_path / "folder.onnx").mkdir()
    arguments = {"path": "net.onnx", **options}
    with pytest.raises(InvalidArgumentError) as caught:
        dn.export_onnx(net, tmp_path / arguments.pop("path"), **arguments)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in named), caught.value
    assert [path.name for path in tmp_path.iterdir()] == ["folder.onnx"]


def test_what_has_one_size_or_does_not_know_its_input(tmp_path):
    with pytest.raises(InvalidArgumentError, match="macs: got it for a Linear, which has one size"):
        dn.export_onnx(nn.Linear(6, 2), tmp_path / "net.onnx", macs=0.5, example_input=torch.zeros(1, 6))
    for module in (nn.Linear(6, 2), dn.decompose(nn.Linear(6, 2))):
        with pytest.raises(ExampleNeededError, match=r"example_input is needed.*got none"):
            dn.export_onnx(module, tmp_path / "net.onnx")


@pytest.mark.slow
def test_a_difference_that_is_too_large_is_named_and_the_old_file_stays(net, tmp_path, monkeypatch):
    path = tmp_path / "net.onnx"
    path.write_bytes(b"the old one")
    honest = checking.onnx_runner
    monkeypatch.setattr(one_size, "onnx_runner", lambda model: lambda batch: [y + 0.25 for y in honest(model)(batch)])
    with pytest.raises(ExportError, match=r"PyTorch's by [\d.e-]+ \(.*own rounding makes [\d.]+e-0[678]\), .*0.0001"):
        dn.export_onnx(net, path)
    assert path.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [path]
    assert dn.export_onnx(net, path, tolerance=10).largest_difference > 0.001


@pytest.mark.parametrize(
    ("dtype", "is_refused"),
    [(torch.float16, False), (torch.float64, True), (torch.bfloat16, True)],
)
def test_other_types_are_exported_where_the_runtime_has_them(dtype, is_refused, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).to(dtype)
    call = lambda: dn.export_onnx(  # noqa: E731
        net, tmp_path / "net.onnx", example_input=torch.randn(2, 3, 8, 8).to(dtype), tolerance=5e-3
    )
    if is_refused:
        with pytest.raises(ExportError, match=r"ONNX Runtime cannot run it .*float32"):
            call()
        assert not list(tmp_path.iterdir())
    else:
        assert call().input.dtype == "float16"


@pytest.mark.slow
def test_a_time_is_that_of_onnx_runtime(net, tmp_path):
    """Here PyTorch would need a smaller size to hold it."""

    def measured(runtime, full_ms):
        sizes = [
            TimedSize(
                macs=plan.macs,
                macs_fraction=plan.macs_fraction,
                params=plan.params,
                params_fraction=plan.params_fraction,
                median_ms=time,
                low_ms=time,
                high_ms=time,
                repetitions=9,
            )
            for plan, time in ((net.plan(macs=0.5), 1.0), (net.selector.full_plan(), full_ms))
        ]
        return timed_now(runtime=runtime, batch=1, threads=torch.get_num_threads(), sizes=sizes)

    twin = copy.copy(net)
    twin.latency = LatencyProfile.of(net.selector, [measured("torch", 9.0), measured("onnxruntime", 2.0)])
    report = dn.export_onnx(twin, tmp_path / "net.onnx", latency_ms=2)
    assert report.macs == report.full_macs
    assert twin.plan(latency_ms=2).macs < report.macs
