import copy
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from decomposable import models
from decomposable.models import resnet, vgg
from decomposable_edge.errors import BudgetError, InvalidArgumentError, UnsupportedModelError
from decomposable_lab.methods.widths import Widths, scaled

WIDTHS = (0.05, 0.25, 0.37, 0.5, 0.777, 1.0)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# Networks of fewer channels made by the builders themselves, so that nothing here comes from the code under test.


def narrow_small_cnn(width):
    return models.small_cnn([scaled(c, width) for c in (32, 64, 64, 64, 64)])


def narrow_vgg15(width, monkeypatch):
    monkeypatch.setattr(vgg, "GROUPS", [[scaled(c, width) for c in group] for group in vgg.GROUPS])
    monkeypatch.setattr(vgg, "HIDDEN", scaled(vgg.HIDDEN, width))
    return models.vgg15()


def narrow_resnet20(width):
    channels = [scaled(c, width) for c in (16, 32, 64)]
    return resnet._cifar_resnet((3, 3, 3), channels, resnet._padded_block, 10, 3)


def narrow_resnet34(width):
    channels = [scaled(c, width) for c in (64, 128, 256, 512)]
    return resnet._cifar_resnet((3, 4, 6, 3), channels, resnet._projected_block, 100, 3)


def narrow_resnet50(width):
    stem, channels = scaled(64, width), [scaled(c, width) for c in (256, 512, 1024, 2048)]
    modules = OrderedDict()
    modules["conv1"] = nn.Conv2d(3, stem, 7, stride=2, padding=3, bias=False)
    modules["bn1"] = nn.BatchNorm2d(stem)
    modules["relu"] = nn.ReLU()
    modules["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    modules.update(resnet._stages(stem, channels, (3, 4, 6, 3), resnet.Bottleneck))
    modules["avgpool"] = nn.AdaptiveAvgPool2d(1)
    modules["flatten"] = nn.Flatten()
    modules["fc"] = nn.Linear(channels[-1], 1000)
    return nn.Sequential(modules)


def with_random_norms_(model):
    """Batch normalisation that is not the same for all channels."""
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.bias, -0.5, 0.5)
            norm.running_mean.uniform_(-0.3, 0.3)
            norm.running_var.uniform_(0.5, 1.5)
    return model


def with_slices_of_(narrow, model):
    """The first entries along every axis of the model's tensors."""
    full = model.state_dict()
    narrow.load_state_dict(
        {name: full[name][tuple(slice(n) for n in tensor.shape)] for name, tensor in narrow.state_dict().items()}
    )
    return narrow


CASES = {
    "small_cnn": (models.small_cnn, narrow_small_cnn, (4, 1, 8, 8), (0.25, 0.37, 0.9)),
    "resnet20": (models.resnet20, narrow_resnet20, (4, 3, 16, 16), (0.05, 0.25, 0.37, 0.613)),
    "resnet34": (models.resnet34, narrow_resnet34, (3, 3, 8, 8), (0.37,)),
    "resnet50": (models.resnet50, narrow_resnet50, (3, 3, 64, 64), (0.37,)),
    "vgg15": (models.vgg15, narrow_vgg15, (3, 3, 32, 32), (0.37,)),
}


