import contextlib
import copy
import dataclasses
import json
import os
import re
import stat
import tracemalloc
from io import FileIO

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import decomposable as dn
from decomposable import decompose, models
from decomposable.commands.main import main
from decomposable.core import forms
from decomposable.core.factors import Taylor
from decomposable.network import decompose as decomposing
from decomposable.network.artifact import read, save_size, shrink, size_state_dict
from decomposable.network.file import container
from decomposable_edge.errors import (
    ArtifactError,
    BudgetError,
    DecomposableError,
    ModelNeededError,
)
from decomposable_edge.fields import values_in
from decomposable_edge.file import container as edge_container
from decomposable_edge.sizing.interpolation import choose_calibrated
from decomposable_edge.sizing.plans import SizeRequest
from refusals import Saying, refused

pytestmark = pytest.mark.filterwarnings("ignore:batch normalisation (still has|was calibrated)")

few = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# Models to save


def mlp():
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 16, bias=False), nn.Tanh(), nn.Linear(16, 5))


def cnn(classes=7):
    return nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1, bias=False),
        nn.BatchNorm2d(10),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Conv2d(10, 12, (3, 5), stride=2, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 8, 1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, classes),
    )


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Shared(nn.Module):
    """Two layers with one weight and biases of their own, one of them also under another name."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(9, 9), nn.Linear(9, 9)
        self.b.weight = self.a.weight
        self.again = self.b

    def forward(self, x):
        return self.again(self.b(torch.relu(self.a(x))))


class Twice(nn.Module):
    """One block of a convolution and a normalisation in two places."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Conv2d(3, 6, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.blocks = nn.ModuleList([self.block, nn.BatchNorm2d(6)])

    def forward(self, x):
        return self.blocks[1](self.blocks[0](self.block(self.inward(x))))


class Tied(nn.Module):
    """A language model whose head is its embedding, with a recurrent layer and a buffer that is not stored."""

    def __init__(self, positions=6):
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.head.weight = self.embedding.weight
        self.register_buffer("position", torch.linspace(0, 1, positions)[:, None], persistent=False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens):
        hidden = self.recurrent(self.embedding(tokens) + self.position * self.scale)[0]
        return self.head(self.hidden(hidden))


IMAGE = (2, 3, 8, 8)
MODELS = {
    "mlp": (mlp, (4, 12)),
    "cnn": (cnn, IMAGE),
    "transformer": (encoder, (2, 5, 16)),
    "shared": (Shared, (3, 9)),
    "twice": (Twice, IMAGE),
    "tied": (Tied, None),
    "one linear layer": (lambda: nn.Linear(8, 6), (3, 8)),
    "one convolution": (lambda: nn.Conv2d(3, 6, 3), IMAGE),
    "resnet20": (lambda: models.resnet20(num_classes=10, in_channels=1), (2, 1, 8, 8)),
}
LARGE = pytest.param("resnet20", marks=pytest.mark.slow)
with_normalisation = pytest.mark.parametrize("kind", ["cnn", "twice", LARGE])
every_kind = pytest.mark.parametrize("kind", [*(kind for kind in MODELS if kind != "resnet20"), LARGE])


def build(kind):
    return MODELS[kind][0]()


def batch(kind):
    shape = MODELS[kind][1]
    return torch.randint(0, 11, (2, 6)) if shape is None else torch.randn(shape)


def make(kind="cnn", *, calibrated=False, **options):
    """A decomposed network in eval mode, of weights and statistics that matter."""
    model = build(kind).eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
    net = decompose(model, **{"example_input": batch(kind), **options})
    if calibrated:
        measure = "params" if net.selector.fixed_macs is None else "macs"
        smallest = net.selector.smallest_cost(measure) / net.selector.full_cost(measure)
        net.calibrate_([batch(kind) for _ in range(2)], [smallest + (1 - smallest) * part for part in (0.3, 0.6, 0.9)])
    return net


def saved(net, tmp_path, kind="cnn", info=None):
    """The network after a way through a file."""
    net.save(tmp_path / "net.safetensors", info)
    return dn.load(tmp_path / "net.safetensors", model=build(kind))


SIZES = [{"ratio": 1.0}, {"ratio": 0.8}, {"ratio": 0.3}, {"params": 0.9}, {"params": 0.75}]


def sizes_of(net):
    """Sizes of every kind, those left out that this network is too small for."""
    names = [cost.name for cost in net.selector.costs]
    wanted = [*SIZES, {"ranks": {names[0]: 2}}, {"ranks": dict.fromkeys(names, 1)}]
    if net.selector.fixed_macs is not None:
        wanted += [{"macs": 0.93}, {"macs": 0.61}]
    for size in wanted:
        try:
            net.plan(**size)
        except BudgetError:
            continue
        yield size


def assert_equal(one, other, x):
    """The networks are equal now and at any size."""
    assert one.plan() == other.plan()
    assert one.training == other.training
    assert_same_tensors(one.module.state_dict(), other.module.state_dict())
    assert type(one.selector) is type(other.selector)
    assert one.selector.costs == other.selector.costs
    assert (one.selector.fixed_macs, one.selector.fixed_params) == (
        other.selector.fixed_macs,
        other.selector.fixed_params,
    )
    for name in ("lower", "upper", "order"):
        assert np.array_equal(getattr(one.selector, name), getattr(other.selector, name)), name
    assert all(map(np.array_equal, one.selector.scores, other.selector.scores))
    for name in ("skipped", "not_counted"):
        assert getattr(one, name) == getattr(other, name), name
    assert one._current.parts.layer_before_norm == other._current.parts.layer_before_norm
    for name in ("trainable", "norms"):
        assert getattr(one._original, name) == getattr(other._original, name), name
    for ours, theirs in zip(one._factors.items(), other._factors.items(), strict=True):
        assert ours[0] == theirs[0]
        assert_same_tensors(dict(enumerate(ours[1])), dict(enumerate(theirs[1])))
    assert_equal_statistics(one._statistics, other._statistics)
    assert [m.training for m in one._base.modules()] == [m.training for m in other._base.modules()]
    for size in sizes_of(one):
        assert one.resize_(**size) == other.resize_(**size)
        assert_same_tensors(one.module.state_dict(), other.module.state_dict())
        torch.manual_seed(1)
        expected = one(x)
        torch.manual_seed(1)
        assert torch.equal(expected, other(x)), size


