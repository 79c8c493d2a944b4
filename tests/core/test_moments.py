"""Second moments: against the gradient of the weight, finite differences in the loss, and plain loops."""

import weakref

import pytest
import torch
from torch import nn

from decomposable.core import moments
from decomposable.core.forms import to_matrix
from decomposable.core.layers import find_layers
from decomposable.core.moments import NoGradientError, passes, second_moments
from refusals import refused

KERNELS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 5), "stride": (2, 1), "padding": (0, 2), "dilation": (2, 1), "padding_mode": "reflect"},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": (5, 3), "stride": (3, 2), "padding": "valid", "dilation": (1, 2)},
    {"kernel_size": 3, "padding": "same", "dilation": (2, 1)},
    {"kernel_size": (1, 7), "padding": (0, 3)},
    {"kernel_size": 7, "stride": 2, "padding": 3, "padding_mode": "circular"},
]


def run(net, batch):
    return net(batch)


def cubes(outputs, number=0):
    return outputs.pow(3).sum()


def all_moments(*args, **kwargs):
    """Those of every pass."""
    return {name: one for part in second_moments(*args, **kwargs) for name, one in part.items()}


@pytest.fixture
def columns(monkeypatch):
    """All columns x and g of convolutions that were summed over, in the order of the calls."""
    seen = {"input_patches": [], "_gradient_patches": []}

    def noting(original, kept):
        def note(*args, **kwargs):
            kept.append(original(*args, **kwargs))
            return kept[-1]

        return note

    for name, kept in seen.items():
        monkeypatch.setattr(moments, name, noting(getattr(moments, name), kept))
    return seen


@pytest.mark.parametrize("form", ["spatial", "channel"])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_the_sum_of_x_gt_is_the_gradient_of_the_weight(kernel, form, columns):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, **kernel)
    model = nn.Sequential(conv, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3))
    layers, _ = find_layers(model, form)
    x = torch.randn(3, 4, 13, 11)
    found = all_moments(model, layers, [x], run, cubes)
    x_MP, g_NP = (torch.cat(parts).transpose(0, 1).flatten(1) for parts in columns.values())
    cubes(model(x)).backward()
    torch.testing.assert_close(x_MP @ g_NP.mT, to_matrix(conv.weight.grad, layers[0].form), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["0"].inputs, x_MP @ x_MP.mT / x_MP.shape[1])
    torch.testing.assert_close(found["0"].gradients, g_NP @ g_NP.mT / 3)


def test_linear_layers_of_any_number_of_axes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    layers, _ = find_layers(model, "spatial")
    x = torch.randn(5, 7, 3)
    found = all_moments(model, layers, [x[:2], x[2:]], run, cubes)
    hidden = model[0](x).detach().requires_grad_(True)
    [gradient] = torch.autograd.grad(cubes(model[2](model[1](hidden))), hidden)
    torch.testing.assert_close(found["0"].inputs, torch.einsum("bti,btj->ij", x, x) / 35)
    torch.testing.assert_close(found["0"].gradients, torch.einsum("bti,btj->ij", gradient, gradient) / 5)


def test_a_layer_that_is_called_twice_sums_both_calls():
    torch.manual_seed(0)
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    layers, _ = find_layers(model, "spatial")
    x = torch.randn(6, 3)
    found = all_moments(model, layers, [x], run, cubes)["0"]
    inner = torch.tanh(shared(x)).detach()
    torch.testing.assert_close(found.inputs, (x.mT @ x + inner.mT @ inner) / 12)


def test_few_bytes_mean_many_passes_and_the_same_moments(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    layers, _ = find_layers(model, "channel")
    batches = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    counted = []
    whole = all_moments(model, layers, batches, run, cubes, seen=lambda: counted.append(1))
    assert len(counted) == 3
    monkeypatch.setattr(moments, "_MOST_PATCHES", 1)  # an image at a time
    in_parts = all_moments(model, layers, batches, run, cubes, memory=1, seen=lambda: counted.append(1))
    assert len(counted) == 3 + 9
    for name, each in whole.items():
        torch.testing.assert_close(in_parts[name].inputs, each.inputs)
        torch.testing.assert_close(in_parts[name].gradients, each.gradients)


def test_layers_share_a_pass_while_they_fit():
    model = nn.Sequential(*(nn.Linear(10, 20) for _ in range(5)))
    layers, _ = find_layers(model, "spatial")
    assert [len(group) for group in passes(layers, with_gradients=False, memory=1600)] == [2, 2, 1]
    assert [len(group) for group in passes(layers, with_gradients=True, memory=12000)] == [3, 2]
    assert [len(group) for group in passes(layers, with_gradients=True, memory=1)] == [1] * 5


def test_the_model_is_as_before(columns):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 2))
    model[0].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layers, _ = find_layers(model, "spatial")
    all_moments(model, layers, [torch.randn(4, 3, 8, 8)], run, cubes)
    assert model.training
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True, True, True]
    assert all(p.grad is None for p in model.parameters())
    assert not model[0]._forward_hooks
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_without_a_loss_there_is_no_graph_and_no_second_moment_of_gradients():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    layers, _ = find_layers(model, "spatial")
    graphs = []
    found = all_moments(model, layers, [torch.randn(2, 3, 8, 8)], lambda n, b: graphs.append(n(b).requires_grad))
    assert graphs == [False]
    assert found["0"].gradients is None