@pytest.mark.parametrize(
    ("name", "width"),
    [
        pytest.param(name, width, marks=pytest.mark.slow if name in ("resnet34", "vgg15") else [])
        for name, case in CASES.items()
        for width in case[3]
    ],
)
def test_a_width_is_the_network_that_has_so_many_channels(name, width, monkeypatch):
    build, build_narrow, shape, _ = CASES[name]
    model, x = with_random_norms_(build()), torch.randn(shape)
    widths = Widths(model, x[:1])
    expected = build_narrow(width, monkeypatch) if name == "vgg15" else build_narrow(width)
    with_slices_of_(expected, model)
    before = copy.deepcopy(model.state_dict())
    for mode in (True, False):
        for network in (model, expected):
            network.train(mode)
        for network in (widths.at(width), widths.extract(width)):
            torch.manual_seed(1)  # of dropout
            reference = copy.deepcopy(expected)
            y = reference(x)
            torch.manual_seed(1)
            torch.testing.assert_close(network(x), y, rtol=1e-4, atol=1e-4)
            buffers = dict(network.named_buffers())
            for key, buffer in reference.named_buffers():
                torch.testing.assert_close(buffers[key], buffer, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize("name", [*models.MODELS, "small_cnn"])
def test_cost_is_what_torch_counts(name):
    shape = {"small_cnn": (1, 1, 8, 8), "resnet50": (1, 3, 64, 64)}.get(name, (1, 3, 32, 32))
    with torch.device("meta"):
        model = (models.small_cnn() if name == "small_cnn" else models.build(name)).eval()
    widths = Widths(model, torch.zeros(shape))
    for width in WIDTHS[1::2]:
        network = widths.extract(width)
        with FlopCounterMode(display=False) as counter:
            network(torch.empty(shape, device="meta"))
        assert widths.cost(width) == (counter.get_total_flops() // 2, sum(p.numel() for p in network.parameters()))


def test_full_cost_is_that_of_the_paper():
    with torch.device("meta"):
        model = models.resnet20()
    assert Widths(model, torch.zeros(1, 3, 32, 32)).cost(1) == (40_551_040, 269_722)


@pytest.mark.parametrize("name", ["small_cnn", "resnet20", "vgg15"])
def test_gradients_are_those_of_the_plain_module_in_the_slices(name):
    build, _, shape, _ = CASES[name]
    model, x = with_random_norms_(build()), torch.randn(shape)
    widths = Widths(model, x[:1])
    plain = widths.extract(0.37)
    for network in (widths.at(0.37), plain):
        torch.manual_seed(1)
        F.cross_entropy(network(x), torch.arange(len(x))).backward()
    for (key, full), (same_key, part) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert key == same_key
        expected = torch.zeros_like(full)
        expected[tuple(slice(n) for n in part.shape)] = part.grad
        torch.testing.assert_close(full.grad, expected, rtol=1e-5, atol=1e-6)


def test_a_narrow_pass_leaves_the_model_alone():
    model = models.small_cnn().train()
    before = copy.deepcopy(model.state_dict())
    network = Widths(model, torch.zeros(1, 1, 8, 8)).at(0.5)
    network(torch.randn(8, 1, 8, 8))
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert not torch.equal(network[1].running_mean, model[1].running_mean[:16])
    assert model.training
    assert network.training


def test_extracted_is_a_plain_module_of_its_own():
    model = models.resnet20().eval()
    widths = Widths(model, torch.zeros(1, 3, 16, 16))
    network = widths.extract(0.5)
    ours = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    for tensor in (*network.parameters(), *network.buffers()):
        assert tensor.untyped_storage().data_ptr() not in ours
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad for p in network.parameters())
    assert list(network.state_dict()) == list(model.state_dict())
    block = network.get_submodule("layer2.0")
    assert (block.conv1.in_channels, block.conv1.out_channels, block.bn1.num_features) == (8, 16, 16)
    assert (block.shortcut.in_width, block.shortcut.width, block.shortcut.training) == (8, 16, False)
    assert (network.linear.in_features, network.linear.out_features) == (32, 10)
    x = torch.randn(2, 3, 16, 16)
    before = network(x)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    assert torch.equal(network(x), before)


def test_width_one_is_the_model():
    model, x = with_random_norms_(models.small_cnn()).eval(), torch.randn(2, 1, 8, 8)
    widths = Widths(model, x[:1], multiple=7)
    assert torch.equal(widths.extract(1.0)(x), model(x))
    assert torch.equal(widths.at(1.0)(x), model(x))


def test_channels_last_stays():
    model = models.small_cnn().to(memory_format=torch.channels_last)
    x = torch.randn(2, 1, 8, 8).to(memory_format=torch.channels_last)
    widths = Widths(model, x[:1])
    network = widths.extract(0.37)
    assert network[3].weight.shape == (23, 11, 3, 3)
    assert network[3].weight.is_contiguous(memory_format=torch.channels_last)
    assert not network[3].weight.is_contiguous()
    torch.testing.assert_close(widths.at(0.37)(x), network(x))


@pytest.mark.parametrize(
    ("channels", "width", "multiple", "expected"),
    [
        (64, 0.5, 1, 32),
        (100, 0.29, 1, 29),
        (64, 0.37, 1, 23),
        (64, 0.37, 8, 16),
        (64, 0.01, 1, 1),
        (64, 0.01, 8, 8),
        (3, 0.9, 8, 3),
        (10, 1.0, 8, 10),
        (10, 0.99, 8, 8),
    ],
)
def test_scaled(channels, width, multiple, expected):
    assert scaled(channels, width, multiple) == expected


def test_the_largest_width_within_a_budget():
    widths = Widths(models.resnet20(), torch.zeros(1, 3, 32, 32))
    full = widths.cost(1).macs
    macs = {w: widths.cost(w).macs for w in [0.25, *(k / 1024 for k in range(257, 1025))]}
    for part in (0.9, 0.5, 0.3, 0.1):
        width = widths.largest(macs=part * full, smallest=0.25)
        assert width == max(w for w in macs if macs[w] <= part * full)
    assert widths.largest(macs=full, smallest=0.25) == 1
    assert widths.largest(macs=full, smallest=0.25, largest=0.9) == 0.9
    assert widths.largest(macs=widths.cost(0.25).macs, smallest=0.25) < 0.28
    with pytest.raises(BudgetError, match="allowed: at least"):
        widths.largest(macs=100, smallest=0.25)


# Other people's models.


class Flattening(nn.Module):
    """Maps that are flattened, one-dimensional and transposed convolutions, keywords, and a list of modules."""

    def __init__(self):
        super().__init__()
        self.transposed = nn.ConvTranspose2d(3, 8, 2, stride=2)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.BatchNorm2d(8)
        self.slope = nn.PReLU()
        self.between = nn.ModuleList([nn.Conv1d(8, 6, 3), nn.BatchNorm1d(6, affine=False)])
        self.hidden = nn.Linear(6 * 14, 12)
        self.last = nn.Linear(12, 5)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        y = self.slope(self.norm(self.depthwise(self.transposed(input=x))))
        y = y.flatten(2)
        for module in self.between:
            y = module(y)
        return self.last(F.relu(self.hidden(y.flatten(1))))


def test_flattened_depthwise_and_transposed():
    model, x = with_random_norms_like(Flattening()).eval(), torch.randn(2, 3, 2, 2)
    widths = Widths(model, x[:1])
    network = widths.extract(0.5)
    p = dict(model.named_parameters())
    y = F.conv_transpose2d(x, p["transposed.weight"][:, :4], p["transposed.bias"][:4], stride=2)
    y = F.conv2d(y, p["depthwise.weight"][:4], p["depthwise.bias"][:4], padding=1, groups=4)
    y = F.batch_norm(
        y, model.norm.running_mean[:4], model.norm.running_var[:4], p["norm.weight"][:4], p["norm.bias"][:4]
    )
    y = F.prelu(y, p["slope.weight"]).flatten(2)
    y = F.conv1d(y, p["between.0.weight"][:3, :4], p["between.0.bias"][:3])
    y = F.batch_norm(y, model.between[1].running_mean[:3], model.between[1].running_var[:3]).flatten(1)
    y = F.relu(F.linear(y, p["hidden.weight"][:6, : 3 * 14], p["hidden.bias"][:6]))
    y = F.linear(y, p["last.weight"][:, :6], p["last.bias"])
    for narrow in (network, widths.at(0.5)):
        torch.testing.assert_close(narrow(x), y)
    assert (network.depthwise.groups, network.depthwise.in_channels, network.hidden.in_features) == (4, 4, 42)
    with FlopCounterMode(display=False) as counter:
        network(x[:1])
    assert widths.cost(0.5) == (counter.get_total_flops() // 2, sum(p.numel() for p in network.parameters()))
    widths.at(0.5)(x).sum().backward()
    assert model.slope.weight.grad is not None
    assert model.unused.weight.grad is None


def with_random_norms_like(model):
    for norm in (model.norm, model.between[1]):
        norm.running_mean.uniform_(-0.3, 0.3)
        norm.running_var.uniform_(0.5, 1.5)
    return model


class Twice(nn.Module):
    """One module called twice."""

    def __init__(self, between=None):
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.between = between or nn.Identity()

    def forward(self, x):
        return self.last(self.shared(self.between(self.shared(self.first(x)))))


def test_a_module_that_is_called_twice():
    model, x = Twice(), torch.randn(3, 4)
    network = Widths(model, x).extract(0.5)
    assert network.shared.weight.shape == (4, 4)
    with pytest.raises(UnsupportedModelError, match=r"module 'shared' is called with 4 and with 8 channels"):
        Widths(Twice(Padded()), x)


class Padded(nn.Module):
    """Always eight channels."""

    def forward(self, x):
        return F.pad(x, (0, 8 - x.shape[1]))


def test_shared_weights_stay_shared():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[2].weight = model[1].weight
    widths = Widths(model, torch.zeros(1, 4))
    network = widths.extract(0.5)
    assert network[1].weight is network[2].weight
    assert widths.cost(0.5).params == sum(p.numel() for p in network.parameters())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    with pytest.raises(UnsupportedModelError, match="modules '0' and '1' share a weight"):
        Widths(model, torch.zeros(1, 4))


def test_concatenated_maps_and_hooks():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.last = nn.Linear(4, 5), nn.Linear(5, 7), nn.Linear(12, 3)
            self.b.register_forward_hook(lambda module, args, y: 2 * y)

        def forward(self, x):
            y = self.a(x)
            return self.last(torch.cat([y, self.b(y)], dim=1))

    model, x = Dense(), torch.randn(2, 4)
    network = Widths(model, x).extract(0.5)
    assert network.last.weight.shape == (3, 5)
    y = F.linear(x, model.a.weight[:2], model.a.bias[:2])
    z = 2 * F.linear(y, model.b.weight[:3, :2], model.b.bias[:3])
    torch.testing.assert_close(network(x), F.linear(torch.cat([y, z], 1), model.last.weight[:, :5], model.last.bias))


def test_frozen_parameters_stay_frozen():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).requires_grad_(False)
    assert not any(p.requires_grad for p in Widths(model, torch.zeros(1, 4)).extract(0.5).parameters())


def test_a_copy_is_independent():
    model, x = models.small_cnn().eval(), torch.randn(2, 1, 8, 8)
    widths = Widths(model, x[:1])
    twin = copy.deepcopy(widths)
    twin.model.double()
    assert twin.extract(0.5)(x.double()).dtype == torch.float64
    assert widths.extract(0.5)(x).dtype == torch.float32


def test_fresh_weights_keep_their_initialisation():
    model = models.vgg15()
    nn.init.uniform_(model.fc2.bias)
    widths = Widths(model, torch.zeros(1, 3, 32, 32))
    network = widths.extract(0.5, is_fresh=True)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and module.weight.numel() > 2000:
            std = (2 / module.weight[0].numel()) ** 0.5
            assert module.weight.std().item() == pytest.approx(std, rel=0.05)
    torch.testing.assert_close(network.conv1.weight, model.conv1.weight[:32])  # the image is as it was
    torch.testing.assert_close(network.fc2.weight, model.fc2.weight[:, :256] * 2**0.5)
    torch.testing.assert_close(network.fc2.bias, model.fc2.bias * 2**0.5)
    torch.testing.assert_close(network.bn3.weight, model.bn3.weight[:64])


def test_a_module_that_is_not_known_is_named():
    x = torch.zeros(2, 4, 4, 4)
    for module, reason in {
        nn.GroupNorm(2, 8): r"'1' \(GroupNorm\) has a fixed number of channels",
        nn.InstanceNorm2d(8): r"'1' \(InstanceNorm2d\) has a fixed number of channels",
        nn.Conv2d(8, 8, 1, groups=2): r"'1' \(Conv2d\) has groups=2",
        nn.Conv2d(8, 16, 1, groups=8): r"'1' \(Conv2d\) has groups=8",
        nn.PReLU(8): r"'1' \(PReLU\) has parameters of its own",
        nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 1)): r"'1' .* has a weight that is computed",
        nn.LazyConv2d(8, 1): "has seen no input yet",
    }.items():
        with pytest.raises(UnsupportedModelError, match=reason) as caught:
            Widths(nn.Sequential(nn.Conv2d(4, 8, 1), module, nn.LazyConv2d(3, 1)), x)
        assert "\n" not in str(caught.value)
        assert "; allowed: convolutions" in str(caught.value)
    for module in (nn.LSTM(4, 4), nn.MultiheadAttention(4, 1), nn.LayerNorm(4), nn.Embedding(4, 4)):
        with pytest.raises(UnsupportedModelError, match=f"'0' .{type(module).__name__}"):
            Widths(nn.Sequential(module), x)


