import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

import decomposable as dn
from decomposable import decompose
from decomposable.core.forms import FORMS, matrix_shape
from decomposable.core.layers import ChainLayers
from decomposable.core.standin import FactoredWeight, StandIn
from refusals import Saying, refused

CONV_OPTIONS = ("stride", "padding", "dilation", "groups", "padding_mode", "kernel_size", "in_channels", "out_channels")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def conv():
    return nn.Conv2d(3, 5, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(1, 2), padding_mode="replicate")


LAYERS = {
    "conv, spatial": (conv, "spatial", (2, 3, 12, 13)),
    "conv, channel": (conv, "channel", (2, 3, 12, 13)),
    "linear": (lambda: nn.Linear(6, 5), "channel", (4, 6)),
    "linear without bias": (lambda: nn.Linear(6, 5, bias=False), "channel", (4, 6)),
}


def stand_in_of(layer, form, rank=2):
    shape = layer.weight.shape
    rows, columns = matrix_shape(shape, form)
    weights = FORMS[form].stages_of(torch.randn(rows, rank), torch.randn(rank, columns), shape)
    return ChainLayers(layer, FORMS[form].chain(shape)).build(*map(nn.Parameter, weights))


@pytest.fixture(params=LAYERS)
def case(request):
    """A layer, what stands in for it, and an input."""
    build, form, shape = LAYERS[request.param]
    layer = build()
    return layer, stand_in_of(layer, form), torch.randn(shape)


# Sizes, options and bias


def test_sizes_options_and_bias_are_the_layers_own(case):
    layer, stand_in, _ = case
    options = CONV_OPTIONS if isinstance(layer, nn.Conv2d) else ("in_features", "out_features")
    assert {name: getattr(stand_in, name) for name in options} == {name: getattr(layer, name) for name in options}
    assert stand_in.bias is layer.bias


@pytest.mark.parametrize("size", [0.9, 0.6, 0.4, 0.2, 0.1])
def test_at_every_size_and_in_what_is_extracted(size):
    model = nn.Sequential(nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(512, 40)).eval()
    net = decompose(model, torch.zeros(1, 3, 8, 8))
    net.resize_(macs=size)
    for network in (net.module, net.extract()):
        for name in CONV_OPTIONS:
            assert getattr(network[0], name) == getattr(model[0], name)
        assert (network[2].in_features, network[2].out_features) == (512, 40)
        for i in (0, 2):
            assert torch.equal(network[i].bias, model[i].bias)
            weight = network[i].weight
            assert (weight.shape, weight.dtype, weight.device) == (
                model[i].weight.shape,
                torch.float32,
                torch.device("cpu"),
            )
    assert isinstance(net.module[2], StandIn)


def test_attributes_that_a_user_put_on_the_layer():
    layer = nn.Linear(4, 3)
    layer.tag, layer.options = "query", {"scale": 2}
    stand_in = stand_in_of(layer, "channel")
    assert (stand_in.tag, stand_in.options) == ("query", {"scale": 2})
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = stand_in.nothing


class Scaled(nn.Linear):
    kind = "scaled"

    @property
    def fan_out(self):
        return self.out_features

    def gain(self, times):
        return times * self.in_features


def test_what_the_class_of_the_layer_defines():
    stand_in = stand_in_of(Scaled(4, 3), "channel")
    assert (stand_in.kind, stand_in.fan_out, stand_in.gain(2)) == ("scaled", 3, 8)


def test_an_attribute_that_leads_to_another_module_leads_to_that_of_the_size():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].__dict__["next"] = [model[1]]
    net = decompose(model, torch.zeros(1, 8))
    net.resize_(ratio=0.2)
    assert net.module[0].next[0] is net.module[1]


def test_it_is_not_itself_a_layer_that_could_be_replaced_again(case):
    """Who quantises or initialises every Linear wants the two inside."""
    layer, stand_in, x = case
    assert not isinstance(stand_in, nn.Conv2d | nn.Linear)
    assert [name for name, m in stand_in.named_modules() if isinstance(m, type(layer))] == ["0", "1"]
    assert type(stand_in[:1]) is nn.Sequential
    torch.testing.assert_close(stand_in[1](stand_in[:1](x)), stand_in(x))


def test_what_was_extracted_is_decomposed_again():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(16, 16)

        def forward(self, x):
            return self.l(x.to(self.l.weight.dtype)) * self.l.in_features

    x = torch.randn(2, 16)
    net = decompose(Asks(), x)
    net.resize_(ratio=0.3)
    again = decompose(net.extract(), x)
    assert list(again.plan().ranks) == ["l.0", "l.1"]
    torch.testing.assert_close(again(x), net(x))
    again.resize_(ranks={"l.0": 1})
    assert torch.linalg.matrix_rank(again.module.l.weight.detach()) == 1


