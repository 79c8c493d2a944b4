"""The any-size file of every kind of network gives, at every size, the numbers that PyTorch gives."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable import models
from decomposable.export import any_size
from decomposable.export.any_size import save_with_graph
from decomposable.export.program import ExportError
from decomposable.models import resnet
from decomposable.network import artifact
from decomposable_edge import AnySizeSession
from decomposable_edge.errors import DecomposableError, InvalidArgumentError

pytestmark = pytest.mark.filterwarnings("ignore:batch normalisation (still has|was calibrated)")
SIZES = [{"macs": 1.0}, {"macs": 0.9}, {"macs": 0.6}, {"macs": 0.35}, {"params": 0.6}, {"ratio": 0.15}, {"ratio": 0.9}]


def randomised(model):
    """Batch normalisation as after training: means of 0 and scales of 1 would hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            size = module.num_features
            module.running_mean.copy_(0.3 * torch.randn(size, generator=generator))
            module.running_var.copy_(0.5 + torch.rand(size, generator=generator))
            if module.affine:
                module.weight.data.copy_(0.5 + torch.rand(size, generator=generator))
                module.bias.data.copy_(0.3 * torch.randn(size, generator=generator))
    return model.eval()


def check(net, path, x, sizes=SIZES, tolerance=1e-4):
    """Export, and compare at sizes that the export itself has not looked at."""
    report = save_with_graph(net, path, example_input=x, tolerance=tolerance)
    assert 0 <= report.largest_difference <= tolerance
    assert (report.bytes, report.format) == (path.stat().st_size, "any-size")
    session, twin = AnySizeSession(path, threads=1), copy.deepcopy(net).eval()
    for size in sizes:
        assert session.resize(**size) == twin.resize_(**size, align="auto")  # the default on a device
        with torch.no_grad():
            expected = twin(x)
        expected = list(expected.values()) if isinstance(expected, dict) else expected
        expected = list(expected) if isinstance(expected, list | tuple) else [expected]
        found = session.run(x.numpy())
        found = found if isinstance(found, list) else [found]
        for y, z in zip(expected, found, strict=True):
            scale = max(1.0, float(y.abs().max()))
            np.testing.assert_allclose(z / scale, y.numpy() / scale, rtol=0, atol=tolerance)
    return session


class Kinds(nn.Module):
    """Every kind of layer that is decomposed, and those around it that make it hard."""

    def __init__(self):
        super().__init__()
        self.strided = nn.Conv2d(3, 8, 3, stride=(2, 1), padding=(1, 0), bias=False)
        self.strided_bn = nn.BatchNorm2d(8)
        self.same = nn.Conv2d(8, 8, (3, 4), padding="same", dilation=(2, 1))
        self.same_bn = nn.BatchNorm2d(8, affine=False)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.grouped_bn = nn.BatchNorm2d(8)
        self.reflect = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.circular = nn.Conv2d(8, 8, 5, padding="same", padding_mode="circular")
        self.replicate = nn.Conv2d(8, 8, 3, padding=(2, 1), padding_mode="replicate")
        self.twice = nn.Conv2d(8, 8, 3, padding=1, bias=False)  # used twice, each with a normalisation of its own
        self.twice_bn = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.up_bn = nn.BatchNorm2d(8)
        self.untracked = nn.BatchNorm2d(8, track_running_stats=False)
        self.sequence = nn.Linear(8, 12)  # on three axes
        self.sequence_bn = nn.BatchNorm1d(25)  # normalises the second one, not the layer's features
        self.tied = nn.Linear(12, 12)
        self.tied_too = nn.Linear(12, 12, bias=False)
        self.tied_too.weight = self.tied.weight
        self.flat = nn.Linear(12, 16, bias=False)
        self.flat_bn = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.strided_bn(self.strided(x)))
        x = self.grouped_bn(self.grouped(torch.relu(self.same_bn(self.same(x)))))
        x = self.replicate(self.circular(torch.relu(self.reflect(x))))
        x = self.twice_bn[0](self.twice(x)) + torch.relu(self.twice_bn[1](self.twice(torch.relu(x))))
        x = nn.functional.adaptive_avg_pool2d(self.up_bn(self.up(x)), 5)
        t = self.sequence_bn(self.sequence(x.flatten(2).transpose(1, 2)))
        t = self.tied_too(torch.relu(self.tied(t))) + self.tied(t)
        f = self.tied(t.mean(1))  # the same weight on two axes
        return {"logits": self.last(torch.relu(self.flat_bn(self.flat(f)))), "features": f}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["spatial", "channel"])