def assert_same_tensors(ours, theirs):
    assert list(ours) == list(theirs)
    for key, tensor in ours.items():
        other = theirs[key]
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (other.dtype, other.shape, other.stride()), key
        assert torch.equal(tensor, other), key


def assert_equal_statistics(ours, theirs):
    assert (ours is None) == (theirs is None)
    for name in (field.name for field in dataclasses.fields(ours)) if ours is not None else ():
        value, other = getattr(ours, name), getattr(theirs, name)
        if name == "original":
            assert all(map(torch.equal, value, other))
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, other)
            assert value.dtype == other.dtype
        else:
            assert value == other, name


# The round trip


@every_kind
def test_what_is_loaded_equals_what_was_saved(kind, tmp_path):
    net = make(kind)
    loaded = saved(net, tmp_path, kind)
    assert type(loaded) is dn.DecomposedNet
    assert_equal(net, loaded, batch(kind))


@with_normalisation
def test_calibrated_statistics_come_back(kind, tmp_path):
    net = make(kind, calibrated=True)
    assert_equal(net, saved(net, tmp_path, kind), batch(kind))


def test_an_explicitly_calibrated_full_size_comes_back(tmp_path):
    net = make()
    net.calibrate_([batch("cnn")], sizes=[0.7, 1.0])
    loaded = saved(net, tmp_path)
    assert loaded._statistics.has_explicit_full
    assert_equal(net, loaded, batch("cnn"))


@pytest.mark.parametrize("size", [{"macs": 0.8}, {"ratio": 0.7}, {"ranks": {"4": 9, "0": 1}}])
def test_the_current_size_comes_back(size, tmp_path):
    net = make(calibrated=True)
    plan = net.resize_(**size)
    loaded = saved(net, tmp_path)
    x = batch("cnn")
    assert loaded.plan() == plan
    assert torch.equal(loaded(x), net(x))
    assert_equal(net, loaded, x)


def test_without_an_example_input(tmp_path):
    net = make(example_input=None)
    net.calibrate_([batch("cnn")], sizes=[0.8, 0.9])
    loaded = saved(net, tmp_path)
    assert loaded.plan().macs is None
    assert_equal(net, loaded, batch("cnn"))
    with refused("macs", 0.5, Saying("example_input")):
        loaded.resize_(macs=0.5)


@pytest.mark.slow
def test_vgg15(tmp_path):
    net = decompose(
        models.vgg15(num_classes=10).eval(),
        example_input=torch.randn(2, 3, 32, 32),
        filter_fn=lambda module, _: module.weight.numel() < 100_000,  # the others take seconds
    )
    net.save(tmp_path / "net.safetensors")
    loaded = dn.load(tmp_path / "net.safetensors", model=models.vgg15(num_classes=10))
    x = torch.randn(1, 3, 32, 32)
    for size in (1.0, 0.5):
        assert net.resize_(ratio=size) == loaded.resize_(ratio=size)
        assert torch.equal(net(x), loaded(x))


@pytest.mark.parametrize("form", ["spatial", "channel"])
@pytest.mark.parametrize("criterion", ["energy", lambda sigma: np.arange(len(sigma)) * 1.0])
def test_the_order_of_the_criterion_comes_back(form, criterion, tmp_path):
    net = make(form=form, criterion=criterion, min_rank=2, limits={"4": (2, 6)})
    assert_equal(net, saved(net, tmp_path), batch("cnn"))


