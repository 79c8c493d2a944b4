"""Files of methods that do not decompose: what `decomposable_lab.load` gives back, and what it refuses."""

import copy
import json
import random
from dataclasses import asdict

import pytest
import torch
from torch import nn

import decomposable as dn
import decomposable_lab as lab
from decomposable import models
from decomposable.network import artifact
from decomposable.network.file.container import read_container, write_container
from decomposable.recipes import cross_entropy
from decomposable.recipes.settings import Settings
from decomposable.training import methods
from decomposable.training.methods import CalibrationData
from decomposable.training.methods.flat import with_overrides
from decomposable_edge.errors import ArtifactError, DecomposableError, InvalidArgumentError, ModelNeededError

# Few sizes are calibrated here, on purpose: what a size far from them does is looked at in test_grid.py.
pytestmark = pytest.mark.filterwarnings("ignore:batch normalisation was calibrated")

NAMES = ("width", "scratch", "tucker", "slimmable", "us-net")
SETTINGS = with_overrides(Settings(), sizes=(1.0, 0.5, 0.2), width=0.5, ranks=(9, 12, 10), tuning_epochs=1)


def build():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def with_structure(model):
    """Weights in which VBMF finds something."""
    with torch.no_grad():
        for module in model:
            if isinstance(module, nn.Conv2d):
                low = torch.randn(len(module.weight), 2) @ torch.randn(2, module.weight[0].numel())
                module.weight.copy_((low + 0.05 * torch.randn_like(low)).view_as(module.weight))
    return model


def made(name):
    x = torch.randn(16, 3, 6, 6)
    batch = x, torch.randint(0, 10, (16,))
    method = methods.find(name)
    network = method.network(with_structure(build()), x[:1], SETTINGS, is_trained=name == "tucker")
    network.train()
    method.step(network, SETTINGS).backward(lambda net: cross_entropy(net, batch))
    material = CalibrationData(example_input=x[:1], calibration=[batch], loss=cross_entropy)
    return method.sized(network.eval(), material, SETTINGS).eval(), x


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_is_loaded_with_its_size_mode_and_outputs(name, tmp_path):
    net, x = made(name)
    net.resize_(net.sizes[-1])
    net.save(tmp_path / "net.safetensors")
    again = lab.load(tmp_path / "net.safetensors", model=build())
    assert (again.plan(), again.training, again.sizes, again.method) == (net.plan(), False, net.sizes, name)
    for size in net.sizes:
        net.resize_(size)
        again.resize_(size)
        assert torch.equal(again(x), net(x))
    again.save(tmp_path / "again.safetensors", info={"note": "mine"})
    assert lab.load(tmp_path / "again.safetensors", model=build()).info == {"note": "mine"}


@pytest.mark.parametrize("name", NAMES)
def test_types_are_kept(name, tmp_path):
    net, x = made(name)
    net.double().save(tmp_path / "net.safetensors")
    again = lab.load(tmp_path / "net.safetensors", model=build())
    assert {p.dtype for p in again.parameters()} == {torch.float64}
    assert torch.equal(again(x.double()), net(x.double()))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_on_the_meta_device_is_enough(name, tmp_path):
    net, x = made(name)
    net.save(tmp_path / "net.safetensors")
    with torch.device("meta"):
        model = build()
    again = lab.load(tmp_path / "net.safetensors", model=model)
    assert torch.equal(again(x), net(x))


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_a_network_of_its_own(name):
    net, x = made(name)
    before = net(x)
    twin = copy.deepcopy(net).double()
    assert twin(x.double()).dtype == torch.float64
    assert torch.equal(net(x), before)


@pytest.mark.parametrize("name", NAMES)
def test_one_size_is_trained_further_only_after_extract(name, tmp_path):
    net, x = made(name)
    assert not any(p.requires_grad for p in net.parameters())
    small = net.extract()
    assert all(p.requires_grad for p in small.parameters())
    small(x).sum().backward()
    torch.save(small, tmp_path / "small.pt")
    # Plain modules need nothing of this package to be read; what stands in for a layer, which scratch has, does.
    assert (b"decomposable" in (tmp_path / "small.pt").read_bytes()) == (name == "scratch")


