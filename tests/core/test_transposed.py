"""Transposed convolutions: chains, costs, moments and training, against PyTorch's own layers and autograd."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

import decomposable as dn
import decomposable.core.lowrank as lowrank_module
from decomposable.core import moments
from decomposable.core.factors import Taylor, as_held, like_weight
from decomposable.core.forms import to_matrix
from decomposable.core.layers import ChainLayers, decomposed, find_layers
from decomposable.core.moments import second_moments
from decomposable.core.tracing import layer_costs, trace

LAYERS = {
    "doubling": nn.ConvTranspose2d(6, 4, 2, stride=2),
    "overlapping": nn.ConvTranspose2d(5, 7, 4, stride=2, padding=1),
    "uneven": nn.ConvTranspose2d(4, 5, (3, 2), stride=(2, 3), padding=(1, 0), output_padding=(1, 2), dilation=(1, 3)),
    "output padding beyond the stride": nn.ConvTranspose2d(4, 3, 3, stride=1, dilation=3, output_padding=2),
    "wide padding": nn.ConvTranspose2d(4, 5, 3, stride=1, padding=2),
    "without bias": nn.ConvTranspose2d(8, 3, 3, stride=2, bias=False),
    "pixels": nn.ConvTranspose2d(6, 5, 1, stride=2, output_padding=1),
    "one axis": nn.ConvTranspose1d(6, 4, 5, stride=3, padding=2, output_padding=1),
    "three axes": nn.ConvTranspose3d(4, 3, (2, 3, 1), stride=(2, 1, 1), padding=(0, 1, 0)),
}
each_layer = pytest.mark.parametrize("name", LAYERS)
each_form = pytest.mark.parametrize("form", ["spatial", "channel", "tucker"])


def made(name):
    """The layer in double precision, and an input for it."""
    torch.manual_seed(0)
    module = copy.deepcopy(LAYERS[name]).double()
    axes = len(module.kernel_size)
    return module, torch.randn(2, module.in_channels, *(5, 4, 6)[:axes], dtype=torch.float64)


def layer_of(module, form="spatial"):
    [layer], _ = find_layers(nn.Sequential(module), form)
    return layer


def factors_of(layer):
    """All bases, the best first."""
    bases = decomposed([layer])[layer.name]
    orders = [torch.arange(len(s)) for s in bases.spectra]
    return like_weight(layer, layer.numerics.weights(layer.weight.detach(), bases, orders))


@each_layer
@each_form
def test_a_chain_of_all_bases_is_the_layer(name, form):
    module, x = made(name)
    layer = layer_of(module, form)
    chain = ChainLayers(module, layer.chain).build(*as_held(layer.chain, factors_of(layer)))
    torch.testing.assert_close(chain(x), module(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(chain.weight + 0, module.weight, rtol=1e-9, atol=1e-9)
    assert chain.weight.shape == module.weight.shape
    assert chain.stride == module.stride
    size = [n + 1 for n in module(x).shape[2:]]
    if min(module.stride) > 1 and not any(module.output_padding):
        torch.testing.assert_close(chain(x, size), module(x, size), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(chain(x, output_size=size), module(x, output_size=size), rtol=1e-9, atol=1e-9)


def test_the_chain_is_a_plain_1x1_and_a_transposed_convolution():
    module, _ = made("overlapping")
    layer = layer_of(module)
    first, second = ChainLayers(module, layer.chain).build(*as_held(layer.chain, factors_of(layer)))
    assert layer.form == "pointwise"
    assert layer.shape == (7, 5, 4, 4)
    assert type(first) is nn.Conv2d
    assert first.kernel_size == (1, 1)
    assert first.bias is None
    assert type(second) is nn.ConvTranspose2d
    assert (second.in_channels, second.out_channels) == (5, 7)
    assert second.stride == (2, 2)
    assert second.padding == (1, 1)
    assert second.bias is module.bias
    assert first.weight.is_contiguous()
    assert second.weight.is_contiguous()


@each_layer
@each_form
def test_macs_are_those_that_torch_counts(name, form):
    module, x = made(name)
    layer = layer_of(module, form)
    model = nn.Sequential(module)
    layers, _ = find_layers(model, form)
    [cost] = layer_costs(layers, trace(model, x))
    ranks = tuple(max(1, r // 2) for r in layer.full_ranks)
    weights = [torch.zeros(shape, dtype=x.dtype) for shape in layer.chain.shapes(ranks)]
    chain = ChainLayers(module, layer.chain).build(*layer.chain.held(weights))
    for macs, network in ((cost.dense_macs, module), (cost.chain("macs", ranks), chain)):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            network(x)
        assert macs == counter.get_total_flops() // 2 // len(x)


@each_layer
def test_the_sum_of_x_gt_is_the_gradient_of_the_weight(name, monkeypatch):
    module, x = made(name)
    model = nn.Sequential(module.float(), nn.Tanh())
    seen = {"input_patches": [], "_gradient_patches": []}
    for function, kept in seen.items():
        original = getattr(moments, function)
        monkeypatch.setattr(
            moments, function, lambda *a, original=original, kept=kept, **k: kept.append(original(*a, **k)) or kept[-1]
        )
    layers, _ = find_layers(model, "spatial")
    [found] = second_moments(model, layers, [x.float()], lambda net, batch: net(batch), lambda y, _: y.pow(3).sum())
    x_MP, g_NP = (torch.cat(parts).transpose(0, 1).flatten(1) for parts in seen.values())
    model(x.float()).pow(3).sum().backward()
    gradient = to_matrix(module.weight.grad.transpose(0, 1), "pointwise")
    torch.testing.assert_close(x_MP @ g_NP.mT, gradient, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["0"].inputs, x_MP @ x_MP.mT / x_MP.shape[1])
    torch.testing.assert_close(found["0"].gradients, g_NP @ g_NP.mT / len(x))


def test_taylors_scores_are_the_derivatives_by_singular_values():
    module, x = made("overlapping")
    model = nn.Sequential(module)
    layers, _ = find_layers(model, "channel")
    bases = decomposed(layers)
    [scores] = Taylor([x], lambda net, batch: net(batch).pow(2).sum()).scores(model, layers, bases)["0"]
    u, s, v = bases["0"]
    s = s.double().clone().requires_grad_(True)
    weight = ((u.double() * s) @ v.double().mT).reshape(5, 7, 4, 4)
    functional_call(module, {"weight": weight}, (x,)).pow(2).sum().backward()
    torch.testing.assert_close(torch.from_numpy(scores), (s * s.grad.abs()).detach(), rtol=1e-5, atol=1e-5)


def decoder():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ConvTranspose2d(5, 6, 3, stride=2, padding=1, output_padding=1),
        nn.BatchNorm2d(6),
        nn.Tanh(),
        nn.ConvTranspose2d(6, 4, 2, stride=2),
    ).double()
    for index in (0, 3):  # singular values that lie apart
        u, s, vt = torch.linalg.svd(model[index].weight.detach().flatten(1), full_matrices=False)
        spread = s.max() * torch.linspace(1, 0.2, len(s), dtype=s.dtype)
        model[index].weight.data = ((u * spread) @ vt).view_as(model[index].weight)
    return model


@pytest.mark.parametrize("runs_as", ["factored", "dense"])
def test_gradients_of_joint_training_are_those_of_autograd_through_the_svd(runs_as, monkeypatch):
    monkeypatch.setattr(lowrank_module, "chain_is_faster", lambda *_, **__: runs_as == "factored")
    model, x = decoder(), torch.randn(3, 5, 4, 5, dtype=torch.float64)
    objective = dn.JointObjective(model, ratio=0.5)
    assert [layer.form for layer in objective.layers] == ["pointwise", "pointwise"]
    assert objective.skipped == {}
    reference = copy.deepcopy(model)
    full, low = objective.gradients(lambda net: net(x).pow(2).mean())
    bases = {layer.name: decomposed([layer])[layer.name] for layer in objective.layers}
    ranks = objective.select_ranks(bases, 0.5)
    assert any(ranks[layer.name] < layer.full_rank for layer in objective.layers)

    def cut(weight, rank):
        u, s, vt = torch.linalg.svd(weight.flatten(1), full_matrices=False)
        return ((u[:, :rank] * s[:rank]) @ vt[:rank]).view_as(weight)

    own = dict(reference.named_parameters())
    truncated = {f"{name}.weight": cut(own[f"{name}.weight"], ranks[name]) for name in ("0", "3")}
    functional_call(reference, truncated, (x,)).pow(2).mean().backward()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            low[parameter], expected.grad, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert full[parameter].shape == parameter.shape


def test_joint_training_takes_the_size_of_the_output():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 3, 3, stride=2)

        def forward(self, x):
            return self.up(x, output_size=(12, 12))

    torch.manual_seed(0)
    model, x = Given(), torch.randn(2, 4, 5, 5)
    losses = dn.JointObjective(model, ratio=0.5).backward(lambda net: net(x).pow(2).mean())
    assert torch.isfinite(losses.low)
    assert model.up.weight.grad is not None


def test_a_weight_that_a_convolution_has_too_is_left_alone():
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ConvTranspose2d(6, 4, 3, padding=1), nn.Conv2d(4, 4, 1))
    model[1].weight = model[0].weight
    layers, skipped = find_layers(model, "spatial")
    assert [layer.name for layer in layers] == ["2"]
    assert skipped == {"0": "weight tied to ConvTranspose2d '1'", "1": "weight tied to Conv2d '0'"}


def test_two_layers_may_share_a_transposed_weight():
    torch.manual_seed(0)
    up = nn.ConvTranspose2d(4, 4, 2, stride=2)
    other = nn.ConvTranspose2d(4, 4, 2, stride=2)
    other.weight = up.weight
    x = torch.randn(2, 4, 3, 3)
    net = dn.decompose(nn.Sequential(up, other).eval(), example_input=x)
    assert [layer.name for layer in net.layers] == ["0"]
    net.resize_(ranks={"0": 2})
    small = net.extract()
    assert small[0][1].weight is small[1][1].weight