def test_the_order_of_taylor_comes_back(tmp_path):
    criterion = Taylor([batch("cnn")], lambda model, x: model(x).square().mean())
    net = make(criterion=criterion)
    assert_equal(net, saved(net, tmp_path), batch("cnn"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["cnn", "mlp", "tied"])
def test_other_types_come_back(kind, dtype, tmp_path):
    net = make(kind, calibrated=True).to(dtype)
    x = batch(kind)
    assert_equal(net, saved(net, tmp_path, kind), x.to(dtype) if x.is_floating_point() else x)


def test_channels_last_comes_back(tmp_path):
    net = make()
    assert any(not f[-1].is_contiguous() for f in net._factors.values())
    net = net.to(memory_format=torch.channels_last)
    loaded = saved(net, tmp_path)
    weight = loaded.module.get_submodule("4").weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    assert_equal(net, loaded, batch("cnn").contiguous(memory_format=torch.channels_last))


def test_modes_and_frozen_parameters_come_back(tmp_path):
    model = cnn()
    model[1].requires_grad_(False)
    model[4].weight.requires_grad_(False)
    net = decompose(model, example_input=batch("cnn")).train()
    net._base[1].eval()
    loaded = saved(net, tmp_path)
    assert loaded.training
    assert not loaded.module[1].training
    assert loaded.module[0].training
    loaded.resize_(ratio=0.3), net.resize_(ratio=0.3)
    flags = {name: p.requires_grad for name, p in loaded.extract().named_parameters()}
    assert flags == {name: p.requires_grad for name, p in net.extract().named_parameters()}
    assert not flags["1.weight"]
    assert flags["4.1.bias"]
    assert not flags["4.0.weight"]
    assert_equal(net, loaded, batch("cnn"))


def test_nothing_is_decomposed_at_load(tmp_path, monkeypatch):
    make().save(tmp_path / "net.safetensors")

    def refuse(*_, **__):
        raise AssertionError("an SVD")

    monkeypatch.setattr(decomposing, "decomposed", refuse)
    monkeypatch.setattr(forms, "svd", refuse)
    monkeypatch.setattr(torch.linalg, "svd", refuse)
    monkeypatch.setattr(torch.linalg, "eigh", refuse)
    assert dn.load(tmp_path / "net.safetensors", model=cnn()).plan().is_full


def test_saving_again_gives_the_same_bytes(tmp_path):
    net = make(calibrated=True)
    net.resize_(macs=0.8)
    net.save(tmp_path / "a", info={"b": 1, "a": [2, None]})
    dn.load(tmp_path / "a", model=cnn()).save(tmp_path / "b")
    read(tmp_path / "a").save(tmp_path / "c")
    net.save(tmp_path / "d", info={"b": 1, "a": [2, None]})
    content = (tmp_path / "a").read_bytes()
    assert all((tmp_path / name).read_bytes() == content for name in "bcd")


def test_a_loaded_network_can_be_calibrated_cast_and_copied(tmp_path):
    net, x = make(calibrated=True), batch("cnn")
    loaded = copy.deepcopy(saved(net, tmp_path))
    loader = [batch("cnn") for _ in range(2)]
    for one in (net, loaded):
        one.calibrate_(loader, sizes=[0.8])
        one.double()
    assert_equal(net, loaded, x.double())


def test_passes_in_training_mode_are_left_out_as_by_a_resize(tmp_path):
    net = make()
    net.train()(batch("cnn"))
    loaded = saved(net, tmp_path)
    net.resize_(ratio=1.0)
    assert_equal(net.eval(), loaded.eval(), batch("cnn"))


def test_loading_in_inference_mode_gives_weights_that_can_be_trained(tmp_path):
    make().save(tmp_path / "net.safetensors")
    with torch.inference_mode():
        net = dn.load(tmp_path / "net.safetensors", model=cnn())
    small = net.extract()
    small(batch("cnn")).sum().backward()
    assert all(parameter.grad is not None for parameter in small.parameters())


# Info


def test_info_comes_back_and_stays(tmp_path):
    net = make("mlp")
    assert net.info == {}
    info = {"recipe": "digits", "settings": {"epochs": 3}, "table": [[0.5, 0.91]], "note": "é ∑", "none": None}
    loaded = saved(net, tmp_path, "mlp", info)
    assert loaded.info == info
    assert saved(loaded, tmp_path, "mlp").info == info
    assert saved(loaded, tmp_path, "mlp", {}).info == {}
    assert net.info == {}
    assert saved(net, tmp_path, "mlp", {"pair": (1, 2)}).info == {"pair": [1, 2]}


def test_info_that_is_set_stays_through_every_change_of_the_network(tmp_path):
    net = make("mlp")
    net.info = {"accuracy": 0.9}
    net.info["note"] = "mine"
    net.resize_(ratio=0.5)
    net.train().double()
    assert net.info == saved(net, tmp_path, "mlp").info == {"accuracy": 0.9, "note": "mine"}


@pytest.mark.parametrize("info", [{"x": object()}, {"x": float("nan")}, {"x": torch.zeros(1)}, [1], "text"])
def test_info_that_json_cannot_hold_is_refused(info, tmp_path):
    with refused("info") as caught:
        make("mlp").save(tmp_path / "net.safetensors", info)
    assert caught.value.came is info
    assert list(tmp_path.iterdir()) == []


def test_circular_info_is_refused(tmp_path):
    info = {}
    info["self"] = info
    with refused("info"):
        make("mlp").save(tmp_path / "net.safetensors", info)


# The model given


def test_the_given_model_is_not_changed(tmp_path):
    make().save(tmp_path / "net.safetensors")
    model = cnn().half().train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    net = dn.load(tmp_path / "net.safetensors", model=model)
    net.resize_(ratio=0.5)
    net.double()
    assert_same_tensors(before, model.state_dict())
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes
    ours = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert not ours & {tensor.data_ptr() for tensor in net.state_dict().values()}


def test_buffers_that_are_not_stored_come_from_the_model(tmp_path):
    net = make("tied")
    net.save(tmp_path / "net.safetensors")
    model = Tied()
    model.position.fill_(7)
    loaded = dn.load(tmp_path / "net.safetensors", model=model)
    assert (loaded.module.position == 7).all()
    assert loaded.module.position is not model.position
    assert loaded.half().module.position.dtype == torch.float16


def test_a_model_on_the_meta_device_is_enough(tmp_path):
    net = make("twice", calibrated=True)
    net.save(tmp_path / "net.safetensors")
    with torch.device("meta"):
        model = Twice()
    assert_equal(net, dn.load(tmp_path / "net.safetensors", model=model), batch("twice"))


def test_a_meta_buffer_that_the_file_does_not_hold_is_refused(tmp_path):
    make("tied").save(tmp_path / "net.safetensors")
    with torch.device("meta"):
        model = Tied()
    with refused("model", "position", "a model whose buffers have values"):
        dn.load(tmp_path / "net.safetensors", model=model)


def extended(model, name, module):
    model.add_module(name, module)
    return model


def replaced(index, module):
    model = cnn()
    model[index] = module
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: cnn(classes=9), "'weight' of layer '10' the file has a parameter of shape (7, 32), the model a"),
        (lambda: extended(cnn(), "11", nn.Linear(7, 7)), "layer '11' the file has nothing, the model a parameter of"),
        (lambda: cnn()[:10], "'weight' of layer '10' the file has a parameter of shape (7, 32), the model nothing"),
        (lambda: replaced(7, nn.Conv2d(12, 8, 3)), "layer '7' the file has a parameter of shape (8, 12, 1, 1), the"),
        (lambda: replaced(0, nn.Conv2d(3, 10, 3)), "'bias' of layer '0' the file has nothing, the model a parameter"),
        (lambda: replaced(5, nn.GroupNorm(1, 12)), "'running_mean' of layer '5' the file has a buffer of shape (12,)"),
        (lambda: replaced(10, nn.LazyLinear(7)), "the model a parameter of no shape yet"),
        (lambda: replaced(10, nn.Bilinear(1, 32, 7)), "layer '10'"),
        (lambda: models.resnet20(), "'weight' of layer '0' the file has a parameter of shape (10, 3, 3, 3), the model"),
    ],
)
def test_another_model_is_refused_with_the_first_layer_that_differs(model, message, tmp_path):
    net = make()
    for path in (tmp_path / "net.safetensors", tmp_path / "size.safetensors"):
        net.save(path) if path.stem == "net" else save_size(net, net.plan(ratio=0.8), path)
        with refused("model", Saying(re.escape(message))) as caught:
            dn.load(path, model=model())
        assert path.name in str(caught.value)