LIES = {
    "a size that costs nothing": lambda d: d["sizes"][0].update(macs=0),
    "cheaper than it is": lambda d: d["sizes"][0].update(macs=5),
    "a part that there is not": lambda d: d["sizes"][-1].update(value=0.123),
    "a size in force that there is not": lambda d: d.update(size=99),
    "no mode": lambda d: d.pop("training"),
    "a method that there is not": lambda d: d.update(method="magic"),
    "a method that makes no such file": lambda d: d.update(method="plain"),
    "an input of 14 gigabytes": lambda d: d["structure"].update(input_shape=[1, 60000, 60000]),
    "an input of text": lambda d: d["structure"].update(input_shape="3,6,6"),
    "an empty structure": lambda d: d["structure"].clear(),
}


@pytest.mark.parametrize("kind", LIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_lies_is_refused_in_one_line(name, kind, tmp_path):
    net, _ = made(name)
    path = tmp_path / "net.safetensors"
    net.save(path)
    description, tensors = read_container(path)
    LIES[kind](description)
    write_container(path, {k: v for k, v in description.items() if k not in ("sha256", "format")}, tensors)
    with pytest.raises(ArtifactError) as caught:
        lab.load(path, model=build())
    assert str(caught.value).count(str(path)) == 1


class NoConvolution(nn.Module):
    """Has a weight of the shape that a convolution has."""

    def __init__(self, conv):
        super().__init__()
        self.weight = nn.Parameter(conv.weight.detach().clone())


def test_a_model_that_has_something_else_for_a_convolution_is_refused(tmp_path):
    net, _ = made("tucker")
    path = tmp_path / "net.safetensors"
    net.save(path)
    description, _ = read_container(path)
    [name] = [layer["modules"][0] for layer in description["structure"]["layers"] if layer["form"] == "tucker"][:1]
    model = build()
    model.set_submodule(name, NoConvolution(model.get_submodule(name)))
    with pytest.raises(ArtifactError, match=r"it does not go with this model \(AssertionError"):
        lab.load(path, model=model)


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": [10**7, 10**7]},
        {"ranks": [0, 1]},
        {"ranks": [1]},
        {"positions": [-1, -1, -1]},
        {"form": "cubic"},
        {"modules": []},
        {"shape": [12]},
    ],
)
def test_ranks_that_no_layer_has_are_refused(change, tmp_path):
    net, _ = made("tucker")
    path = tmp_path / "net.safetensors"
    net.save(path)
    description, tensors = read_container(path)
    description["structure"]["layers"][0].update(change)
    write_container(path, {k: v for k, v in description.items() if k not in ("sha256", "format")}, tensors)
    with pytest.raises(ArtifactError, match="damaged"):
        lab.load(path, model=build())
    description["structure"]["layers"] = description["structure"]["layers"][1:] * 2  # the same layer twice
    write_container(path, {k: v for k, v in description.items() if k not in ("sha256", "format")}, tensors)
    with pytest.raises(ArtifactError, match="twice"):
        lab.load(path, model=build())