# The weight


def test_the_weight_is_what_the_two_layers_compute_with(case):
    layer, stand_in, x = case
    apply = F.linear if isinstance(layer, nn.Linear) else layer._conv_forward
    torch.testing.assert_close(apply(x, stand_in.weight, stand_in.bias), stand_in(x), rtol=1e-4, atol=1e-4)


def test_type_device_and_shape_of_the_weight_cost_nothing(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("W̃ was made")

    stand_in = stand_in_of(nn.Linear(6, 5).double(), "channel")
    stand_in.double()
    monkeypatch.setattr("decomposable.core.standin.product", fail)
    weight = stand_in.weight
    assert isinstance(weight, torch.Tensor)
    assert (weight.dtype, weight.device.type, weight.shape, weight.size(0)) == (torch.float64, "cpu", (5, 6), 5)
    assert (weight.ndim, weight.dim(), weight.numel(), len(weight), weight.element_size()) == (2, 2, 30, 5, 8)
    assert weight.is_floating_point()
    assert weight.requires_grad
    assert (weight.data.dtype, weight.detach().device.type) == (torch.float64, "cpu")
    assert not weight.detach().requires_grad
    assert weight.new_zeros(3).dtype == torch.zeros_like(weight).dtype == torch.float64
    assert torch.zeros_like(weight).is_contiguous()
    with pytest.raises(AssertionError, match="W̃ was made"):
        weight + 1


def test_the_gradient_of_the_weight_is_that_of_the_two_layers(case):
    layer, stand_in, x = case
    apply = F.linear if isinstance(layer, nn.Linear) else layer._conv_forward
    parameters = [stand_in[0].weight, stand_in[1].weight]
    wanted = torch.autograd.grad(stand_in(x).square().sum(), parameters)
    got = torch.autograd.grad(apply(x, stand_in.weight, stand_in.bias).square().sum(), parameters)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-2)


def test_the_weight_follows_training_moves_and_casts():
    stand_in = stand_in_of(nn.Linear(6, 5), "channel")
    before = stand_in.weight.detach() + 0
    torch.optim.SGD(stand_in.parameters(), lr=0.1).zero_grad()
    stand_in(torch.randn(3, 6)).square().sum().backward()
    torch.optim.SGD(stand_in.parameters(), lr=0.1).step()
    assert not torch.equal(stand_in.weight, before)
    torch.testing.assert_close(stand_in.weight + 0, stand_in[1].weight @ stand_in[0].weight)
    assert stand_in.to(torch.bfloat16).weight.dtype == torch.bfloat16
    assert stand_in.to("meta").weight.is_meta


def test_the_weight_can_be_used_like_any_tensor():
    stand_in = stand_in_of(nn.Linear(6, 5), "channel").requires_grad_(False)
    weight, dense = stand_in.weight, stand_in[1].weight @ stand_in[0].weight
    assert torch.equal(weight + 0, dense)
    assert torch.equal(weight[1:, 2], dense[1:, 2])
    assert torch.equal(torch.stack([weight, weight])[1], dense)
    assert weight.numpy().tolist() == weight.tolist() == dense.tolist()
    assert torch.equal(weight.T, dense.T)
    assert float(weight.sum()) == float(dense.sum())
    assert "rank=2" in repr(weight)


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.zero_(),
        lambda weight: weight.data.mul_(2),
        lambda weight: nn.init.xavier_uniform_(weight),
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: torch.add(weight.detach(), 1, out=weight.detach()),
    ],
)
def test_writing_to_the_weight_is_refused(write):
    stand_in = stand_in_of(nn.Linear(6, 5), "channel")
    before = copy.deepcopy(stand_in.state_dict())
    with refused("weight", allowed=Saying(r"layer\[0\].weight and layer\[1\].weight")):
        write(stand_in.weight)
    assert all(torch.equal(before[name], value) for name, value in stand_in.state_dict().items())


# Models that ask