def test_a_layer_of_another_type_is_refused(tmp_path):
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.zeros(7, 32)), nn.Parameter(torch.zeros(7))

    make().save(tmp_path / "net.safetensors")
    with refused("model", Saying("a Linear, the model a Bag")):
        dn.load(tmp_path / "net.safetensors", model=replaced(10, Bag()))


def test_a_model_that_shares_what_the_file_does_not_is_refused(tmp_path):
    class Separate(Shared):
        def __init__(self):
            super().__init__()
            self.b.weight = nn.Parameter(torch.randn(9, 9))

    decompose(Separate()).save(tmp_path / "net.safetensors")
    with refused("model", Saying(r"'weight' of layer 'a'.* shares with another layer")):
        dn.load(tmp_path / "net.safetensors", model=Shared())


def test_a_model_that_does_not_share_is_made_to_share(tmp_path):
    class Separate(Shared):
        def __init__(self):
            super().__init__()
            self.b.weight = nn.Parameter(torch.randn(9, 9))

    net = make("shared")
    net.save(tmp_path / "net.safetensors")
    loaded = dn.load(tmp_path / "net.safetensors", model=Separate())
    assert loaded.module.a.weight is loaded.module.b.weight
    assert_equal(net, loaded, batch("shared"))


@pytest.mark.parametrize("info", [None, {"recipe": "digits"}])
def test_a_model_is_needed(info, tmp_path):
    make("mlp").save(tmp_path / "net.safetensors", info)
    with refused("model", Saying("net.safetensors holds weights"), kind=ModelNeededError):
        dn.load(tmp_path / "net.safetensors")


# What is stored


def test_the_first_bases_of_a_layer_are_one_slice_of_the_file(tmp_path):
    net = make()
    net.save(tmp_path / "net.safetensors")
    net.resize_(ranks={"4": 5, "10": 3})
    with safe_open(tmp_path / "net.safetensors", framework="pt") as file:
        for name, rank in {"4": 5, "10": 3}.items():
            first, second = (file.get_slice(f"{kind}/{name}")[:rank] for kind in ("first", "second"))
            pair = net.module.get_submodule(name)
            assert torch.equal(first, pair[0].weight)
            assert torch.equal(second.movedim(0, 1), pair[1].weight)


def test_tied_weights_are_stored_once(tmp_path):
    make("tied").save(tmp_path / "net.safetensors")
    with safe_open(tmp_path / "net.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert "state/embedding.weight" in names
    assert "state/head.weight" not in names
    loaded = dn.load(tmp_path / "net.safetensors", model=Tied())
    assert loaded.module.head.weight is loaded.module.embedding.weight
    assert len(list(loaded.parameters())) == len(list(Tied().parameters()))


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"steps": 3}

    def set_extra_state(self, state):
        pass


def renaming():
    model = mlp()
    model._register_state_dict_hook(lambda module, state, prefix, _: state.update(more=torch.zeros(1)))
    return model


def sparse():
    model = mlp()
    model.register_buffer("table", torch.eye(3).to_sparse())
    return model


def complex_numbers():
    model = mlp()
    model.register_buffer("table", torch.zeros(3, dtype=torch.complex64))
    return model


@pytest.mark.parametrize(
    ("model", "key"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 3), WithExtraState(3, 3)), "1._extra_state"),
        (renaming, "more"),
        (sparse, "table"),
        (complex_numbers, "table"),
    ],
)
def test_a_state_that_is_more_than_tensors_is_refused_at_save(model, key, tmp_path):
    net = decompose(model())
    with refused("model", key):
        net.save(tmp_path / "net.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "net.safetensors"
    make("mlp").save(path)
    before = path.read_bytes()

    def fail(file, *_):
        raise OSError("disk full")

    monkeypatch.setattr(edge_container, "FileIO", type("FileIO", (FileIO,), {"write": fail}))
    with pytest.raises(OSError, match="disk full"):
        make("mlp").save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_has_the_mode_of_any_other_file(tmp_path):
    old = os.umask(0o027)
    try:
        make("mlp").save(tmp_path / "net.safetensors")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "net.safetensors").stat().st_mode) == 0o640


def test_folders_are_made_and_text_is_a_path(tmp_path):
    path = str(tmp_path / "a" / "b" / "net.safetensors")
    make("mlp").save(path)
    assert dn.load(path, model=mlp()).plan().is_full
    assert read(path).plan.is_full


# One size


@every_kind
@pytest.mark.parametrize("calibrated", [False, True])
def test_a_size_has_the_state_dict_of_extract(kind, calibrated, tmp_path):
    net = make(kind, calibrated=calibrated)
    net.save(tmp_path / "net.safetensors")
    stored = read(tmp_path / "net.safetensors")
    for size in sizes_of(net):
        plan = net.resize_(**size)
        assert choose_calibrated(stored.selector, stored.statistics, SizeRequest(**size)) == plan
        assert_same_tensors(net.extract().state_dict(), size_state_dict(stored, plan))


@every_kind
def test_a_saved_size_is_a_plain_state_dict_and_loads_as_a_plain_module(kind, tmp_path):
    net, x, path = make(kind, calibrated=True), batch(kind), tmp_path / "size.safetensors"
    for size in sizes_of(net):
        plan = net.resize_(**size)
        extracted = net.extract()
        save_size(net, plan, path)
        plain = load_file(path)
        assert sorted(plain) == sorted(extracted.state_dict())
        assert all(torch.equal(plain[key], tensor) for key, tensor in extracted.state_dict().items())
        loaded = dn.load(path, model=build(kind))
        assert type(loaded) is type(extracted)
        assert_same_tensors(extracted.state_dict(), loaded.state_dict())
        assert {n: p.requires_grad for n, p in extracted.named_parameters()} == {
            n: p.requires_grad for n, p in loaded.named_parameters()
        }
        assert [m.training for m in extracted.modules()] == [m.training for m in loaded.modules()]
        assert torch.equal(loaded(x), extracted(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_size_of_another_type(dtype, tmp_path):
    net = make("tied").to(dtype)
    plan = net.resize_(ratio=0.4)
    save_size(net, plan, tmp_path / "size.safetensors")
    loaded = dn.load(tmp_path / "size.safetensors", model=Tied())
    assert_same_tensors(net.extract().state_dict(), loaded.state_dict())
    assert loaded.position.dtype == dtype


def test_a_loaded_size_can_be_trained(tmp_path):
    net, x = make(), batch("cnn")
    save_size(net, net.plan(ratio=0.4), tmp_path / "size.safetensors", info={"size": 0.4})
    module = dn.load(tmp_path / "size.safetensors", model=cnn()).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = [p.clone() for p in module.parameters()]
    module(x).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True) if a.numel() > 1)