def test_every_kind_of_layer(tmp_path, form):
    torch.manual_seed(0)
    x = torch.randn(5, 3, 14, 14)
    net = dn.decompose(randomised(Kinds()), x, form=form, filter_fn=lambda module, name: name != "circular")
    assert {"circular", "grouped"} <= set(net.skipped)
    if form == "spatial":  # the other one keeps the original's statistics
        net.calibrate_([x, -x], sizes=[0.5, 0.7, 1.0])
    session = check(net, tmp_path / "kinds.safetensors", x, [size for size in SIZES if size.get("macs", 1) > 0.5])
    assert [port.name for port in session.outputs] == ["logits", "features"]


def thin(name):
    """A network of the zoo with fewer blocks and channels."""
    if name == "resnet20":
        return models.resnet20()
    if name == "resnet34":
        return resnet._cifar_resnet((1, 1), (8, 12), resnet._projected_block, 10, 3)
    stages = resnet._stages(8, (16, 24), (1, 1), resnet.Bottleneck)
    stem = [nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)]
    return nn.Sequential(*stem, nn.MaxPool2d(3, stride=2, padding=1), *stages.values(), *tail)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("resnet20", "spatial"),
        ("resnet34", "channel"),
        ("resnet50", "spatial"),
    ],
)
def test_the_networks_of_the_zoo_calibrated_or_not(tmp_path, name, form):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 32, 32)
    net = dn.decompose(randomised(thin(name)), x, form=form)
    if name != "resnet20":
        net.calibrate_([x], sizes=[0.4, 0.7])
    check(net, tmp_path / "net.safetensors", x)


def mlp(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
    return randomised(model), dn.decompose(randomised(model), torch.randn(3, 12), **options)


@pytest.mark.slow
def test_a_shrunk_network_and_limits(tmp_path):
    model, net = mlp(limits={"0": (2, 9)}, min_rank=2)
    net.calibrate_([torch.randn(32, 12)], sizes=[0.5, 0.9])
    check(net, tmp_path / "limits.safetensors", torch.randn(3, 12), [{"macs": 1.0}, {"macs": 0.8}, {"ratio": 0.5}])
    net.resize_(macs=0.8)
    smaller = artifact.shrink(net.artifact(), net.plan())
    smaller.save(tmp_path / "smaller.safetensors")
    loaded = dn.load(tmp_path / "smaller.safetensors", model=model)
    sizes = [{"macs": 0.9}, {"macs": 0.6}, {"ratio": 0.3}, {"ranks": {"0": 3}}]
    session = check(loaded, tmp_path / "smaller.safetensors", torch.randn(3, 12), sizes)
    assert session.selector.full_plan() == loaded.selector.full_plan()
    with pytest.raises(InvalidArgumentError, match="allowed: an int, 1 to"):
        session.resize(ranks={"3": 6})


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-4), (torch.float16, 2e-2)])
def test_other_types(tmp_path, dtype, tolerance):
    _, net = mlp()
    net = net.to(dtype)
    check(net, tmp_path / "typed.safetensors", torch.randn(4, 12).to(dtype), [{"macs": 0.9}, {"ratio": 0.4}], tolerance)