def test_no_batch_is_refused():
    model = nn.Sequential(nn.Linear(3, 4))
    layers, _ = find_layers(model, "spatial")
    with refused("data", 0):
        all_moments(model, layers, [], run)


def test_one_image_without_a_batch_axis():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    layers, _ = find_layers(model, "spatial")
    x = torch.randn(3, 8, 8)
    alone, batched = (all_moments(model, layers, [each], run, cubes)["0"] for each in (x, x[None]))
    torch.testing.assert_close(alone.inputs, batched.inputs)


def test_moments_of_a_pass_are_gone_when_the_next_ones_come():
    """What is held at a time is what the memory allows, and not all of them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(6)))
    layers, _ = find_layers(model, "channel")
    known, held = [], []

    def seen():
        held.append(sum(each() is not None for each in known))

    for part in second_moments(model, layers, [torch.randn(8, 20)], run, cubes, memory=2 * 2 * 2 * 4 * 400, seen=seen):
        assert len(part) == 2
        known += [weakref.ref(each.inputs) for each in part.values()]
        del part
    assert (len(known), held) == (6, [0, 0, 0])


@pytest.mark.parametrize("where", ["model", "forward"])
def test_what_runs_without_gradients_is_refused_where_the_loss_counts(where):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x):
            with torch.set_grad_enabled(where != "model" and torch.is_grad_enabled()):
                x = self.trunk(x).relu()
            return self.head(x)

    model = Frozen()
    layers, _ = find_layers(model, "channel")
    call = run if where == "model" else torch.no_grad()(run)
    with refused("criterion", "loss", "criterion='output'", kind=NoGradientError, layer="trunk"):
        all_moments(model, layers, [torch.randn(4, 6)], call, cubes)
    assert all_moments(model, layers, [torch.randn(4, 6)], call)["trunk"].gradients is None


def test_a_wide_side_has_the_blocks_of_the_whole_moment(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 4))
    layers, _ = find_layers(model, "channel")
    batches = [torch.randn(6, 5) for _ in range(3)]
    whole = all_moments(model, layers, batches, run, cubes)
    monkeypatch.setattr("decomposable.core.sums.WIDEST", 6)
    monkeypatch.setattr("decomposable.core.sums.BLOCK", 4)
    parts = all_moments(model, layers, batches, run, cubes)
    for side, name in (("gradients", "0"), ("inputs", "2")):
        matrix, blocks = getattr(whole[name], side), getattr(parts[name], side)
        assert blocks.shape == (3, 4, 4)
        for number, block in enumerate(blocks):
            rows = slice(4 * number, min(11, 4 * number + 4))
            torch.testing.assert_close(block[: rows.stop - rows.start, : rows.stop - rows.start], matrix[rows, rows])
        assert not blocks[2, 3].any()  # what fills up the last one
    torch.testing.assert_close(parts["0"].inputs, whole["0"].inputs)


def test_of_large_maps_some_positions_stand_for_all(monkeypatch):
    """The expectation is the same: over many batches the two come together."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1))
    layers, _ = find_layers(model, "spatial")
    batches = [torch.randn(8, 2, 10, 10) for _ in range(60)]
    whole = all_moments(model, layers, batches, run, cubes)["0"]
    monkeypatch.setattr("decomposable.core.moments.MOST_POSITIONS", 25)
    some = all_moments(model, layers, batches, run, cubes)["0"]
    for one, other in ((some.inputs, whole.inputs), (some.gradients, whole.gradients)):
        assert not torch.equal(one, other)
        assert (one - other).norm() < 0.05 * other.norm()