class Padded(nn.Module):
    """As MobileNetV2 and T5 in the transformers library: pads by the stride, casts to the weight's type."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 24, 3, stride=2), nn.Linear(24, 24)

    def forward(self, x):
        (stride, _), (height, _) = self.conv.stride, self.conv.kernel_size
        x = F.pad(x, (0, height - stride, 0, height - stride))
        y = self.conv(x.to(self.conv.weight.dtype)).mean((2, 3))
        return self.head(y.to(self.head.weight.dtype)) + self.head.weight.new_zeros(self.head.out_features)


def test_a_model_that_reads_its_layers_runs_at_every_size_and_extracted():
    model, x = Padded().eval(), torch.randn(2, 3, 9, 9)
    net = decompose(model, x)
    assert net.skipped == {}
    torch.testing.assert_close(net(x), model(x))
    for size in (0.9, 0.6, 0.4, 0.2, 0.15):
        net.resize_(macs=size)
        torch.testing.assert_close(net.extract()(x), net(x))
    small = net.extract().double()
    assert small(x).dtype == torch.float64
    small(x).sum().backward()
    assert all(parameter.grad is not None for parameter in small.parameters())


def test_a_model_that_reads_its_layers_is_exported(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    x = torch.randn(2, 3, 9, 9)
    net = decompose(Padded().eval(), x)
    dn.export_onnx(net, tmp_path / "small.onnx", macs=0.2)
    net.save(tmp_path / "any.safetensors", onnx=True)
    net.resize_(macs=0.2)
    (y,) = runtime.InferenceSession(tmp_path / "small.onnx").run(None, {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), net(x), rtol=1e-4, atol=1e-4)


# Copies, files, threads, and those who look at the code


def test_names_and_parameters_are_those_of_the_two_layers(case):
    layer, stand_in, _ = case
    biases = ["1.bias"] if layer.bias is not None else []
    assert list(stand_in.state_dict()) == ["0.weight", "1.weight", *biases]
    assert [name for name, _ in stand_in.named_parameters()] == ["0.weight", "1.weight", *biases]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_answer_like_the_original(case, how):
    _, stand_in, x = case
    other = how(stand_in)
    assert torch.equal(other(x), stand_in(x))
    assert torch.equal(other.weight, stand_in.weight)
    with torch.no_grad():
        other[0].weight.zero_()
    assert not other.weight.any()
    assert stand_in.weight.any()
    assert type(how(stand_in.weight)) is torch.Tensor
    assert torch.equal(how(stand_in.weight), stand_in.weight)


def test_other_threads_see_the_weight():
    stand_in, seen = stand_in_of(nn.Linear(6, 5), "channel"), []
    threads = [threading.Thread(target=lambda: seen.append(stand_in.weight.sum().item())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [stand_in.weight.sum().item()] * 4


class Asks(nn.Module):
    """Reads everything of its layer but the values of the weight."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        weight = self.layer.weight
        x = x.to(weight.device, weight.dtype)
        return self.layer(x) * self.layer.in_features + weight.shape[0]


def test_an_exported_program_holds_the_two_layers_and_no_dense_weight():
    model, x = Asks(stand_in_of(nn.Linear(6, 5), "channel")).eval(), torch.randn(3, 6)
    program = torch.export.export(model, (x,), strict=False)
    torch.testing.assert_close(program.module()(x), model(x))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert [name for name in called if "matmul" in name or "mm" in name] == []
    assert called.count("aten.linear.default") == 2


@pytest.mark.parametrize(
    "use",
    [
        lambda layer, x: F.linear(x, layer.weight, layer.bias),
        lambda layer, x: layer(x) + layer.weight.data.sum(),
        lambda layer, x: x @ layer.weight.T + layer.weight.new_ones(5),
    ],
)
def test_an_exported_program_computes_the_values_where_they_are_used(use):
    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = stand_in_of(nn.Linear(6, 5), "channel")

        def forward(self, x):
            return use(self.layer, x)

    model, x = Uses().eval(), torch.randn(3, 6)
    program = torch.export.export(model, (x,), strict=False)
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.parametrize("how", ["trace", "script", "compile", "vmap", "functional_call", "inference_mode"])
def test_other_ways_to_run_a_model_that_asks(how):
    layer, x = stand_in_of(nn.Linear(6, 5), "channel").eval(), torch.randn(3, 6)
    model = Asks(layer)
    expected = model(x)
    if how == "trace":
        got = torch.jit.trace(model, x)(x)
    elif how == "script":
        got, expected = torch.jit.script(layer)(x), layer(x)
    elif how == "compile":
        got = torch.compile(model, backend="eager", fullgraph=True)(x)
        torch.compiler.reset()
    elif how == "vmap":
        got = vmap(model)(x)
    elif how == "functional_call":
        values = dict(model.named_parameters())
        gradient = grad(lambda p: functional_call(model, p, (x,)).sum())(values)
        assert gradient["layer.0.weight"].shape == (2, 6)
        got = functional_call(model, values, (x,))
    else:
        with torch.inference_mode():
            got = model(x)
            assert isinstance(layer.weight, FactoredWeight)
    torch.testing.assert_close(got, expected)