def test_the_size_of_shared_layers_shares(tmp_path):
    net = make("shared")
    save_size(net, net.plan(ratio=0.3), tmp_path / "size.safetensors")
    module = dn.load(tmp_path / "size.safetensors", model=Shared())
    assert module.a[0].weight is module.b[0].weight
    assert module.again is module.b
    assert len(list(module.parameters())) == 4


def test_a_size_is_not_a_network(tmp_path):
    net = make("mlp")
    save_size(net, net.plan(), tmp_path / "size.safetensors")
    with refused(kind=ArtifactError, path=tmp_path / "size.safetensors", reason=Saying("one size only")):
        read(tmp_path / "size.safetensors")


def test_the_tensors_of_a_size_are_their_own(tmp_path):
    net = make()
    stored = net.artifact()
    x = batch("cnn")
    before = net(x)
    for tensor in size_state_dict(stored, stored.selector.plan_for(SizeRequest(ratio=0.6))).values():
        tensor.zero_()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    net.resize_(ratio=0.6)
    net.resize_(ratio=1.0)
    assert torch.equal(net(x), before)
    assert all(f[0].abs().sum() > 0 for f in net._factors.values())


@pytest.mark.parametrize("use", [lambda a, p: size_state_dict(a, p), lambda a, p: shrink(a, p)])
def test_a_plan_of_another_network_is_refused(use):
    stored = make("mlp").artifact()
    for plan in (make("cnn").plan(), {"0": 1}, None):
        with refused("plan", type(plan).__name__, "what its plan() returns"):
            use(stored, plan)


# A smaller artifact


def shrunk(net, tmp_path, kind="cnn", **size):
    """The network with a size as its largest, after a way through a file."""
    small = shrink(net.artifact(), net.plan(**size))
    small.save(tmp_path / "small.safetensors")
    return dn.load(tmp_path / "small.safetensors", model=build(kind))


@every_kind
@pytest.mark.parametrize("size", [{"params": 0.9}, {"ratio": 0.8}, {"ratio": 0.5}])
def test_a_shrunk_network_gives_the_same_outputs_at_its_sizes(kind, size, tmp_path):
    net, x = make(kind, calibrated=True), batch(kind)
    try:
        largest = net.resize_(**size)
    except BudgetError:
        pytest.skip("too small a network")
    small = shrunk(net, tmp_path, kind, **size)
    assert small.plan() == largest
    close(small(x), net(x))
    for below in sizes_of(net):
        plan = net.plan(**below)
        if all(plan.ranks[name] <= largest.ranks[name] for name in plan.ranks):
            assert small.resize_(**below) == net.resize_(**below)
            close(small(x), net(x))
            if not plan.dense:
                assert_same_tensors(weights_of(net), weights_of(small))


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def weights_of(net):
    return {k: t.contiguous() for k, t in net.extract().state_dict().items() if "running" not in k}


def test_no_size_is_above_the_largest(tmp_path):
    net = make(calibrated=True)
    largest = net.resize_(macs=0.8)
    small = shrunk(net, tmp_path, macs=0.8)
    for size in ({"macs": 1.0}, {"macs": 0.9}, {"macs": largest.macs}, {"ranks": {}}, {"ratio": 1.0}):
        plan = small.resize_(**size)
        assert plan.ranks == largest.ranks
    assert small.resize_(macs=1.0) == largest
    assert largest.macs_fraction <= 0.8
    assert small.plan().full_macs == net.plan().full_macs
    name, rank = next((n, r) for n, r in largest.ranks.items() if n not in largest.dense)
    with refused("ranks", rank + 1, f"an int, 1 to {rank}", layer=name):
        small.resize_(ranks={name: rank + 1})
    assert small.resize_(ranks={name: 1}).ranks == {**largest.ranks, name: 1}


def test_below_the_largest_sizes_are_chosen_as_before(tmp_path):
    net = make("resnet20")
    small = shrunk(net, tmp_path, "resnet20", macs=0.6)
    for macs in np.linspace(0.1, 0.6, 30):
        assert small.selector.plan_for(SizeRequest(macs=float(macs))) == net.selector.plan_for(
            SizeRequest(macs=float(macs))
        )
    with pytest.raises(BudgetError):
        small.resize_(macs=1e-6)


def test_a_shrunk_file_is_smaller(tmp_path):
    net = make("resnet20", calibrated=True)
    net.save(tmp_path / "net.safetensors")
    stored = read(tmp_path / "net.safetensors")
    files = [tmp_path / "net.safetensors"]
    for macs in (0.75, 0.5, 0.25):
        stored = shrink(stored, stored.selector.plan_for(SizeRequest(macs=macs)))
        files.append(tmp_path / f"{macs}.safetensors")
        stored.save(files[-1])
    bytes_ = [file.stat().st_size for file in files]
    assert bytes_ == sorted(bytes_, reverse=True)
    assert bytes_[-1] < 0.65 * bytes_[0]


def test_shrinking_in_steps_is_shrinking_at_once():
    net = make("resnet20", calibrated=True)
    whole = net.artifact()
    steps = shrink(whole, whole.selector.plan_for(SizeRequest(macs=0.8)))
    steps = shrink(steps, steps.selector.plan_for(SizeRequest(macs=0.5)))
    once = shrink(whole, whole.selector.plan_for(SizeRequest(macs=0.5)))
    assert steps.plan == once.plan
    for key in once.state:
        torch.testing.assert_close(steps.state[key], once.state[key], rtol=1e-4, atol=1e-5)
    for name in once.factors:
        assert_same_tensors(dict(enumerate(once.factors[name])), dict(enumerate(steps.factors[name])))