def test_the_library_refuses_it_in_one_line_and_the_laboratory_shows_its_sizes(tmp_path, capsys):
    from decomposable.commands import main as library
    from decomposable_lab.commands import main as cli

    net, _ = made("us-net")
    path = tmp_path / "net.safetensors"
    net.save(path, info={"sizes": [{"macs": net.plan().macs, "params": net.plan().params, "accuracy": 91.5}]})
    out = ["-o", str(tmp_path / "out.safetensors")]
    for arguments in (["resize", str(path), "--macs", "0.5", *out], ["sizes", str(path)], ["evaluate", str(path)]):
        assert library.main(arguments) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert all(word in err for word in ("laboratory", "us-net", "decomposable_lab.load(path)", "pip install"))
    for read in (dn.load, artifact.read, artifact.outline):
        with pytest.raises(ArtifactError, match=r"network of the laboratory, by the method 'us-net'.*decomposable_lab"):
            read(path)
    assert cli.main(["sizes", str(path)]) == 0
    out = capsys.readouterr().out
    assert "width 1" in out
    assert "91.50%" in out
    assert cli.main(["sizes", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "us-net"
    with pytest.raises(InvalidArgumentError):
        net.load_state_dict({})


def test_a_decomposed_network_is_loaded_as_the_library_does(tmp_path):
    dn.decompose(build()[2:], torch.zeros(1, 12, 6, 6)).save(tmp_path / "net.safetensors")
    net = lab.load(tmp_path / "net.safetensors", model=build()[2:], macs=0.5)
    assert isinstance(net, dn.DecomposedNet)
    assert net.plan() == dn.load(tmp_path / "net.safetensors", model=build()[2:], macs=0.5).plan()


def test_a_method_takes_no_alignment(tmp_path):
    made("us-net")[0].save(tmp_path / "net")
    with pytest.raises(InvalidArgumentError, match=r"align=: .*net holds the sizes of a method; allowed: macs, params"):
        lab.load(tmp_path / "net", build(), macs=1.0, align=8)


def rewritten(path, **changes):
    """The file after a change of its description, with the right checksum."""
    description, tensors = read_container(path)
    write_container(path, {k: v for k, v in (description | changes).items() if k not in ("sha256", "format")}, tensors)
    return path


def decaying(model):
    """Weights with the singular values of trained ones."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            u, s, v = torch.linalg.svd(module.weight.data.flatten(1), full_matrices=False)
            module.weight.data = (u * (s * torch.linspace(1, 0, len(s)) ** 2) @ v).view_as(module.weight)
    return model


def with_hook():
    model = models.small_cnn()
    model[2].register_forward_hook(lambda module, args, output: 2 * output)
    return model


def with_other_forward():
    model = models.small_cnn()
    model[2].forward = torch.tanh
    return model


@pytest.mark.parametrize("method", ["width", "scratch", "tucker", "slimmable", "us-net"])
def test_the_sizes_of_a_method_are_loaded_without_the_model(method, tmp_path):
    settings = with_overrides(Settings(), sizes=(1.0, 0.5, 0.2), width=0.5, ranks=(2, 9, 6), tuning_epochs=1)
    made, x = methods.find(method), torch.randn(16, 1, 8, 8)
    batch = x, torch.randint(0, 10, (16,))
    model = decaying(models.small_cnn((12, 16)))
    network = made.network(model, x[:1], settings, is_trained=method == "tucker")
    net = made.sized(
        network.eval(), CalibrationData(example_input=x[:1], calibration=[batch], loss=cross_entropy), settings
    )
    net.eval().save(tmp_path / "net", info={"input_shape": [1, 8, 8]})
    path = tmp_path / "net"
    again = lab.load(path)
    for size in net.sizes:
        net.resize_(size)
        again.resize_(size)
        assert torch.equal(again(x), net(x))
    assert lab.load(path, macs=1.0).plan() == again.plan(macs=1.0)
    with pytest.raises(InvalidArgumentError, match=r"ratio=: .* allowed: macs, params"):
        lab.load(path, ratio=0.5)
    lying = {"name": "small_cnn", "arguments": {"widths": [2**14] * 64}, "is_changed": False}  # 600 GB
    path = rewritten(tmp_path / "net", built_by=lying)
    with pytest.raises(ArtifactError, match="net"):
        lab.load(path)


@pytest.mark.parametrize("change", [with_hook, with_other_forward])
def test_a_changed_model_has_to_be_given_for_the_sizes_of_a_method(change, tmp_path):
    settings, x = Settings(sizes=(1.0, 0.5)), torch.randn(4, 1, 8, 8)
    made = methods.find("us-net")
    network = made.network(change(), x[:1], settings, is_trained=False).eval()
    material = CalibrationData(
        example_input=x[:1], calibration=[(x, torch.zeros(4, dtype=torch.long))], loss=cross_entropy
    )
    made.sized(network, material, settings).save(tmp_path / "net", info={"input_shape": [1, 8, 8]})
    with pytest.raises(ModelNeededError, match=r"model= is needed: .*net was built by small_cnn, changed since;"):
        lab.load(tmp_path / "net")
    lab.load(tmp_path / "net", model=change())


ODD = [None, True, -1, 0, 1, 3, 2**31, 2**63, 10**30, 0.5, 1e300, "", "0", "é\n\x1b[2J", "../../etc/passwd", "a" * 3000]
ODD += [[], [0], [-1, 5], [2**40, 2**40], {}, {"name": "x"}, [[[[[[]]]]]], "F64"]


def mutate(value, dice):
    """Change one thing somewhere inside: another value, one missing, one twice."""
    keys = sorted(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return
    key = dice.choice(keys)
    if isinstance(value[key], dict | list) and value[key] and dice.random() < 0.8:
        mutate(value[key], dice)
    elif dice.random() < 0.7:
        value[key] = copy.deepcopy(dice.choice(ODD))
    elif isinstance(value, list):
        value.insert(key, copy.deepcopy(value[key]))
    else:
        del value[key]


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_file_is_refused_in_one_line_or_works(name, tmp_path):
    """Its checksums are right: only the description lies."""
    net, x = made(name)
    path, dice = tmp_path / "net.safetensors", random.Random(NAMES.index(name))
    net.save(path, info={"input_shape": [3, 6, 6]})
    right, tensors = read_container(path)
    said = []
    for case in range(60):
        description = copy.deepcopy(
            {k: v for k, v in right.items() if k not in ("sha256", "format", "strides", "blocks")}
        )
        mutate(description, dice)
        write_container(path, description, tensors)
        size = {"macs": 0.9} if case % 3 == 0 else {}
        try:
            assert lab.load(path, model=build(), **size)(x).shape == (16, 10)
        except DecomposableError as error:
            said.append(str(error))
    assert len(said) > 10
    assert all(line.isprintable() and len(line) < 600 for line in said)


def claiming(net, path, shape):
    """The file of a network that says it takes another input; its costs are those of that input."""
    net.save(path)
    description, tensors = read_container(path)
    description["structure"]["input_shape"] = shape
    method = methods.find(net.method)
    example = torch.zeros(1, *shape, device="meta")
    network, _ = method.rebuilt(build().to("meta"), example, Settings(), description["structure"])
    again = [method.size_again(network, size["value"], example) for size in description["sizes"]]
    description["sizes"] = [asdict(size) for size in again]
    write_container(path, {k: v for k, v in description.items() if k not in ("sha256", "format")}, tensors)


class Watched(nn.Module):
    """Notes where it is run, and on what."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append((x.device.type, tuple(x.shape)))
        return x

    def __deepcopy__(self, memo):
        return self


def watched():
    model = build()
    model[2] = Watched()
    return model


@pytest.mark.parametrize("name", ["width", "scratch", "slimmable", "us-net"])
def test_nothing_is_computed_on_an_input_that_a_file_claims(name, tmp_path):
    """A claim of [3, 1024, 2048], with costs that agree, is answered without a single multiplication."""
    net, x = made(name)
    path = tmp_path / "net.safetensors"
    claiming(net, path, [3, 1024, 2048])
    model = watched()
    again = lab.load(path, model=model)
    assert {device for device, _ in model[2].seen} <= {"meta"}
    assert model[2].seen or name == "tucker"
    again.resize_(again.sizes[-1])
    assert again(x).shape == (16, 10)


class Choosy(nn.Module):
    """Cannot run where there are no numbers."""

    def forward(self, x):
        return x if float(x.sum()) > -1e30 else -x


@pytest.mark.parametrize("name", ["width", "scratch", "slimmable", "us-net"])
def test_a_model_that_needs_numbers_is_tried_on_a_small_input_only(name, tmp_path):
    net, x = made(name)
    path = tmp_path / "net.safetensors"
    net.save(path)
    model = build()
    model[2] = Choosy()
    assert lab.load(path, model=model)(x).shape == (16, 10)
    claiming(net, path, [3, 512, 512])
    with pytest.raises(ArtifactError, match="it does not go with this model"):
        lab.load(path, model=model)


class Shifted(nn.Module):
    """Has a buffer that no file holds."""

    def __init__(self, value):
        super().__init__()
        self.register_buffer("shift", torch.tensor([value]), persistent=False)

    def forward(self, x):
        return x + self.shift


@pytest.mark.parametrize("name", NAMES)
def test_buffers_that_a_file_does_not_hold_are_the_models(name, tmp_path):
    net, x = made(name)
    net.save(tmp_path / "net.safetensors")
    model = build()
    model[6] = nn.Sequential(nn.Flatten(), Shifted(0.0))
    other = build()
    other[6] = nn.Sequential(nn.Flatten(), Shifted(1e3))
    same, far = (lab.load(tmp_path / "net.safetensors", model=m)(x) for m in (model, other))
    torch.testing.assert_close(same, net(x))
    assert (far - same).abs().max() > 1
