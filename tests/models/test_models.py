import copy
import inspect
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from decomposable import models
from decomposable.models.origin import built_by, noted, rebuilt
from decomposable_edge.errors import InvalidArgumentError

# name: (arguments, image side, parameters, MACs). VGG-15's MACs and the ResNet-50 row are given figures; the
# others follow from the architecture by arithmetic (kernel area x widths x output pixels), not this code.
FIGURES = {
    "vgg15": ({"num_classes": 10}, 32, 14_987_210, 313_463_808),
    "resnet20": ({"num_classes": 10}, 32, 269_722, 40_551_040),
    "resnet56": ({"num_classes": 10}, 32, 853_018, 125_485_696),
    "resnet34": ({"num_classes": 100}, 32, 21_328_292, 1_159_448_576),
    "resnet50": ({"num_classes": 1000}, 224, 25_557_032, 4_089_184_256),
}

LARGE = ("resnet34", "resnet50", "resnet56")


def on_meta(name: str, **kwargs: int) -> nn.Module:
    """Shapes without memory, so that the large models are as quick to count as the small ones."""
    with torch.device("meta"):
        return models.build(name, **kwargs).eval()


def kernels(model: nn.Module) -> list[nn.Conv2d | nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]


def test_every_model_has_figures() -> None:
    assert set(models.MODELS) == set(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_parameters_macs_and_outputs(name: str) -> None:
    """The MACs are those that torch counts."""
    kwargs, side, parameters, macs = FIGURES[name]
    model = on_meta(name, **kwargs)
    assert sum(p.numel() for p in model.parameters()) == parameters
    with FlopCounterMode(display=False) as counter:
        y = model(torch.empty(1, 3, side, side, device="meta"))
    assert counter.get_total_flops() == 2 * macs
    assert y.shape == (1, kwargs["num_classes"])


@pytest.mark.parametrize("name", FIGURES)
def test_default_classes_and_other_channels(name: str) -> None:
    side = FIGURES[name][1]
    y = on_meta(name, in_channels=1)(torch.empty(2, 1, side, side, device="meta"))
    assert y.shape == (2, FIGURES[name][0]["num_classes"])
    assert kernels(on_meta(name, num_classes=7))[-1].out_features == 7


def test_vgg15_weights_and_full_ranks() -> None:
    layers = kernels(on_meta("vgg15"))
    assert len(layers) == 15
    assert sum(layer.weight.numel() for layer in layers) == 14_977_728
    channel = spatial = 0
    for layer in layers:
        cout, cin, ky, kx = (*layer.weight.shape, 1, 1)[:4]
        channel += min(ky * kx * cin, cout)
        spatial += min(kx * cin, ky * cout)
    assert (channel, spatial) == (4_709, 11_667)


def test_vgg15_dropout_places() -> None:
    names = [name for name, _ in on_meta("vgg15").named_children()]
    drops = {n: m.p for n, m in on_meta("vgg15").named_children() if isinstance(m, nn.Dropout)}
    inner = [f"drop{i}" for i in (3, 5, 6, 8, 9, 11, 12)]
    assert drops == {"drop1": 0.3, **dict.fromkeys(inner, 0.4), "fc1_drop": 0.5, "fc2_drop": 0.5}
    assert names[-7:] == ["flatten", "fc1_drop", "fc1", "fc1_bn", "fc1_relu", "fc2_drop", "fc2"]


def test_vgg15_biases_only_in_the_last_layer() -> None:
    assert [layer.bias is not None for layer in kernels(on_meta("vgg15"))] == [False] * 14 + [True]


@pytest.mark.parametrize("name", ["vgg15", "resnet20"])
def test_initial_values(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name)
    for layer in kernels(model):
        expected = math.sqrt(2 / layer.weight[0].numel())
        if layer.weight.numel() > 2_000:
            assert layer.weight.std().item() == pytest.approx(expected, rel=0.08)
        if name == "vgg15":
            assert layer.weight.abs().max() <= 2 * expected / 0.8796 + 1e-6
        assert layer.bias is None or not layer.bias.any()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
            assert (norm.eps, norm.momentum) == (1e-5, 0.1)
            assert (norm.weight == 1).all()
            assert (norm.bias == 0).all()


@pytest.mark.parametrize(
    "name", ["resnet20", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vgg15", "resnet34"))]
)
def test_gradient_reaches_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name, num_classes=10)
    model(torch.randn(4, 3, 32, 32)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_resnet20_shortcut_is_the_subsampled_input_between_zeros() -> None:
    shortcut = models.resnet20().get_submodule("layer2.0.shortcut")
    x = torch.randn(2, 16, 8, 8)
    y = shortcut(x)
    assert y.shape == (2, 32, 4, 4)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()


def test_resnet34_projects_its_shortcuts() -> None:
    shapes = {n: tuple(p.shape) for n, p in on_meta("resnet34").named_parameters() if "shortcut.0" in n}
    assert shapes == {
        "layer2.0.shortcut.0.weight": (128, 64, 1, 1),
        "layer3.0.shortcut.0.weight": (256, 128, 1, 1),
        "layer4.0.shortcut.0.weight": (512, 256, 1, 1),
    }


def test_resnet50_has_torchvision_names() -> None:
    model = on_meta("resnet50")
    state = model.state_dict()
    assert len(state) == 320
    assert {"conv1.weight", "bn1.running_var", "layer4.2.bn3.bias", "fc.bias"} <= set(state)
    assert state["layer1.0.downsample.0.weight"].shape == (256, 64, 1, 1)
    assert state["layer2.0.downsample.1.weight"].shape == (512,)
    assert state["layer3.5.conv2.weight"].shape == (256, 256, 3, 3)
    assert model.get_submodule("layer2.0.conv2").stride == (2, 2)
    assert model.get_submodule("layer2.0.conv1").stride == (1, 1)


def test_unknown_name() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        models.build("resnet-20")
    assert (caught.value.option, caught.value.came) == ("model", "resnet-20")
    assert caught.value.allowed == ", ".join(sorted(models.MODELS))


def test_unknown_argument() -> None:
    with pytest.raises(TypeError, match="num_clases"):
        models.build("resnet20", num_clases=10)


def test_resnet20_with_real_weights(shared_data: Path) -> None:
    checkpoint = torch.load(shared_data / "resnet20-12fca82f.th", weights_only=True, map_location="cpu")
    model = models.resnet20(num_classes=10).eval()
    model.load_state_dict({k.removeprefix("module."): v for k, v in checkpoint["state_dict"].items()})

    with np.load(shared_data / "cifar10_ci_1k.npz") as images:
        x = torch.from_numpy(images["x_test"][:500]).float() / 255
        y = torch.from_numpy(images["y_test"][:500]).long()
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    with torch.no_grad():
        correct = torch.cat([model(part).argmax(1) for part in ((x - mean) / std).split(250)]) == y
    accuracy = correct.float().mean().item()
    assert accuracy > 0.90


@pytest.mark.parametrize(
    "name", ["resnet20", "vgg15", "small_cnn", *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)]
)
def test_a_model_knows_how_it_was_built(name: str) -> None:
    with torch.device("meta"):
        model = getattr(models, name)(num_classes=np.int64(7), in_channels=2)
    note = built_by(model)
    assert json.loads(json.dumps(note)) == note
    assert note["name"] == name
    assert note["arguments"].keys() == inspect.signature(getattr(models, name)).parameters.keys()
    assert built_by(copy.deepcopy(model)) == note
    assert repr(rebuilt(note)) == repr(model)
    assert all(p.is_meta for p in rebuilt(note).parameters())
    assert noted(model) == {**note, "is_changed": False}
    hook = next(model.children()).register_forward_hook(lambda *_: None)
    assert noted(model) == {**note, "is_changed": True}
    hook.remove()
    assert noted(copy.deepcopy(model)) == {**note, "is_changed": False}
    model[0] = nn.Identity()
    assert noted(model) == {**note, "is_changed": True}
    assert "decomposable" not in str(note)  # a model that is pickled does not ask for this package because of it


def test_a_number_that_the_repr_does_not_show_counts() -> None:
    model = models.small_cnn()
    model[0].note = 3  # of the owner's own: it changes nothing
    assert noted(model)["is_changed"] is False
    shown = repr(model)
    model[-1].out_features = str(model[-1].out_features)
    assert repr(model) == shown
    assert noted(model)["is_changed"] is True


def test_a_model_too_large_for_a_file_to_name_is_not_noted_in_one() -> None:
    with torch.device("meta"):
        assert noted(models.small_cnn(num_classes=1 << 30)) is None