def test_shrinking_to_the_full_size_changes_nothing(tmp_path):
    net = make(calibrated=True, limits={"4": (1, 5)})
    net.resize_(ratio=0.5)
    small = shrunk(net, tmp_path, ranks={})
    assert small.plan().is_full
    net.resize_(ranks={})
    assert_equal(net, small, batch("cnn"))


def test_what_is_shrunk_cannot_grow(tmp_path):
    stored = make("mlp").artifact()
    small = shrink(stored, stored.selector.plan_for(SizeRequest(ratio=0.4)))
    layer, largest = next((name, rank) for name, rank in small.plan.ranks.items() if rank < stored.plan.ranks[name])
    for use in (size_state_dict, shrink):
        with refused("plan", stored.plan.ranks[layer], f"an int, 1 to {largest}", layer=layer):
            use(small, stored.plan)


def test_a_rank_below_the_limits_lowers_them(tmp_path):
    net = make(min_rank=3)
    small = shrunk(net, tmp_path, ranks={"4": 2})
    assert small.selector.lower.tolist() == [
        min(2 if cost.name == "4" else 3, cost.full_rank) for cost in net.selector.costs
    ]


@with_normalisation
def test_statistics_of_a_shrunk_network_are_those_that_its_sizes_need(kind, tmp_path):
    net = make(kind)
    net.calibrate_([batch(kind) for _ in range(2)], sizes=[0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0])
    largest = net.resize_(macs=0.78)
    small = shrunk(net, tmp_path, kind, macs=0.78)
    assert len(small._statistics.plans) < len(net._statistics.plans)
    smaller = [net.plan(macs=macs) for macs in (0.75, 0.72, 0.66, 0.55, 0.5)]
    for plan in (largest, *smaller):
        for name, pair in net._statistics.at(plan).items():
            assert all(map(torch.equal, pair, small._statistics.at(plan)[name]))


def test_a_shrunk_network_can_be_calibrated_again(tmp_path):
    net = make()
    small = shrunk(net, tmp_path, macs=0.8)
    assert small._statistics is None
    loader = [batch("cnn") for _ in range(2)]
    net.calibrate_(loader, sizes=[0.6, 0.8])
    assert small.calibrate_(loader).sizes > 2
    small.calibrate_(loader, sizes=[0.6, 0.8])
    for macs in (0.6, 0.8):
        net.resize_(macs=macs), small.resize_(macs=macs)
        x = batch("cnn")
        torch.testing.assert_close(net(x), small(x), rtol=1e-3, atol=1e-4)


def test_a_shrunk_network_round_trips(tmp_path):
    net = shrunk(make(calibrated=True), tmp_path, macs=0.8)
    loaded = saved(net, tmp_path)
    assert_equal(net, loaded, batch("cnn"))
    assert_equal(net.double(), saved(net, tmp_path), batch("cnn").double())


# Files that are damaged, or of something else


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A small network and a size of it, as bytes."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    net = make("shared")
    net.save(folder / "net", info={"a": 1})
    save_size(net, net.plan(ratio=0.4), folder / "size")
    return folder, (folder / "net").read_bytes(), (folder / "size").read_bytes()


DAMAGED = Saying("damaged.safetensors$")


def load_bytes(folder, content):
    (folder / "damaged.safetensors").write_bytes(content)
    return dn.load(folder / "damaged.safetensors", model=Shared())


@few
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), which=st.integers(1, 2))
def test_any_flipped_bit_is_found(files, place, bit, which):
    content = bytearray(files[which])
    content[int(place * len(content))] ^= 1 << bit
    with refused(kind=ArtifactError, path=DAMAGED):
        load_bytes(files[0], content)


def test_every_byte_of_the_header_is_covered(files):
    content = files[1]
    end = 8 + int.from_bytes(content[:8], "little")
    for place in range(0, end, 7):
        with refused(kind=ArtifactError, path=DAMAGED):
            load_bytes(files[0], content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


@few
@given(part=st.floats(0, 1, exclude_max=True), which=st.integers(1, 2))
def test_any_truncated_file_is_found(files, part, which):
    with refused(kind=ArtifactError, path=DAMAGED):
        load_bytes(files[0], files[which][: int(part * len(files[which]))])


@few
@given(content=st.binary(max_size=200))
def test_any_other_file_is_refused(files, content):
    with refused(kind=ArtifactError, path=DAMAGED):
        load_bytes(files[0], content)


def test_bytes_behind_the_end_are_found(files):
    with refused(kind=ArtifactError, path=DAMAGED):
        load_bytes(files[0], files[1] + b"\0")


def test_a_safetensors_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    for metadata, message in [
        (None, "^a safetensors file, but not one of this package"),
        ({"format": "pt"}, "not one of this package"),
        ({"decomposable": "{"}, "its description is not JSON"),
        ({"decomposable": "[]"}, "no format version"),
        ({"decomposable": "[" * 100_000}, "not JSON .too many levels"),
        ({"decomposable": '{"format": 3}'}, "no checksum"),
        ({"decomposable": '{"format": 2}'}, "its format is version 2, this package reads version 3; save the network"),
        ({"decomposable": '{"format": 4}'}, "its format is version 4, this package reads version 3; install a newer"),
        ({"decomposable": '{"format": 3, "format": 3}'}, "'format' is there twice"),
        ({"decomposable": '{"format": NaN}'}, "NaN is not a finite number"),
        ({"decomposable": '{"format": 1e999}'}, "1e999 is not a finite number"),
        ({"decomposable": '{"format": 3, "a": "\\ud800"}'}, "not JSON .*surrogates"),
        ({"decomposable": '{"format": ' + "9" * 5000 + "}"}, "not JSON"),
        ({"decomposable": '{"format": true}'}, "no format version"),
    ]:
        save_file({"x": torch.zeros(2)}, path, metadata=metadata)
        with refused(kind=ArtifactError, path=path, reason=Saying(message)):
            dn.load(path, model=mlp())


def test_a_file_that_is_absent_or_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        dn.load(tmp_path / "absent", model=mlp())
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with refused(kind=ArtifactError, path=path, reason="not an ordinary file"):
            read(path)


def test_a_header_that_claims_to_be_large_takes_no_memory(tmp_path):
    path = tmp_path / "large.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with refused(kind=ArtifactError, path=path, reason=Saying("^not a whole safetensors file")):
        read(path)
    header = b'{"x":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with refused(kind=ArtifactError, path=path, reason=Saying("^not a whole safetensors file")):
        read(path)


def _with_header(path, header):
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{" + b",".join(b'"%07d":{}' % i for i in range(1_100_000)) + b"}", "more than 1,000,000 values"),
        (b'{"__metadata__":{"decomposable":"' + b"[" * 1_500_000 + b'"}}', "more than 1,000,000 values"),
        (b'{"__metadata__":{"x":"' + b" " * 33_000_000 + b'"}}', "its header has 33,000,025 bytes; allowed: at most"),
    ],
    ids=["objects", "brackets", "text"],
)
def test_a_header_that_would_take_far_more_memory_than_the_file_is_refused(tmp_path, header, words):
    path = _with_header(tmp_path / "large.safetensors", header)
    tracemalloc.start()
    with refused(kind=ArtifactError, path=path, reason=Saying(words)):
        read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * path.stat().st_size