def test_a_model_that_cannot_be_narrower_is_refused():
    with pytest.raises(
        UnsupportedModelError, match=r"at width 0.5 its output is of shape \(1, 2\) and not of \(1, 4\)"
    ):
        Widths(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Conv1d(1, 1, 1), Dropping()), torch.zeros(1, 4))
    with pytest.raises(UnsupportedModelError, match=r"at width 0.5 it cannot run an input of shape"):
        Widths(
            nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), nn.Flatten(), nn.Linear(6, 2)), torch.zeros(1, 4)
        )


class Dropping(nn.Module):
    """Nothing of the channels that a convolution made of one."""

    def forward(self, x):
        return x.squeeze(1)


@pytest.mark.parametrize("width", [0, -0.5, 1.5, float("nan"), "half", True])
def test_a_wrong_width_is_refused(width):
    widths = Widths(nn.Sequential(nn.Linear(4, 4)), torch.zeros(1, 4))
    with pytest.raises(InvalidArgumentError, match="allowed: a number above 0, up to 1"):
        widths.at(width)


def test_wrong_arguments_are_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(InvalidArgumentError, match="multiple=0; allowed: an int of at least 1"):
        Widths(model, torch.zeros(1, 4), multiple=0)
    with pytest.raises(InvalidArgumentError, match="example_input: got str; allowed: a tensor"):
        Widths(model, "image")
