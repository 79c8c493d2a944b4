"""Layers whose weight is computed (weight norm, spectral norm, parametrizations): decomposed as what they compute."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune

import decomposable as dn
from decomposable.network.artifact import save_size
from decomposable_edge import AnySizeSession


class Squashed(nn.Module):
    def forward(self, weight):
        return 2 * weight.tanh()


def squashed(layer, name="weight"):
    parametrize.register_parametrization(layer, name, Squashed())
    return layer


KINDS = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own": squashed,
    "weight norm by a hook": utils.weight_norm,
    "spectral norm by a hook": utils.spectral_norm,
    "both weight and bias": lambda layer: squashed(squashed(layer), "bias"),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind):
    torch.manual_seed(0)
    rule = KINDS[kind]
    return nn.Sequential(
        rule(nn.Conv2d(3, 8, 3, padding=1)),
        nn.ReLU(),
        rule(nn.ConvTranspose2d(8, 6, 2, stride=2)),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        rule(nn.Linear(24, 12)),
    )


def images():
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


@each_kind
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_the_layers_compute_is_decomposed(kind, tmp_path):
    model, x = build(kind), images()
    model.train()(x)  # a spectral norm goes on by one step
    before, hooks = copy.deepcopy(model.state_dict()), len(model[0]._forward_pre_hooks)
    classes = [type(module) for module in model]
    net = dn.decompose(model, example_input=x)
    assert model.training
    assert [type(module) for module in model] == classes
    assert len(model[0]._forward_pre_hooks) == hooks
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)

    model.eval()
    assert net.skipped == {}
    assert [layer.name for layer in net.layers] == ["0", "2", "6"]
    torch.testing.assert_close(net(x), model(x))
    full = net.extract(net.selector.full_plan())
    assert list(full.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias", "6.weight", "6.bias"]
    assert [type(full[i]) for i in (0, 2, 6)] == [nn.Conv2d, nn.ConvTranspose2d, nn.Linear]
    assert not any(module._forward_pre_hooks for module in full.modules())
    assert all(p.requires_grad for p in full.parameters())
    model.train()(x)  # still runs, and trains

    net.resize_(macs=0.5)
    net.save(tmp_path / "net.safetensors")
    save_size(net, net.plan(), tmp_path / "size.safetensors")
    for made in (build(kind), full):  # computed again, or plain layers
        assert torch.equal(dn.load(tmp_path / "net.safetensors", model=made)(x), net(x))
        assert torch.equal(dn.load(tmp_path / "size.safetensors", model=made)(x), net(x))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_values_that_no_pass_has_seen_yet_count():
    model = build("weight norm by a hook").eval()
    with torch.no_grad():
        model[0].weight_g.mul_(3)
    net = dn.decompose(model)  # without a pass, which would compute the weight anew
    torch.testing.assert_close(net(images()), model(images()))


def test_settled_layers_go_on_by_their_other_hooks():
    model, seen = build("weight norm").eval(), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    net = dn.decompose(model)
    net(images())
    assert seen == [1]


def test_exports_have_plain_weights(tmp_path):
    x = images()
    net = dn.decompose(build("spectral norm"), example_input=x)
    net.save(tmp_path / "any.safetensors", onnx=True)
    session = AnySizeSession(tmp_path / "any.safetensors", macs=0.5)
    net.resize_(macs=0.5)
    np.testing.assert_allclose(session.run(x.numpy()), net(x), atol=1e-4)
    assert not any("original" in name or name.endswith(("_u", "_v")) for name in net.extract().state_dict())


@each_kind
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_joint_training_leaves_them_alone_and_says_so(kind):
    model = nn.Sequential(build(kind), nn.Linear(12, 4))
    before = copy.deepcopy(model.state_dict())
    objective = dn.JointObjective(model, example_input=images(), macs=(0.998, 1.0))
    assert [layer.name for layer in objective.layers] == ["1"]
    assert all("its weight is computed" in objective.skipped[f"0.{i}"] for i in (0, 2, 6))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    objective.backward(lambda net: net(images()).square().mean())
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_filter_leaves_them_as_they_are():
    model = build("weight norm").eval()
    net = dn.decompose(model, example_input=images(), filter_fn=lambda module, name: name != "2")
    assert net.skipped["2"].startswith("rejected by filter_fn")
    assert parametrize.is_parametrized(net.extract()[2])
    torch.testing.assert_close(net(images()), model(images()))


def test_a_parameter_that_another_module_holds_too_keeps_its_layer_as_it_is():
    model = build("weight norm").eval()
    model.append(nn.Linear(12, 12, bias=False))
    parametrizations.weight_norm(model[7])
    model[7].parametrizations.weight.original0 = model[6].parametrizations.weight.original0
    net = dn.decompose(model, example_input=images())
    assert {"6", "7"} <= net.skipped.keys()
    assert "unless others share it" in net.skipped["6"]
    torch.testing.assert_close(net(images()), model(images()))


def test_pruned_layers_stay_as_they_are():
    model = nn.Sequential(nn.Linear(4, 4), prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5))
    assert "its weight is computed" in dn.decompose(model).skipped["1"]