@pytest.mark.slow
def test_the_largest_header_that_is_read_takes_a_stated_multiple_of_the_file(tmp_path):
    """Just as many tensors, objects and numbers as are allowed: SECURITY.md says how much memory that is at most."""
    tensors = ",".join(f'"{i:06}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(70_000))
    rest = "{}," * ((990_000 - values_in(tensors)) // 2) + "{}"
    text = f'{{"sha256":"{"0" * 64}","format":3,"strides":{{}},"blocks":{{}},"x":[{rest}]}}'
    header = f'{{"__metadata__":{{"decomposable":{json.dumps(text)}}},{tensors}}}'.encode()
    path = _with_header(tmp_path / "large.safetensors", header)
    tracemalloc.start()
    with refused(kind=ArtifactError, path=path, reason=Saying("checksum")):
        read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * path.stat().st_size + 128_000_000


def test_more_notes_than_can_be_read_again_are_refused_when_they_are_saved(tmp_path):
    net = dn.decompose(mlp())
    with refused("info", allowed="16,000,000 bytes, 500,000 values"):
        net.save(tmp_path / "net.safetensors", info={"x": [0] * 600_000})
    assert not list(tmp_path.iterdir())


def rewritten(path, change_description=None, change_tensors=None):
    """The file with another content and the right checksum."""
    description, tensors = container.read_container(path)
    del description["sha256"], description["strides"]
    version = description.pop("format")
    assert version == container.FORMAT
    (change_description or (lambda d: None))(description)
    (change_tensors or (lambda t: None))(tensors)
    lying = path.with_name("lying.safetensors")
    container.write_container(lying, description, tensors)
    return lying


LIES = {
    "no layers": lambda d: d.update(layers=[]),
    "layers no list": lambda d: d.update(layers={}),
    "absurd rank in the plan": lambda d: d["plan"][0].__setitem__(0, 10**12),
    "rank zero in the plan": lambda d: d["plan"][0].__setitem__(0, 0),
    "text in the plan": lambda d: d["plan"][0].__setitem__(0, "3"),
    "full rank as factors": lambda d: d["plan"][0].__setitem__(1, False),
    "short plan": lambda d: d["plan"].pop(),
    "other form": lambda d: d["layers"][0].update(form="diagonal"),
    "form that does not fit": lambda d: d["layers"][-1].update(form="spatial"),
    "other shape": lambda d: d["layers"][0].update(shape=[10, 3, 5, 3]),
    "absurd shape": lambda d: d["layers"][0].update(shape=[2**40, 2**40, 3, 3]),
    "huge shape": lambda d: d["layers"][0].update(shape=[10**30, 3, 3, 3]),
    "negative shape": lambda d: d["layers"][0].update(shape=[10, -3, 3, 3]),
    "unknown layer": lambda d: d["layers"][0].update(name="nowhere", paths=["nowhere"]),
    "no paths": lambda d: d["layers"][0].update(paths=[]),
    "twice": lambda d: d["layers"].append(d["layers"][0]),
    "no MACs at all": lambda d: [d.update(fixed_macs=0), *(layer.update(dense_macs=0) for layer in d["layers"])],
    "negative cost": lambda d: d["layers"][0].update(dense_macs=-1),
    "absurd cost": lambda d: d["layers"][0].update(macs_per_rank=2**61),
    "cost as text": lambda d: d["layers"][0].update(dense_macs="1"),
    "no kind": lambda d: d.pop("kind"),
    "other kind": lambda d: d.update(kind="poem"),
    "a size": lambda d: d.update(kind="size"),
    "no info": lambda d: d.pop("info"),
    "info no object": lambda d: d.update(info=[1]),
    "training no flag": lambda d: d.update(training=1),
    "unknown type": lambda d: d.update(dtypes={"x": "float7"}),
    "state no object": lambda d: d.update(state=[]),
    "unknown key": lambda d: d["state"].update({"99.weight": {"trainable": True}}),
    "same as nothing": lambda d: d["state"]["0.weight"].update(same_as="nowhere"),
    "same as itself": lambda d: d["state"]["0.weight"].update(same_as="0.weight"),
    "integers trained": lambda d: d["state"]["1.num_batches_tracked"].update(trainable=True),
    "feeder": lambda d: d["layer_before_norm"].update({"1": "nowhere"}),
    "statistics of nothing": lambda d: d["statistics"].update(names=["0"]),
    "statistics dropped": lambda d: d.update(statistics=None),
    "statistics no object": lambda d: d.update(statistics=[1]),
    "fixed params": lambda d: d.update(fixed_params=None),
    "skipped": lambda d: d.update(skipped={"a": 1}),
}


@pytest.fixture(scope="module")
def cnn_file(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("cnn") / "net.safetensors"
    make(calibrated=True).save(path)
    return path


@pytest.mark.parametrize("lie", LIES)
def test_a_description_that_lies_is_refused(lie, cnn_file):
    path = rewritten(cnn_file, LIES[lie])
    with refused(kind=ArtifactError, path=path):
        dn.load(path, model=cnn())


class Idle(nn.Module):
    """Its layer has weights and does nothing."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return x


def test_a_network_without_macs_is_one_whose_macs_are_not_known(tmp_path):
    decompose(Idle(), example_input=torch.zeros(1, 6)).save(tmp_path / "net.safetensors")
    net = dn.load(tmp_path / "net.safetensors", model=Idle(), params=0.9)
    assert net.resize_(params=0.5).macs is None
    with refused("macs", 0.5, Saying("^params, ratio, ranks, or .*example_input")):
        net.resize_(macs=0.5)


def other(name, change):
    return lambda tensors: tensors.__setitem__(name, change(tensors[name]))


LYING_TENSORS = {
    "missing": lambda t: t.pop("first/0"),
    "missing state": lambda t: t.pop("state/0.weight"),
    "too many": lambda t: t.update(more=torch.zeros(1)),
    "shorter factor": other("second/0", lambda x: x[1:]),
    "both shorter than the limits": lambda t: t.update({f"{n}/0": t[f"{n}/0"][:2] for n in ("first", "second")}),
    "no bases": lambda t: t.update({f"{n}/0": t[f"{n}/0"][:0] for n in ("first", "second")}),
    "a number as factor": other("first/0", lambda x: x.sum()),
    "a flat factor": other("second/0", lambda x: x.flatten()),
    "integers as factor": other("first/0", lambda x: x.long()),
    "factors of another type": lambda t: t.update({f"{n}/0": t[f"{n}/0"].double() for n in ("first", "second")}),
    "scores out of order": other("scores/0", lambda x: x.flip(0)),
    "scores not numbers": other("scores/0", lambda x: x * torch.nan),
    "fewer scores": other("scores/0", lambda x: x[1:]),
    "scores of another type": other("scores/0", lambda x: x.float()),
    "limits": other("limits/upper", lambda x: x + 1000),
    "no lower limit": other("limits/lower", lambda x: x * 0),
    "ranks of statistics": other("statistics/ranks", lambda x: x + 10**9),
    "one rank of statistics": other("statistics/ranks", lambda x: x.sum()),
    "no ranks of statistics": other("statistics/ranks", lambda x: x[:0]),
    "dense flags of statistics": other("statistics/dense", lambda x: ~x),
    "positions": other("statistics/positions", lambda x: x.flip(0)),
    "positions not numbers": other("statistics/positions", lambda x: x * torch.nan),
    "means": other("statistics/mean", lambda x: x[:, 1:]),
    "original": other("statistics/original_var", lambda x: x.long()),
    "weight of another shape": other("state/0.weight", lambda x: x[1:]),
    "running mean": other("state/1.running_mean", lambda x: x[None]),
}


@pytest.mark.parametrize("lie", LYING_TENSORS)
def test_tensors_that_contradict_the_description_are_refused(lie, cnn_file):
    path = rewritten(cnn_file, change_tensors=LYING_TENSORS[lie])
    with refused(kind=ArtifactError, path=path):
        dn.load(path, model=cnn())


@pytest.mark.parametrize("strides", [[1], [0, 0, 0, 0], [-1, 1, 1, 1], [2**60] * 4, "text", [1, 1, 1, 1.5], [True] * 4])
def test_strides_that_lie_are_refused(strides, cnn_file, monkeypatch):
    description, tensors = container.read_container(cnn_file)
    dumps = json.dumps

    def lie(content, **options):
        return dumps({**content, "strides": {"first/0": strides}} if "blocks" in content else content, **options)

    path = cnn_file.with_name("lying.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(edge_container.json, "dumps", lie)
        container.write_container(
            path, {k: v for k, v in description.items() if k not in ("sha256", "format")}, tensors
        )
    with refused(kind=ArtifactError, path=path, reason=Saying("^tensor 'first/0'")):
        read(path)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.just(2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "0", "4", "1.weight", "spatial"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["0", "name", "rank"]), inner),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), which=st.sampled_from(["net", "size"]))
def test_any_other_description_loads_or_is_refused(files, data, which):
    def change(description):
        holder = description
        while True:
            key = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
            inner = holder[key]
            if isinstance(inner, dict | list) and inner and data.draw(st.booleans()):
                holder = inner
                continue
            if data.draw(st.booleans()):
                holder[key] = data.draw(json_values)
            else:
                del holder[key]
            return

    path = rewritten(files[0] / which, change)
    net = None
    with contextlib.suppress(DecomposableError):
        net = dn.load(path, model=Shared())
    if net is not None:
        net(batch("shared"))
        if which == "net":
            net.resize_(ratio=0.3)
            net.save(files[0] / "again.safetensors")


# --- from the command line -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["state-dict", "artifact"])
def test_resize_rounds_ranks(kind, tmp_path, capsys):
    path, out = tmp_path / "net.safetensors", tmp_path / "small.safetensors"
    x = torch.randn(8, 1, 12, 12)
    net = decompose(models.small_cnn((16, 24)).eval(), example_input=x[:1])
    net.calibrate_([x], sizes=[0.6, 0.8], align=4)
    net.save(path)
    assert main(["resize", str(path), "--macs", "0.7", "--align", "4", "-o", str(out), "--as", kind]) == 0
    assert "ranks rounded to multiples of 4" in capsys.readouterr().out
    plan = net.resize_(macs=0.7, align=4)
    assert plan != net.plan(macs=0.7)
    assert torch.equal(dn.load(out)(x), net(x))
    if kind == "artifact":
        assert read(out).plan == plan
        assert read(out).info["resized"] == "macs=0.7, align=4"


@pytest.mark.parametrize(
    ("align", "message"),
    [
        ("0", "argument --align: 0; allowed: an int of at least 1"),
        ("measured", "align='measured': there is no latency profile of this network"),
    ],
)
def test_resize_refuses_an_alignment(align, message, cnn_file, tmp_path, capsys):
    arguments = ["resize", str(cnn_file), "--macs", "0.7", "--align", align, "-o", str(tmp_path / "a.safetensors")]
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