def test_a_type_that_the_runtime_has_not(tmp_path):
    _, net = mlp()
    with pytest.raises(DecomposableError) as caught:
        save_with_graph(net.to(torch.bfloat16), tmp_path / "b.safetensors", example_input=torch.zeros(2, 12).bfloat16())
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_whole_numbers_as_input(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    x = torch.randint(0, 11, (4, 6))
    session = check(dn.decompose(model, x), tmp_path / "embedding.safetensors", x, SIZES[:4])
    assert session.inputs[0].dtype == "int64"


@pytest.mark.slow
def test_it_says_what_it_does_and_how_much_is_done(tmp_path):
    torch.manual_seed(0)
    lines = []
    net = dn.decompose(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), example_input=torch.zeros(1, 8))
    report = save_with_graph(net, tmp_path / "net.safetensors", progress=lines.append)
    told = [line.detail.split(",")[0] for line in lines]
    assert list(dict.fromkeys(told)) == [
        "tracing the network",
        "translating it to ONNX",
        "simplifying the graph",
        "comparing it with PyTorch",
    ]
    count = len(report.sizes)
    assert [line.detail for line in lines[-count:]] == [f"{told[-1]}, {i} of {count} sizes" for i in range(count)]
    assert lines == sorted(lines, key=lambda line: line.fraction)


def test_between_both_ends_one_row_is_compared(tmp_path, monkeypatch):
    torch.manual_seed(0)
    tried = []
    comparing = any_size.largest_difference

    def compare(reference, candidate, batches):
        tried.append([len(next(iter(batch.values()))) for batch in batches])
        return comparing(reference, candidate, batches)

    monkeypatch.setattr(any_size, "largest_difference", compare)
    net = dn.decompose(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), example_input=torch.randn(2, 8))
    save_with_graph(net, tmp_path / "net.safetensors")
    full, *between, smallest = tried
    assert (full, smallest) == ([2, 1, 3, 3], [1, 3, 3])
    assert between
    assert all(rows == [1] for rows in between)


def test_the_network_stays_as_it_is(tmp_path):
    _, net = mlp()
    net.train()
    plan = net.resize_(ratio=0.5)
    before = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    report = save_with_graph(net, tmp_path / "net.safetensors")
    assert net.plan() is plan
    assert net.training
    assert all(module.training for module in net._base.modules())
    assert all(torch.equal(tensor, before[key]) for key, tensor in net.state_dict().items())
    assert 1.0 in report.sizes
    assert (report.macs, report.params) == (plan.full_macs, plan.full_params)
    save_with_graph(net, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "net.safetensors").read_bytes()


def test_sizes_by_parameters_where_macs_are_not_known(tmp_path):
    torch.manual_seed(0)
    net = dn.decompose(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).eval())
    with pytest.raises(InvalidArgumentError, match="example_input is needed"):
        save_with_graph(net, tmp_path / "net.safetensors")
    session = check(net, tmp_path / "net.safetensors", torch.randn(3, 6), [{"params": 0.5}, {"ratio": 0.5}])
    with pytest.raises(InvalidArgumentError, match="macs="):
        session.resize(macs=0.5)


def test_what_differs_from_pytorch_is_refused_and_leaves_no_file(tmp_path, monkeypatch):
    _, net = mlp()
    path = tmp_path / "net.safetensors"
    path.write_bytes(b"what was there before")
    right = any_size.tidy

    def wrong(*arguments):
        model = right(*arguments)
        next(node for node in model.graph.node if node.op_type == "Relu").op_type = "LeakyRelu"
        return model

    monkeypatch.setattr(any_size, "tidy", wrong)
    with pytest.raises(DecomposableError, match="differ"):
        save_with_graph(net, path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"what was there before"]


class Auxiliary(nn.Module):
    """A head that is used in training only."""

    def __init__(self):
        super().__init__()
        self.body, self.extra, self.head = nn.Linear(12, 12), nn.Linear(12, 6), nn.Linear(12, 6)

    def forward(self, x):
        h = torch.relu(self.body(x))
        return (self.head(h), self.extra(h)) if self.training else self.head(h)


