"""Convolutions with a forward of their own that pads or standardises and then convolves: decomposed where they call."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import decomposable as dn
from decomposable.network.artifact import save_size
from decomposable_edge import AnySizeSession
from refusals import Saying, refused


class Same(nn.Conv2d):
    """Pads as TensorFlow does, by the size of the input."""

    def forward(self, x):
        kernel = self.weight.shape[-2:]
        pads = []
        for size, k, s, d in zip(x.shape[-2:], kernel, self.stride, self.dilation, strict=True):
            missing = max((math.ceil(size / s) - 1) * s + (k - 1) * d + 1 - size, 0)
            pads = [missing // 2, missing - missing // 2, *pads]
        if any(pads):
            x = F.pad(x, pads)
        return F.conv2d(x, self.weight, self.bias, self.stride, (0, 0), self.dilation, self.groups)


class Static(nn.Conv2d):
    """Pads by a module that was made for one size of image."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.static_padding = nn.ZeroPad2d((0, 1, 0, 1))

    def forward(self, x):
        return F.conv2d(self.static_padding(x), self.weight, self.bias, self.stride, self.padding)


class Standardised(nn.Conv2d):
    """A weight of zero mean and unit variance for every output."""

    def weight_now(self):
        return F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, eps=1e-6)

    def forward(self, x):
        weight = self.weight_now().reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Scaled(Standardised):
    """The same with a gain that is learned."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, self.out_channels).view(-1, 1, 1, 1))

    def weight_now(self):
        return super().weight_now().view_as(self.weight) * self.gain * self.weight[0].numel() ** -0.5


class StandardisedSame(Same, Standardised):
    def forward(self, x):
        x = F.pad(x, [0, 1, 0, 1], value=-1.0)
        return Standardised.forward(self, x)


class ByItsParent(nn.Conv2d):
    def forward(self, x):
        return super().forward(F.pad(x, (1, 1, 1, 1), mode="reflect"))


class WithMoreBehind(nn.Conv2d):
    def forward(self, x):
        return (F.conv2d(x, self.weight, None, self.stride, self.padding) + self.bias.view(1, -1, 1, 1)).relu()


class Equalised(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * 0.3, self.bias) * 2


class InOneDimension(nn.Conv1d):
    def forward(self, x):
        return F.conv1d(F.pad(x, (2, 0)), weight=self.weight, bias=self.bias, stride=self.stride)


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        Same(3, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        Scaled(8, 10, 3, padding=1),
        StandardisedSame(10, 8, 3, bias=False),
        Static(8, 8, 3, stride=2),
        ByItsParent(8, 12, 3),
        WithMoreBehind(12, 12, 3, padding=1),
        Same(12, 12, 3, groups=12),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(2),
        InOneDimension(12, 6, 3),
        nn.Flatten(),
        Equalised(24, 10),
    )


LAYERS = ["0.conv", "2.conv", "3.conv", "4.conv", "5.conv", "6.conv", "10.conv", "12.linear"]


def images(height=16, width=16, count=2):
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model():
    return build().eval()


@pytest.fixture
def net(model):
    net = dn.decompose(model, example_input=images())
    net._has_warned = True  # its batch normalisation is not what this is about
    return net


def test_the_call_in_the_forward_is_decomposed(net, model):
    assert [layer.name for layer in net.layers] == LAYERS
    assert list(net.skipped) == ["7"]
    assert net.skipped["7"].startswith("depthwise convolution")
    for height, width in ((16, 16), (17, 16), (19, 22), (30, 31)):  # other sizes than the example's
        x = images(height, width)
        torch.testing.assert_close(net(x), model(x), rtol=0, atol=1e-6)
        torch.testing.assert_close(net._original.in_factors(net._factors)(x), model(x), rtol=0, atol=1e-5)


def test_plain_weights_are_left_of_standardised_ones(net, model):
    full = net.extract(net.selector.full_plan())
    weight = full[2].conv.weight
    expected = model[2].weight_now().reshape_as(model[2].weight)
    torch.testing.assert_close(weight, expected)
    assert "2.gain" not in full.state_dict()
    assert [key for key in full.state_dict() if key.startswith("6.")] == ["6.bias", "6.conv.weight"]  # added behind it
    assert all(p.requires_grad for p in full.parameters())
    full.train()(images()).sum().backward()
    assert full[2].conv.weight.grad is not None


def test_sizes_copies_and_files(net, tmp_path):
    x = images(17, 18)
    for size in (0.8, 0.5, 0.2):
        plan = net.resize_(macs=size)
        assert net.macs_for(images()) == plan.macs
        small = net.extract()
        assert torch.equal(small(x), net(x))
        assert torch.equal(copy.deepcopy(net)(x), net(x))
        assert torch.equal(pickle.loads(pickle.dumps(small))(x), net(x))
        save_size(net, plan, tmp_path / "size.safetensors")
        assert torch.equal(dn.load(tmp_path / "size.safetensors", model=build())(x), net(x))
    net.save(tmp_path / "net.safetensors")
    assert torch.equal(dn.load(tmp_path / "net.safetensors", model=build())(x), net(x))
    with torch.device("meta"):
        empty = build()
    assert torch.equal(dn.load(tmp_path / "net.safetensors", model=empty)(x), net(x))
    other = build()
    other[2] = nn.Sequential(nn.Conv2d(8, 10, 3, padding=1))
    with refused("model", "2", Saying("^a model built as the one that was saved")):
        dn.load(tmp_path / "net.safetensors", model=other)


@pytest.mark.filterwarnings("ignore:batch normalisation")
def test_exports_give_the_same_numbers(net, tmp_path):
    net.save(tmp_path / "any.safetensors", onnx=True)
    session = AnySizeSession(tmp_path / "any.safetensors")
    x = images(count=3)
    for size in (1.0, 0.6, 0.3):
        net.resize_(macs=size)
        session.resize(macs=size, align=1)
        np.testing.assert_allclose(session.run(x.numpy()), net(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    dn.export_onnx(net, tmp_path / "one.onnx")
    dn.export_torch(net, tmp_path / "one.pt2")


def test_calibration_and_data(model):
    net = dn.decompose(model, example_input=images(), data=[images(count=8)] * 2)
    net.calibrate_([images(count=8)])
    net.resize_(macs=0.5)
    assert torch.isfinite(net(images())).all()


def test_no_example_is_needed_and_the_model_stays_as_it_is(model):
    before = copy.deepcopy(model.state_dict())
    net = dn.decompose(model)
    assert [layer.name for layer in net.layers] == LAYERS
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in before)


class Twice(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight, padding=1) + F.conv2d(x, self.weight, padding=1)


class PaddedBySize(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight, padding=(1 + x.shape[2] % 2, 1))


class ByTheInput(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight * x.mean())


class Modulated(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight) * self.weight.square().sum().rsqrt()


class Writing(nn.Conv2d):
    def forward(self, x):
        self.weight.data = self.weight.data * 2
        return F.conv2d(x, self.weight)


class NeedsMore(nn.Conv2d):
    def forward(self, x, style):
        return F.conv2d(x * style, self.weight)


REFUSED = {
    Twice: "which makes 2 calls of conv2d",
    PaddedBySize: "whose padding or stride depends on the size of the input",
    ByTheInput: "whose weight depends on the input",
    Modulated: "which uses its weight for more than one call",
    Writing: "which writes to its parameters",
    NeedsMore: "which fails on an input of its own size",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_plain_layer_can_do_is_left_alone_with_its_reason(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), kind(4, 4, 3))
    before = model[1].weight.detach().clone()
    net = dn.decompose(model)
    assert [layer.name for layer in net.layers] == ["0"]
    assert net.skipped["1"].startswith(f"{kind.__name__} has a forward of its own, {REFUSED[kind]}")
    assert torch.equal(model[1].weight, before)
    assert torch.equal(net.extract()[1].weight, before)


def test_a_call_that_changes_later_is_refused_and_not_wrong():
    class Moody(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, self.weight, padding=2 if x.shape[-1] > 40 else 1)

    net = dn.decompose(nn.Sequential(Moody(3, 4, 3)))
    assert net(images()).shape == (2, 4, 16, 16)
    with refused("Moody", Saying("^has stride, padding.* for this input"), Saying("^one call with ")):
        net(images(64, 64))


def test_joint_training_leaves_them_alone():
    objective = dn.JointObjective(nn.Sequential(build(), nn.Linear(10, 4)), example_input=images())
    assert [layer.name for layer in objective.layers] == ["1"]
    assert objective.skipped["0.0"] == "Same has a forward of its own; only decompose() looks into it"


def test_a_filter_leaves_them_as_they_are(model):
    net = dn.decompose(model, filter_fn=lambda module, name: name != "0.conv")
    assert type(net.extract()[0]) is Same
    assert net.skipped["0"].startswith("rejected by filter_fn")
    torch.testing.assert_close(net(images()), model(images()), rtol=0, atol=1e-6)


class Styled(nn.Conv2d):
    """Its weight depends on more than the layer itself."""

    def forward(self, x, style=None):
        weight = self.weight if style is None else self.weight * style
        return F.conv2d(x, weight, self.bias, padding=1)


class Gained(nn.Conv2d):
    gain = 1.0

    def forward(self, x):
        return F.conv2d(x, self.weight * self.gain, self.bias, padding=1)


class BySize(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight * (2 if x.shape[-1] > 40 else 1), self.bias, padding=1)


class Around(nn.Module):
    def __init__(self, kind, *more):
        super().__init__()
        self.first, self.second, self.more = kind(3, 8, 3), nn.Conv2d(8, 8, 3), more

    def forward(self, x):
        self.first.gain = 3.0
        return self.second(self.first(x, *self.more))


@pytest.mark.parametrize(("kind", "more"), [(Styled, (2.0,)), (Gained, ()), (BySize, ())])
def test_what_gives_other_numbers_with_a_plain_layer_in_it_stays_closed(kind, more):
    """An argument, an attribute or the size of the input changes the weight: small made-up inputs do not show it."""
    torch.manual_seed(0)
    model = Around(kind, *more).eval()
    x = torch.randn(2, 3, 48, 48)
    net = dn.decompose(model, x)
    assert kind is Gained or "the model does not run without it" in net.skipped["first"]  # a gain that is known stays
    with torch.no_grad():
        torch.testing.assert_close(net(x), model(x))


@pytest.mark.parametrize("side", [64, 48])
def test_a_weight_that_depends_on_the_size_of_the_input_is_refused_at_other_sizes(side):
    """The example is small, and so it is opened; at sizes where its code computes another weight it says so."""
    torch.manual_seed(0)
    model = nn.Sequential(BySize(3, 8, 3), nn.ReLU(), Standardised(8, 8, 3, padding=1)).eval()
    net = dn.decompose(model, images())
    assert [layer.name for layer in net.layers] == ["0.conv", "2.conv"]
    with torch.no_grad():
        for x in (images(), images(20, 31), images()):
            torch.testing.assert_close(net(x), model(x), rtol=0, atol=1e-5)
    for run in (net, net.extract(net.plan(macs=0.5))):
        came = Saying(rf"^has another weight .*\(2, 3, {side}, {side}\)$")
        with refused("BySize", came, Saying("filter_fn=")):
            run(images(side, side))


@pytest.mark.parametrize("kind", [Static, Same, Standardised, Scaled])
def test_two_sizes_of_images_have_the_same_numbers_as_before(kind):
    """Static padding was made for one size, and stays as it is at others, as in the model."""
    torch.manual_seed(0)
    model = nn.Sequential(kind(3, 8, 3, stride=2), nn.ReLU(), kind(8, 8, 3)).eval()
    net = dn.decompose(model, images(16, 16))
    assert len(net.layers) == 2
    small = net.extract(net.plan(macs=0.5))
    net.resize_(macs=0.5)
    for x in (images(33, 47), images(16, 16)):
        with torch.no_grad():
            torch.testing.assert_close(small(x), net(x))
            torch.testing.assert_close(dn.decompose(model)(x), model(x), rtol=0, atol=1e-5)