@pytest.mark.slow
def test_a_layer_that_only_training_uses_counts_as_in_pytorch(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 12)
    net = dn.decompose(Auxiliary().eval(), x)
    session = check(
        net, tmp_path / "net.safetensors", x, [{"macs": 0.8}, {"params": 0.7}, {"ratio": 0.3}, {"macs": 1.0}]
    )
    assert "extra" in session.plan().ranks
    session.prepare()
    assert {layer.name: layer.is_used for layer in session._bundle.layers} == {
        "body": True,
        "extra": False,
        "head": True,
    }


class Returning(nn.Module):
    """More outputs than it makes, or under names of its own."""

    def __init__(self, choose):
        super().__init__()
        self.layer, self.weight, self.choose = nn.Linear(6, 6), nn.Parameter(torch.arange(3.0)), choose

    def forward(self, x):
        return self.choose(self, x, self.layer(x))


@pytest.mark.slow
def test_outputs_that_are_weights_inputs_or_there_twice(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(3, 6)
    model = Returning(lambda self, x, y: (y, y, x, self.weight, torch.ones(2))).eval()
    session = check(dn.decompose(model, x), tmp_path / "net.safetensors", x, [{"ratio": 0.5}, {"ratio": 1.0}])
    assert [port.name for port in session.outputs] == [f"output_{i}" for i in range(5)]


def test_an_output_that_is_called_as_weights_are(tmp_path):
    model = Returning(lambda self, x, y: {"first/layer": y}).eval()
    with pytest.raises(ExportError, match=r"'first/layer'.*allowed: another name"):
        save_with_graph(dn.decompose(model, torch.randn(3, 6)), tmp_path / "net.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_it_is_tried_with_the_samples_that_are_given(tmp_path, monkeypatch):
    model = Returning(lambda self, x, y: self.layer(torch.log(x))).eval()
    net = dn.decompose(model, torch.ones(1, 6))
    net._rows = None  # as in a network that was loaded
    with pytest.raises(ExportError, match="no finite number"):  # made-up samples are negative in some places
        save_with_graph(net, tmp_path / "net.safetensors")
    assert (
        save_with_graph(net, tmp_path / "net.safetensors", example_input=torch.rand(2, 6) + 0.1).largest_difference
        < 1e-4
    )
    right = any_size.tidy

    def wrong(*arguments):
        made = right(*arguments)
        next(node for node in made.graph.node if node.op_type == "Log").op_type = "Exp"
        return made

    monkeypatch.setattr(any_size, "tidy", wrong)
    with pytest.raises(ExportError, match="differ"):
        save_with_graph(net, tmp_path / "net.safetensors", example_input=torch.rand(2, 6) + 0.1)


def test_another_size_of_image_than_was_counted_is_refused(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
    net = dn.decompose(model, torch.randn(1, 3, 8, 8))
    with pytest.raises(InvalidArgumentError, match=r"\(3, 16, 16\).*\(3, 8, 8\).*decompose\(\)"):
        save_with_graph(net, tmp_path / "net.safetensors", example_input=torch.randn(1, 3, 16, 16))


def test_a_model_of_one_batch_size_is_told_what_can_be_done(tmp_path):
    model = Returning(lambda self, x, y: y * len(x)).eval()
    with pytest.raises(ExportError, match=r"export: .*fixes the size of the batch.*export_onnx") as caught:
        save_with_graph(dn.decompose(model, torch.randn(2, 6)), tmp_path / "net.safetensors")
    assert "allowed: batch=1" not in str(caught.value)


@pytest.mark.parametrize("path", ["folder.safetensors", "nowhere/net.safetensors", "net"])
def test_a_path_that_cannot_be_is_refused_before_any_work(tmp_path, monkeypatch, path):
    (tmp_path / "folder.safetensors").mkdir()
    monkeypatch.setattr(any_size, "to_onnx", None)
    _, net = mlp()
    with pytest.raises(InvalidArgumentError, match="path "):
        save_with_graph(net, tmp_path / path)
    assert [file.name for file in tmp_path.iterdir()] == ["folder.safetensors"]


def test_what_the_graph_takes_is_said_when_it_is_saved(tmp_path):
    _, net = mlp()
    path = tmp_path / "net.safetensors"
    for options, option in (({"dynamc": {}}, "dynamc"), ({"tolerance": -1}, "tolerance"), ({"dynamic": 3}, "dynamic")):
        with pytest.raises(InvalidArgumentError, match=option):
            net.save(path, onnx=True, **options)
    with pytest.raises(InvalidArgumentError, match=r"got tolerance=; allowed"):
        net.save(path, onnx=False, tolerance=1e-3)
    assert list(tmp_path.iterdir()) == []
    lines = []
    assert net.save(path, onnx=None, tolerance=1e-3, progress=lines.append).without_onnx is None
    assert lines


def test_a_graph_is_made_once_and_belongs_to_the_structure(tmp_path, monkeypatch):
    """A network that was saved or loaded with one has it, whatever its weights and statistics are by now."""
    model, net = mlp()
    path, again = tmp_path / "net.safetensors", tmp_path / "again.safetensors"
    report = net.save(path, onnx=True)
    assert (report.path, report.bytes, report.without_onnx) == (path, path.stat().st_size, None)
    monkeypatch.setattr(any_size, "to_onnx", None)
    net.calibrate_([torch.randn(32, 12)], sizes=[0.5, 0.9])
    net.save(again, onnx=True)
    loaded = dn.load(again, model=model)
    loaded.save(path, onnx=True)
    assert path.read_bytes() == again.read_bytes()
    small = artifact.read(path, macs=0.7)
    small.save(again)
    session, twin = AnySizeSession(again, ratio=0.3), dn.load(again, model=model)
    twin.resize_(session.plan())
    x = torch.randn(3, 12)
    np.testing.assert_allclose(session.run(x.numpy()), twin.eval()(x).detach().numpy(), atol=1e-5)


class Activated(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(6, 8), nn.Linear(8, 3), function

    def forward(self, x):
        return self.b(self.function(self.a(x)))


def test_a_graph_of_other_code_is_made_anew(tmp_path):
    """The file's model and the one that is given have the same weights, and compute something else."""
    torch.manual_seed(0)
    path, x = tmp_path / "net.safetensors", torch.randn(3, 6)
    dn.decompose(Activated(torch.relu).eval(), x).save(path, onnx=True)
    other = dn.load(path, model=Activated(torch.tanh)).eval()
    other.save(path, onnx=True)
    other.resize_(ratio=0.5)
    np.testing.assert_allclose(AnySizeSession(path, ratio=0.5).run(x.numpy()), other(x).detach().numpy(), atol=1e-5)


def test_where_a_graph_cannot_be_the_report_says_why(tmp_path, monkeypatch):
    torch.manual_seed(0)
    path = tmp_path / "net.safetensors"
    fixed = dn.decompose(Returning(lambda self, x, y: y * len(x)).eval(), torch.randn(2, 6))
    unknown = dn.decompose(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)).eval())
    for net, reason in ((fixed, "fixes the size of the batch"), (unknown, "it is not known what the network takes")):
        report = net.save(path, onnx=None)
        assert reason in report.without_onnx
        assert "not for devices" in str(report)
        assert "\n" not in str(report)
        assert artifact.read(path).graph is None
        with pytest.raises(DecomposableError, match="holds no ONNX graph"):
            AnySizeSession(path)
        with pytest.raises(DecomposableError):
            net.save(tmp_path / "none.safetensors", onnx=True)
    assert [file.name for file in tmp_path.iterdir()] == ["net.safetensors"]
    assert fixed.save(path, onnx=False).without_onnx == "onnx=False"
    with pytest.raises(InvalidArgumentError, match="onnx='yes'; allowed"):
        fixed.save(path, onnx="yes")


def test_by_default_a_file_holds_its_graph(tmp_path):
    from decomposable.network.saving import saved

    _, net = mlp()
    assert saved(net, tmp_path / "net.safetensors", {"a": 1}, None).without_onnx is None
    assert AnySizeSession(tmp_path / "net.safetensors").info == {"a": 1}
