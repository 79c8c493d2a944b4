import copy
import dataclasses
import itertools
import math
import pickle
import re
import threading
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from decomposable import DecomposedNet, RankPlan, decompose, load, models
from decomposable.core.factors import Taylor
from decomposable.core.standin import StandIn
from decomposable_edge.errors import (
    ArtifactError,
    BudgetError,
    DecomposableError,
    InvalidArgumentError,
    NonFiniteError,
    UnsupportedModelError,
)
from decomposable_edge.sizing.latency import LatencyProfile, TimedSize, timed_now
from decomposable_edge.sizing.profiles import Sample
from refusals import Saying, refused

pytestmark = pytest.mark.filterwarnings("ignore:batch normalisation still has")

few = settings(max_examples=12, deadline=None, derandomize=True)
FORMS = ["spatial", "channel"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# Models to decompose


def mlp():
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 16, bias=False), nn.Tanh(), nn.Linear(16, 5))


def cnn():
    """Batch normalisation, dropout, a stride, a bias and a linear layer, for images of 3 × 8 × 8."""
    return nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1, bias=False),
        nn.BatchNorm2d(10),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Conv2d(10, 12, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(192, 7),
    )


def odd_paddings():
    return nn.Sequential(
        nn.Conv2d(3, 8, (2, 5), padding="same"),
        nn.Conv2d(8, 8, (5, 3), padding=(4, 0), dilation=(2, 1), padding_mode="circular"),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, stride=(1, 2), padding=(1, 2), padding_mode="reflect", bias=False),
        nn.Conv2d(6, 6, 4, padding="same", padding_mode="replicate"),
        nn.Conv2d(6, 9, 1, stride=2),
    )


def depthwise():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 12, 1),
        nn.Conv2d(12, 12, 3, groups=3),
        nn.ConvTranspose2d(12, 4, 2, stride=2, groups=4),
    )


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(10, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.outward = nn.Linear(16, 3)

    def forward(self, x):
        x = self.inward(x)
        return self.outward(x + self.attention(x, x, x, need_weights=False)[0])


class Shared(nn.Module):
    """Two layers with one weight and biases of their own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(9, 9), nn.Linear(9, 9)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Tied(nn.Module):
    """A language model's head that is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.hidden(self.embedding(tokens)))


class Listed(nn.Module):
    """Runs its blocks from a plain list."""

    def __init__(self):
        super().__init__()
        self.blocks = []
        for i in range(3):
            block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
            self.add_module(f"block{i}", block)
            self.blocks.append(block)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


IMAGE, VECTOR = (2, 3, 8, 8), (4, 12)
MODELS = {
    "mlp": (mlp, VECTOR),
    "cnn": (cnn, IMAGE),
    "odd paddings": (odd_paddings, IMAGE),
    "depthwise": (depthwise, IMAGE),
    "transformer": (encoder, (2, 5, 16)),
    "attention": (Attending, (2, 5, 10)),
    "shared weight": (Shared, (3, 9)),
    "tied embedding": (Tied, None),
    "blocks in a list": (Listed, (3, 8)),
    "one linear layer": (lambda: nn.Linear(8, 6), (3, 8)),
    "one convolution": (lambda: nn.Conv2d(3, 6, 3), IMAGE),
}


def make(kind):
    """A model in eval mode, with batch normalisation statistics that matter, and an input."""
    build, shape = MODELS[kind]
    model = with_statistics_(build()).eval()
    return model, torch.randint(0, 11, (2, 6)) if shape is None else torch.randn(shape)


def with_statistics_(model):
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
    return model


# What the tests compare with, computed in another way


def flops_per_sample(model, x):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return counter.get_total_flops() / len(x)


def effective_weight(layer):
    """The one weight that a layer stands for, be it dense or a pair."""
    if not isinstance(layer, nn.Sequential):
        return layer.weight.detach().numpy()
    first, second = (part.weight.detach().numpy() for part in layer)
    if first.ndim == 2:
        return second @ first
    both = np.einsum("orac,ribd->oiabcd", second, first)
    (o, i, h2, h1, w2, w1) = both.shape
    return both.reshape(o, i, h2 * h1, w2 * w1)


def truncated(weight, rank, form):
    """numpy's best approximation of the weight by `rank` bases."""
    w = weight.detach().double().numpy()
    if w.ndim == 2 or form == "channel" or w.shape[2:] == (1, 1):
        u, s, vt = np.linalg.svd(w.reshape(len(w), -1), full_matrices=False)
        return ((u[:, :rank] * s[:rank]) @ vt[:rank]).reshape(w.shape)
    o, i, height, width = w.shape
    u, s, vt = np.linalg.svd(w.transpose(1, 3, 0, 2).reshape(i * width, o * height), full_matrices=False)
    low = (u[:, :rank] * s[:rank]) @ vt[:rank]
    return low.reshape(i, width, o, height).transpose(2, 0, 3, 1)


def parameters_of(module):
    return sum(p.numel() for p in module.parameters())


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


# decompose: the model stays as it is


def everything_of(model):
    """All that `decompose` could spoil, as values or identities."""
    return {
        "tensors": [(name, t.clone()) for name, t in model.state_dict().items()],
        "places": [(name, id(t), t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()],
        "grads": [(p.requires_grad, id(p.grad)) for p in model.parameters()],
        "modules": [(name, id(m), m.training) for name, m in model.named_modules()],
        "hooks": [
            (list(m._forward_hooks.values()), list(m._forward_pre_hooks.values()), list(m._backward_hooks.values()))
            for m in model.modules()
        ],
    }


def assert_same(now, before):
    for (name, a), (other, b) in zip(now.pop("tensors"), before.pop("tensors"), strict=True):
        assert name == other
        assert torch.equal(a, b)
    assert now == before


@pytest.mark.parametrize("is_training", [True, False])
def test_decompose_leaves_the_model_untouched(is_training):
    model, x = cnn().train(is_training), torch.randn(IMAGE)
    model[0].weight.requires_grad_(False)
    model[4].register_forward_hook(lambda *_: None)
    model[7].register_forward_pre_hook(lambda *_: None)
    model[2].eval()
    before = everything_of(model)
    net = decompose(model, x)
    net.resize_(macs=0.4)
    net(x)
    net.extract()
    assert_same(everything_of(model), before)


def test_nothing_is_shared_with_the_model():
    model = cnn()
    net = decompose(model, torch.randn(IMAGE))
    mine = {storage(t) for t in model.state_dict().values()}
    for budget in (1.0, 0.4):
        net.resize_(macs=budget)
        assert not mine & {storage(t) for t in net.state_dict().values()}


def test_training_the_model_further_changes_nothing_in_the_network():
    model, x = make("cnn")
    net = decompose(model, x)
    before = net(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    net.resize_(macs=0.5)
    net.resize_(macs=1.0)
    assert torch.equal(net(x), before)


def test_decompose_draws_no_random_numbers():
    model = cnn()
    state = torch.get_rng_state()
    decompose(model, torch.zeros(IMAGE)).resize_(macs=0.5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("has_example", [True, False])
def test_decompose_returns_an_evaluating_network(is_training, has_example):
    model = cnn().train(is_training)
    model[1].train(not is_training)
    flags = [module.training for module in model.modules()]
    net = decompose(model, torch.randn(IMAGE) if has_example else None)
    assert net.training is False
    for size in (1.0, 0.4):
        net.resize_(params=size)
        assert not any(module.training for module in [*net.modules(), *net.extract().modules()])
    assert [module.training for module in model.modules()] == flags


def test_one_image_alone_is_classified_as_in_a_batch():
    """In training mode, batch normalisation would take the statistics of whatever the batch is."""
    model, x = with_statistics_(cnn()).train(), torch.randn(IMAGE)
    net = decompose(model, x)
    for size in (1.0, 0.4):
        net.resize_(macs=size)
        torch.testing.assert_close(net(x[:1]), net(x)[:1])


def test_train_works_on_what_decompose_returns():
    net = decompose(cnn().eval(), torch.randn(IMAGE)).train()
    net.resize_(macs=0.4)
    assert all(module.training for module in [*net.modules(), *net.extract().modules()])


def test_it_starts_at_full_size():
    model, x = make("cnn")
    net = decompose(model, x)
    assert net.plan().is_full
    assert net.plan().ratio == 1.0
    assert net.plan().ranks == net.plan().full_ranks == {"0": 9, "4": 30, "7": 7}
    assert (net.plan().macs, net.plan().params) == (flops_per_sample(model, x) / 2, parameters_of(model))
    assert net.plan().macs == net.plan().full_macs
    assert net.plan().params == net.plan().full_params


def test_the_form_is_spatial_by_default():
    net = decompose(nn.Conv2d(4, 6, (3, 5)), torch.randn(1, 4, 9, 9))
    net.resize_(ranks={"": 2})
    assert [layer.kernel_size for layer in net.module] == [(1, 5), (3, 1)]


def test_the_channel_form_on_request():
    net = decompose(nn.Conv2d(4, 6, (3, 5)), torch.randn(1, 4, 9, 9), form="channel")
    net.resize_(ranks={"": 2})
    assert [layer.kernel_size for layer in net.module] == [(3, 5), (1, 1)]


@pytest.mark.parametrize(
    ("kind", "skipped"),
    [
        ("mlp", {}),
        ("depthwise", {"1": "depthwise", "3": "grouped", "4": "grouped"}),
        ("attention", {"attention": "products of two activations"}),
        ("tied embedding", {"embedding": "Embedding: only convolutions", "head": "tied to embedding 'embedding'"}),
    ],
)
def test_layers_left_alone_are_listed_with_the_reason(kind, skipped):
    model, x = make(kind)
    net = decompose(model, x)
    assert list(net.skipped) == list(skipped)
    assert all(reason in net.skipped[name] for name, reason in skipped.items())
    assert not set(net.skipped) & set(net.plan().ranks)


def test_filter_fn_leaves_layers_alone():
    net = decompose(mlp(), filter_fn=lambda module, name: module.out_features > 5)
    assert list(net.plan().ranks) == ["0", "2"]
    assert list(net.skipped) == ["4"]
    assert "filter_fn" in net.skipped["4"]


def test_layers_left_alone_run_as_they_are_at_every_size():
    model, x = make("depthwise")
    net = decompose(model, x)
    net.resize_(ratio=0.2)
    assert all(torch.equal(net.module[i].weight, model[i].weight) for i in (1, 3, 4))


def test_a_shared_weight_is_decomposed_once():
    net = decompose(Shared(), torch.randn(2, 9))
    assert list(net.plan().ranks) == ["a"]
    net.resize_(ratio=0.3)
    assert net.module.a[0].weight is net.module.b[0].weight
    assert net.module.a[1].bias is not net.module.b[1].bias


# Full size is the original


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", MODELS)
def test_full_size_computes_what_the_model_does_after_any_number_of_resizes(kind, form):
    model, x = make(kind)
    net = decompose(model, x, form=form)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(net(x), expected, atol=1e-4, rtol=0)
        for ratio in np.random.default_rng(0).uniform(0.05, 1, 15):
            net.resize_(ratio=ratio)
            assert net(x).shape == expected.shape
        net.resize_(macs=1.0)
        torch.testing.assert_close(net(x), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(net.extract()(x), expected, atol=1e-4, rtol=0)


@few
@given(sizes=st.lists(st.tuples(st.sampled_from(["macs", "params", "ratio"]), st.floats(0.3, 1)), max_size=20))
def test_ups_and_downs_leave_no_trace(sizes):
    torch.manual_seed(0)
    model, x = make("cnn")
    net, fresh = decompose(model, x), decompose(model, x)
    for measure, value in [*sizes, ("ratio", 0.4)]:
        net.resize_(**{measure: value})
    fresh.resize_(ratio=0.4)
    assert torch.equal(net(x), fresh(x))
    net.resize_(params=1.0)
    torch.testing.assert_close(net(x), model(x), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("resnet20", "spatial"),
        ("resnet20", "channel"),
        pytest.param("vgg15", "channel", marks=pytest.mark.slow),
        pytest.param("resnet50", "spatial", marks=pytest.mark.slow),
    ],
)
def test_the_models_of_the_zoo(name, form):
    model, x = with_statistics_(models.build(name)).eval(), torch.randn(2, 3, 32, 32)
    net = decompose(model, x, form=form)
    assert net.skipped == {}
    assert net.not_counted == {}
    with torch.no_grad():
        expected, scale = model(x), model(x).abs().max()
        for budget in (0.25, 0.6, 1.0):
            plan = net.resize_(macs=budget)
            assert plan.macs <= budget * plan.full_macs
            assert flops_per_sample(net, x) == 2 * plan.macs
            assert parameters_of(net) == plan.params
        torch.testing.assert_close(net(x) / scale, expected / scale, atol=1e-4, rtol=0)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_transformer_encoders_in_eval_and_train_mode(is_training, nested):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).train(is_training)
    x, mask = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 3:] = True
    net = decompose(model, x).train(is_training)

    def output(network):
        torch.manual_seed(1)  # the same dropout masks
        with torch.no_grad():
            return network(x, src_key_padding_mask=mask)[~mask]

    expected = output(model)
    torch.testing.assert_close(output(net), expected, atol=1e-4, rtol=0)
    net.resize_(ratio=0.1)
    assert not torch.allclose(output(net), expected, atol=1e-2)  # it is the two factors that run
    torch.testing.assert_close(output(net.extract()), output(net), atol=1e-5, rtol=0)


def test_a_compiled_model_is_decomposed_as_the_model_it_compiles():
    model, x = make("cnn")
    net = decompose(torch.compile(model, backend="eager"), x)
    assert list(net.plan().ranks) == ["0", "4", "7"]
    torch.testing.assert_close(net(x), model(x), atol=1e-4, rtol=0)
    net.resize_(macs=0.4)
    assert all(type(m).__name__ != "OptimizedModule" for m in net.modules())


def test_a_compiled_child_is_decomposed_too():
    model, x = make("cnn")
    outer = nn.Sequential(torch.compile(model, backend="eager"), nn.ReLU())
    net = decompose(outer, x)
    assert list(net.plan().ranks) == ["0.0", "0.4", "0.7"]
    torch.testing.assert_close(net(x), model(x).relu(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ratio", [0.2, 0.4, 0.7, 1.0])
def test_a_channels_last_model_stays_so_at_every_size(form, ratio):
    model = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3)).eval()
    model, x = model.to(memory_format=torch.channels_last), torch.randn(2, 8, 12, 12)
    x = x.to(memory_format=torch.channels_last)
    net = decompose(model, x, form=form)
    net.resize_(ratio=ratio)
    assert net(x).is_contiguous(memory_format=torch.channels_last)
    for module in (net, net.extract()):
        weights = [p for p in module.parameters() if p.dim() == 4]
        assert all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)


@pytest.mark.parametrize("form", FORMS)
def test_a_float64_model_is_decomposed_in_float64(form):
    model, x = make("cnn")
    model, x = model.double(), x.double()
    net = decompose(model, x, form=form)
    net.resize_(ranks={"0": 5, "4": 7, "7": 4})
    for name, rank in net.plan().ranks.items():
        assert_truncated(net, model, name, rank, form, atol=1e-10)
    net.resize_(macs=1.0)
    torch.testing.assert_close(net(x), model(x), atol=1e-10, rtol=0)


def test_a_model_called_with_keywords_and_several_outputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x, *, scale):
            return {"y": self.a(x) * scale, "scale": scale}

    model, x = Two(), torch.randn(3, 6)
    net = decompose(model, (x, 2.0), forward=lambda net, batch: net(batch[0], scale=batch[1]))
    assert net.plan().macs == 36
    torch.testing.assert_close(net(x, scale=3.0)["y"], model(x, scale=3.0)["y"])


# resize_: counts


@st.composite
def small_cnns(draw):
    channels = draw(st.lists(st.integers(1, 9), min_size=2, max_size=4))
    layers = []
    for inputs, outputs in zip([3, *channels], channels, strict=False):
        mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
        layers.append(
            nn.Conv2d(
                inputs,
                outputs,
                kernel_size=draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
                stride=draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
                padding=draw(st.tuples(st.integers(0, 1), st.integers(0, 1))),
                bias=draw(st.booleans()),
                padding_mode=mode,
            )
        )
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels[-1], 5))


@few
@given(
    model=small_cnns(),
    form=st.sampled_from(FORMS),
    batch=st.integers(1, 3),
    size=st.tuples(st.sampled_from(["macs", "params", "ratio"]), st.floats(0.01, 1)),
)
def test_the_plan_states_what_the_network_and_its_extract_cost(model, form, batch, size):
    x = torch.randn(batch, 3, 24, 20)
    net = decompose(model, x, form=form)
    try:
        plan = net.resize_(**dict([size]))
    except BudgetError:
        plan = net.plan()  # still the full one
    assert net.plan() is plan
    small = net.extract()
    assert flops_per_sample(net, x) == flops_per_sample(small, x) == 2 * plan.macs
    assert parameters_of(small) == parameters_of(net) == plan.params
    assert plan.ratio == sum(plan.ranks.values()) / sum(plan.full_ranks.values())


@pytest.mark.parametrize("kind", ["depthwise", "shared weight", "odd paddings", "blocks in a list", "one linear layer"])
@pytest.mark.parametrize("form", FORMS)
def test_the_plan_counts_layers_left_alone_and_shared_weights(kind, form):
    model, x = make(kind)
    net = decompose(model, x, form=form)
    for ratio in (1.0, 0.6, 0.2):
        plan = net.resize_(ratio=ratio)
        assert flops_per_sample(net, x) == flops_per_sample(net.extract(), x) == 2 * plan.macs
        assert parameters_of(net.extract()) == plan.params


@few
@given(measure=st.sampled_from(["macs", "params"]), fraction=st.floats(0.25, 1), form=st.sampled_from(FORMS))
def test_a_budget_is_respected_and_stated_as_fraction_or_count_alike(measure, fraction, form):
    torch.manual_seed(0)
    model, x = make("cnn")
    net = decompose(model, x, form=form)
    total = getattr(net.plan(), measure)
    plan = net.resize_(**{measure: fraction})
    assert getattr(plan, measure) <= fraction * total
    assert net.resize_(**{measure: int(fraction * total)}).ranks == plan.ranks


@pytest.mark.parametrize("measure", ["macs", "params", "ratio"])
@pytest.mark.parametrize("whole", [1, 1.0, np.float32(1), np.int64(1)])
def test_one_is_the_whole_network(measure, whole):
    assert decompose(mlp(), torch.randn(VECTOR)).resize_(**{measure: whole}).is_full


def brute_force(model, budget, per_rank, dense, form):
    """Bases added one by one, largest singular value first, as long as the network fits the budget."""
    sigmas = {}
    for name in per_rank:
        w = model.get_submodule(name).weight.detach().double().numpy()
        if w.ndim == 4 and form == "spatial":
            w = w.transpose(1, 3, 0, 2).reshape(w.shape[1] * w.shape[3], -1)
        sigmas[name] = np.linalg.svd(w.reshape(len(w), -1), compute_uv=False)
    order = sorted(((s, name) for name, values in sigmas.items() for s in values), reverse=True)
    best = None
    for length in range(len(order) + 1):
        counts = {name: max(1, sum(n == name for _, n in order[:length])) for name in per_rank}
        is_dense = {n: r * per_rank[n] > dense[n] or r == len(sigmas[n]) for n, r in counts.items()}
        cost = sum(dense[n] if is_dense[n] else r * per_rank[n] for n, r in counts.items())
        if cost <= budget:
            best = {n: len(sigmas[n]) if is_dense[n] else r for n, r in counts.items()}
    return best


@few
@given(fraction=st.floats(0.2, 1), form=st.sampled_from(FORMS))
def test_a_mac_budget_takes_the_longest_prefix_that_fits(fraction, form):
    torch.manual_seed(0)
    model, x = make("cnn")  # 8 × 8 pixels, then 4 × 4
    net = decompose(model, x, form=form)
    per_rank = {"channel": {"0": 64 * (27 + 10), "4": 16 * (90 + 12)}}
    per_rank["spatial"] = {"0": 64 * (9 + 30), "4": 8 * 4 * 30 + 16 * 36}
    dense = {"0": 64 * 270, "4": 16 * 1080, "7": 192 * 7}
    expected = brute_force(model, fraction * sum(dense.values()), {**per_rank[form], "7": 192 + 7}, dense, form)
    if expected is None:
        with refused("macs", fraction, kind=BudgetError):
            net.resize_(macs=fraction)
    else:
        assert net.resize_(macs=fraction).ranks == expected


@few
@given(fraction=st.floats(0.3, 1))
def test_a_parameter_budget_takes_the_longest_prefix_that_fits(fraction):
    torch.manual_seed(0)
    model, _ = make("mlp")
    net = decompose(model)
    dense = {"0": 240, "2": 320, "4": 80}
    budget = fraction * (640 + 25) - 25  # the biases are always there
    expected = brute_force(model, budget, {"0": 32, "2": 36, "4": 21}, dense, "channel")
    assert net.resize_(params=fraction).ranks == expected


@pytest.mark.parametrize("measure", ["macs", "params", "ratio"])
def test_plans_are_nested(measure):
    net = decompose(cnn(), torch.randn(IMAGE))
    plans = [net.resize_(**{measure: value}) for value in np.linspace(0.3, 1, 40)]
    for smaller, larger in itertools.pairwise(plans):
        assert all(smaller.ranks[name] <= larger.ranks[name] for name in larger.ranks)
        assert smaller.params <= larger.params or measure == "macs"


@pytest.mark.parametrize("measure", ["macs", "params"])
def test_under_a_budget_a_layer_is_dense_with_its_full_rank_or_cheaper_as_two_factors(measure):
    model, x = make("cnn")
    net = decompose(model, x)
    for budget in (0.35, 0.6, 0.85):
        plan = net.resize_(**{measure: budget})
        for name, rank in plan.ranks.items():
            is_pair = isinstance(net.module.get_submodule(name), nn.Sequential)
            assert is_pair == (name not in plan.dense) == (rank < plan.full_ranks[name])
            if not is_pair:
                assert torch.equal(net.module.get_submodule(name).weight, model.get_submodule(name).weight)


def test_the_plan_is_immutable_and_prints_as_a_table():
    plan = decompose(cnn(), torch.randn(IMAGE)).resize_(macs=0.5)
    assert isinstance(plan, RankPlan)
    with pytest.raises(AttributeError):
        plan.macs = 1
    with pytest.raises(TypeError):
        plan.ranks["0"] = 1
    rows = str(plan).splitlines()
    assert [row.split()[0] for row in rows[1:4]] == ["0", "4", "7"]
    assert f"{plan.macs:,} MACs" in rows[-1]


def test_limits_and_min_rank_hold_at_every_size():
    net = decompose(cnn(), torch.randn(IMAGE), min_rank=2, limits={"4": (5, 11)})
    for ratio in (0.01, 0.5, 1.0):
        ranks = net.resize_(ratio=ratio).ranks
        assert 5 <= ranks["4"] <= 11
        assert min(ranks.values()) >= 2


@pytest.mark.parametrize("criterion", ["energy", "uniform", lambda sigma: sigma / sigma.max()])
def test_other_criteria_choose_other_ranks_within_the_same_budget(criterion):
    model, x = make("cnn")
    plan = decompose(model, x, criterion=criterion).resize_(macs=0.4)
    assert plan.macs <= 0.4 * plan.full_macs
    assert plan.ranks != decompose(model, x).resize_(macs=0.4).ranks


# resize_: what is computed


def assert_truncated(net, model, name, rank, form, atol=1e-5):
    expected = truncated(model.get_submodule(name).weight, rank, form)
    np.testing.assert_allclose(effective_weight(net.module.get_submodule(name)), expected, atol=atol)


@few
@given(model=small_cnns(), form=st.sampled_from(FORMS), ratio=st.floats(0.01, 1))
def test_a_ratio_is_taken_literally_and_gives_the_truncated_weights(model, form, ratio):
    net = decompose(model, torch.randn(1, 3, 24, 20), form=form)
    plan = net.resize_(ratio=ratio)
    kept = round(ratio * sum(plan.full_ranks.values()))
    raised = sum(rank == 1 for rank in plan.ranks.values())
    assert kept <= sum(plan.ranks.values()) <= kept + raised
    for name, rank in plan.ranks.items():
        assert_truncated(net, model, name, rank, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rank", [1, 4, 11, 12, 13, 17, 22, 23, 24])
def test_ranks_are_taken_literally_whether_dense_or_factored(form, rank):
    model = nn.Sequential(nn.Conv2d(8, 24 if form == "channel" else 8, 3, stride=2, padding=1), nn.ReLU())
    net = decompose(model, torch.randn(1, 8, 8, 8), form=form)
    plan = net.resize_(ranks={"0": rank})
    assert plan.ranks == {"0": rank}
    assert isinstance(net.module[0], nn.Conv2d) == ("0" in plan.dense)
    assert plan.macs <= plan.full_macs  # dense where two factors would cost more
    assert_truncated(net, model, "0", rank, form)


def test_layers_not_named_in_ranks_stay_full():
    model, x = make("mlp")
    plan = decompose(model, x).resize_(ranks={"2": 3})
    assert plan.ranks == {"0": 12, "2": 3, "4": 5}
    assert plan.ratio == 20 / 33


def test_ranks_of_an_earlier_plan_give_that_size_again():
    model, x = make("cnn")
    net = decompose(model, x)
    plan = net.resize_(macs=0.5)
    expected = net(x)
    net.resize_(macs=1.0)
    assert net.resize_(ranks=plan.ranks) == plan
    assert torch.equal(net(x), expected)


# resize_: what is refused


A_BUDGET = "a fraction in (0, 1] as a float, or an absolute count as an int"


@pytest.mark.parametrize(
    ("size", "option", "came", "allowed"),
    [
        ({}, "size", "none", "exactly one of macs, params, ratio or ranks"),
        ({"macs": 0.5, "params": 0.5}, "size", "macs, params", "exactly one of macs, params, ratio or ranks"),
        *(({"macs": wrong}, "macs", wrong, A_BUDGET) for wrong in (0, -0.5, 1.5, True, math.nan)),
        ({"params": "0.5"}, "params", "0.5", A_BUDGET),
        ({"ratio": 0.0}, "ratio", 0.0, "a number in (0, 1]"),
        ({"ratio": 2}, "ratio", 2, "a number in (0, 1]"),
        ({"ranks": {"9": 1}}, "ranks", "9", "'0', '4', '7'"),
        *(({"ranks": {"0": wrong}}, "ranks", wrong, "an int, 1 to 9") for wrong in (0, 10, 2.0)),
        ({"ranks": [1, 2, 3]}, "ranks", [1, 2, 3], Saying("^ranks by layer name")),
    ],
)
def test_a_wrong_size_is_refused_and_the_network_keeps_its_own(size, option, came, allowed):
    net = decompose(cnn(), torch.randn(IMAGE))
    plan, module = net.resize_(macs=0.5), net.module
    with refused(option, came, allowed, layer="0" if allowed == "an int, 1 to 9" else None):
        net.resize_(**size)
    assert net.plan() is plan
    assert net.module is module


def test_sizes_are_given_by_keyword_only():
    with pytest.raises(InvalidArgumentError) as caught:
        decompose(mlp()).resize_(0.5)
    assert (caught.value.option, caught.value.came) == ("plan", "float")


@pytest.mark.parametrize("measure", ["macs", "params"])
def test_an_impossible_budget_states_the_smallest_possible_one(measure):
    net = decompose(cnn(), torch.randn(IMAGE))
    with refused(measure, 0.001, kind=BudgetError) as caught:
        net.resize_(**{measure: 0.001})
    smallest = int(re.search(r"\(([\d,]+) of", caught.value.allowed).group(1).replace(",", ""))
    plan = net.resize_(**{measure: smallest})
    assert getattr(plan, measure) == smallest
    assert set(plan.ranks.values()) == {1}
    with refused(measure, smallest - 1, kind=BudgetError):
        net.resize_(**{measure: smallest - 1})


@pytest.mark.parametrize("measure", ["macs", "params"])
def test_the_smallest_fraction_stated_is_possible(measure):
    for width in range(5, 12):
        net = decompose(nn.Sequential(nn.Linear(width, 13), nn.ReLU(), nn.Linear(13, width)), torch.randn(1, width))
        with refused(measure, 0.001, kind=BudgetError) as caught:
            net.resize_(**{measure: 0.001})
        net.resize_(**{measure: caught.value.smallest})
        net.resize_(**{measure: float(re.match(r"(0\.\d+) of", caught.value.allowed).group(1))})


def test_without_an_example_macs_are_refused_and_everything_else_works():
    model, x = make("cnn")
    net = decompose(model)
    with refused("macs", 0.5, Saying("example_input")):
        net.resize_(macs=0.5)
    assert net.resize_(params=0.5).params <= 0.5 * parameters_of(model)
    assert net.resize_(ratio=0.5).macs is None
    assert net.resize_(ranks={"4": 3}).ranks["4"] == 3
    assert "MACs" not in f"{net.plan()} {net!r}"
    assert net(x).shape == (2, 7)
    assert parameters_of(net.extract()) == net.plan().params


@pytest.mark.parametrize(
    ("arguments", "option", "came", "allowed"),
    [
        ({"form": "diagonal"}, "form", "diagonal", "'channel', 'spatial', 'tucker'"),
        ({"criterion": "enrgy"}, "criterion", "enrgy", Saying("'energy'")),
        ({"min_rank": 0}, "min_rank", 0, "an int of at least 1"),
        ({"limits": {"conv*": (1, 2)}}, "limits", "conv*", "a pattern that matches a layer"),
        ({"filter_fn": lambda *_: False}, "model", Saying("rejected by filter_fn"), Saying("one Linear")),
    ],
)
def test_wrong_options_are_refused(arguments, option, came, allowed):
    with refused(option, came, allowed):
        decompose(mlp(), **arguments)


@pytest.mark.parametrize("model", [3, torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))], ids=["int", "scripted"])
def test_what_is_no_module_is_refused(model):
    with refused("model", kind=UnsupportedModelError):
        decompose(model)


def test_a_weight_with_nan_is_refused_by_name():
    model = mlp()
    model[2].weight.data[3, 4] = float("nan")
    with refused("weight", kind=NonFiniteError, layer="2"):
        decompose(model)


# Memory


def test_the_first_factors_of_all_sizes_share_memory():
    net = decompose(cnn(), torch.randn(IMAGE))
    net.resize_(ratio=0.2)
    small = [net.module[i][0].weight for i in (0, 4, 7)]
    net.resize_(ratio=0.3)
    larger = [net.module[i][0].weight for i in (0, 4, 7)]
    assert all(storage(a) == storage(b) for a, b in zip(small, larger, strict=True))


def test_the_second_factors_of_convolutions_are_contiguous_so_that_inference_copies_nothing():
    net = decompose(cnn(), torch.randn(IMAGE))
    net.resize_(ratio=0.2)
    assert all(part.weight.is_contiguous(memory_format=torch.channels_last) for i in (0, 4) for part in net.module[i])


def test_dense_layers_of_all_sizes_are_one():
    net = decompose(cnn(), torch.randn(IMAGE))
    full = net.module[0].weight
    net.resize_(ranks={"4": 2})
    assert net.module[0].weight is full


class Allocations(TorchDispatchMode):
    """Adds up the bytes of new tensors that operations return."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and all(
            storage(result) != storage(a) for a in args if isinstance(a, torch.Tensor)
        ):
            self.total += result.nbytes
        return result


@pytest.mark.parametrize("form", FORMS)
def test_a_resize_allocates_no_more_than_the_second_factors_and_the_bn_buffers(form):
    net = decompose(cnn(), torch.randn(IMAGE), form=form)
    with Allocations() as allocations:
        net.resize_(ratio=0.2)
    second = sum(net.module[i][1].weight.nbytes for i in (0, 4))
    assert 0 < allocations.total <= second + sum(b.nbytes for b in net.module[1].buffers())


# extract


def reduced(**size):
    model, x = make("cnn")
    net = decompose(model, x)
    net.resize_(**(size or {"ratio": 0.3}))
    return net, x


@pytest.mark.parametrize("size", [{"ratio": 0.3}, {"ratio": 0.7}, {"macs": 0.6}, {"macs": 1.0}])
def test_extract_computes_what_the_network_does_in_plain_layers(size):
    net, x = reduced(**size)
    small = net.extract()
    torch.testing.assert_close(small(x), net(x), atol=1e-6, rtol=0)
    plain = {nn.Sequential, StandIn, nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.ReLU, nn.Dropout, nn.Flatten}
    assert {type(module) for module in small.modules()} <= plain
    assert all(type(p) is nn.Parameter for p in small.parameters())


@pytest.mark.parametrize("size", [{"ratio": 0.3}, {"macs": 1.0}])
def test_extract_shares_no_memory_with_the_network(size):
    net, x = reduced(**size)
    before = net(x)
    small = net.extract()
    assert not {storage(t) for t in small.state_dict().values()} & {storage(t) for t in net.state_dict().values()}
    with torch.no_grad():
        for tensor in small.state_dict().values():
            tensor.add_(1)
    assert torch.equal(net(x), before)
    net.resize_(macs=1.0)
    net.resize_(**size)
    assert torch.equal(net(x), before)


def test_a_resize_changes_nothing_in_what_was_extracted():
    net, x = reduced()
    small = net.extract()
    before = small(x)
    net.resize_(macs=1.0)
    net.to(torch.bfloat16)
    assert torch.equal(small(x), before)


def test_extract_keeps_nothing_but_its_own_bytes_in_memory():
    small = reduced()[0].extract()
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in small.state_dict().values())


def test_extract_is_as_trainable_as_the_model_was():
    model, x = make("cnn")
    model[4].weight.requires_grad_(False)
    model[7].bias.requires_grad_(False)
    net = decompose(model, x)
    for size in ({"ratio": 0.3}, {"macs": 1.0}):
        net.resize_(**size)
        flags = {name: p.requires_grad for name, p in net.extract().named_parameters()}
        frozen = {name for name, flag in flags.items() if not flag}
        pairs = {"4.0.weight", "4.1.weight", "7.1.bias"}
        assert frozen == (pairs if size == {"ratio": 0.3} else {"4.weight", "7.bias"})
    assert not any(p.requires_grad for p in net.parameters())


def test_a_single_layer_that_is_frozen_in_part_is_extracted_so():
    linear = nn.Linear(8, 6)
    linear.bias.requires_grad_(False)
    net = decompose(linear)
    net.resize_(ratio=0.3)
    flags = {name: p.requires_grad for name, p in net.extract().named_parameters()}
    assert flags == {"0.weight": True, "1.weight": True, "1.bias": False}


def test_extract_can_be_trained():
    net, x = reduced()
    small, target = net.extract(), torch.tensor([1, 5])
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(small(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None for p in small.parameters())
    assert losses[-1] < 0.8 * losses[0]


def test_extract_keeps_weights_shared_and_tied():
    shared = decompose(Shared(), torch.randn(2, 9))
    shared.resize_(ratio=0.3)
    small = shared.extract()
    assert small.a[0].weight is small.b[0].weight
    tied = decompose(Tied())
    tied.resize_(ratio=0.3)
    small = tied.extract()
    assert small.head.weight is small.embedding.weight


def test_a_state_dict_goes_from_one_extract_to_another_of_the_same_plan():
    net, x = reduced()
    small, other = net.extract(), net.extract()
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.mul_(1.5)
    other.load_state_dict(small.state_dict())
    assert torch.equal(other(x), small(x))


def test_the_training_mode_is_that_of_the_network():
    net, _ = reduced()
    assert not any(module.training for module in net.extract().modules())
    assert all(module.training for module in net.train().extract().modules())


# Threads


def test_a_forward_pass_in_another_thread_sees_one_size_only():
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)).eval()
    x, ratios = torch.randn(4, 16), (0.2, 0.4, 1.0)
    net = decompose(model, x)
    references = []
    for ratio in ratios:
        net.resize_(ratio=ratio)
        references.append(net(x))
    assert not any(torch.allclose(a, b, atol=1e-3) for a, b in itertools.pairwise(references))
    done, answers, errors = threading.Event(), [], []

    def ask():
        try:
            with torch.no_grad():
                while not done.is_set():
                    answers.append(net(x))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for i in range(400):
        net.resize_(ratio=ratios[i % 3])
    done.set()
    for thread in threads:
        thread.join()
    assert not errors
    matches = [[torch.allclose(y, r, atol=1e-6) for r in references] for y in answers]
    assert all(sum(match) == 1 for match in matches)
    assert torch.tensor(matches).any(0).all()  # every size was met, so the test has tested something


def test_several_threads_may_resize_at_once():
    net, x = reduced()
    sizes = [0.1, 0.3, 0.6, 1.0]
    threads = [threading.Thread(target=lambda s=s: [net.resize_(ratio=s) for _ in range(40)]) for s in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert flops_per_sample(net, x) == 2 * net.plan().macs


# Copies, casts, modes


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"]
)
def test_a_copy_is_equal_independent_and_can_be_resized(duplicate):
    net, x = reduced()
    twin = duplicate(net)
    assert twin.plan() == net.plan()
    assert twin.skipped == net.skipped
    assert torch.equal(twin(x), net(x))
    before = net(x)
    twin.resize_(macs=1.0)
    assert torch.equal(net(x), before)
    net.resize_(macs=1.0)
    torch.testing.assert_close(twin(x), net(x))
    with torch.no_grad():
        for tensor in twin.state_dict().values():
            tensor.zero_()
    net.resize_(ratio=0.3)
    assert torch.equal(net(x), before)


def test_a_copy_keeps_the_calibration():
    net, x = reduced()
    net.calibrate_([torch.randn(16, 3, 8, 8)], sizes=[0.4, 0.8])
    twin = copy.deepcopy(net)
    assert twin.resize_(macs=0.4) == net.resize_(macs=0.4)
    assert torch.equal(twin(x), net(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_cast_holds_for_this_size_and_those_to_come(dtype):
    net, x = reduced()
    small = net(x)
    full = net.resize_(macs=1.0) and net(x)
    net.resize_(ratio=0.3)
    assert net.to(dtype) is net
    tolerance = 1e-5 if dtype == torch.float64 else 0.1
    for size, expected in [({"ratio": 0.3}, small), ({"macs": 1.0}, full), ({"ratio": 0.3}, small)]:
        assert all(p.dtype == dtype for p in net.parameters())
        y = net(x.to(dtype))
        assert y.dtype == dtype
        net.resize_(**size)
        torch.testing.assert_close(net(x.to(dtype)).float(), expected, atol=tolerance, rtol=tolerance)


def test_a_cast_reaches_the_calibrated_statistics():
    net, x = reduced()
    net.calibrate_([torch.randn(16, 3, 8, 8)], sizes=[0.4])
    net.resize_(macs=0.4)
    expected = net(x)
    net.double()
    net.resize_(macs=1.0)
    net.resize_(macs=0.4)
    assert net.module[1].running_mean.dtype == torch.float64
    torch.testing.assert_close(net(x.double()).float(), expected, atol=1e-5, rtol=1e-5)


def test_a_bfloat16_model_is_decomposed():
    model, x = make("cnn")
    model, x = model.bfloat16(), x.bfloat16()
    net = decompose(model, x)
    assert torch.equal(net(x), model(x))
    assert net.resize_(macs=0.5).macs > 0
    assert net(x).dtype == torch.bfloat16


def test_channels_last_holds_for_the_sizes_to_come():
    net, _ = reduced()
    net.to(memory_format=torch.channels_last)
    net.resize_(ratio=0.2)
    assert all(part.weight.is_contiguous(memory_format=torch.channels_last) for part in net.module[4])


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("size", [{"ratio": 0.3}, {"ratio": 0.7}, {"macs": 1.0}])
def test_train_and_eval_hold_for_the_sizes_to_come(mode, size):
    net, _ = reduced()
    net.train(not mode).train(mode)
    net.resize_(**size)
    assert all(module.training == mode for module in net.modules())


def test_a_pass_in_training_mode_leaves_the_other_sizes_alone():
    net, x = reduced(macs=1.0)
    before = net(x)
    net.train()
    net(x)
    net.resize_(ratio=0.3)
    net(x)
    net.eval()
    net.resize_(macs=1.0)
    assert torch.equal(net(x), before)


def test_a_parent_module_moves_casts_and_switches_it():
    net, x = reduced()
    parent = nn.Sequential(net, nn.Softmax(-1)).double().train()
    net.resize_(ratio=0.2)
    assert net.training
    assert parent(x.double()).dtype == torch.float64


def test_a_resize_in_inference_mode_does_not_spoil_gradients_afterwards():
    net, x = reduced()
    with torch.inference_mode():
        net.resize_(ratio=0.2)
    x.requires_grad_(True)
    net(x).sum().backward()
    assert x.grad is not None


def test_gradients_reach_the_input():
    net, x = reduced()
    x.requires_grad_(True)
    net(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(net.extract()(x).sum(), x)[0])


def test_a_state_dict_is_refused_and_changes_nothing():
    net, x = reduced()
    expected, plan = net(x), net.plan()
    with pytest.raises(InvalidArgumentError, match="load_state_dict"):
        net.load_state_dict({name: 2 * value for name, value in net.state_dict().items()})
    net.resize_(macs=1.0)
    net.resize_(plan)
    torch.testing.assert_close(net(x), expected, rtol=0, atol=0)


# Hooks, module, repr


@pytest.mark.parametrize("size", [{"ratio": 0.3}, {"ratio": 0.7}, {"macs": 1.0}])
def test_hooks_on_a_decomposed_layer_still_run(size):
    model, x = make("cnn")
    seen = []
    model[4].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model[4].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    net = decompose(model, x)
    net.resize_(**size)
    seen.clear()
    net(x)
    assert seen == [(2, 10, 8, 8), (2, 12, 4, 4)]


def test_a_hook_may_change_the_output_of_a_decomposed_layer():
    model, x = make("mlp")
    model[4].register_forward_hook(lambda module, args, output: output + 100)
    net = decompose(model, x)
    net.resize_(ratio=0.3)
    assert net(x).min() > 50


def test_hooks_on_the_network_itself_outlive_a_resize():
    net, x = reduced()
    seen = []
    net.register_forward_hook(lambda *_: seen.append(1))
    net.resize_(ratio=0.2)
    net(x)
    assert seen == [1]


def test_module_is_the_network_at_the_current_size():
    net, x = reduced()
    small = net.module
    assert torch.equal(small(x), net(x))
    net.resize_(macs=1.0)
    assert net.module is not small
    assert torch.equal(net.module(x), net(x))
    assert [name for name, _ in net.named_children()] == ["module"]
    assert parameters_of(net) == net.plan().params


def test_the_repr_is_short_and_tells_the_size():
    net, _ = reduced(macs=0.5)
    text = repr(net)
    for part in ("DecomposedNet", "3 layers decomposed", "0 left alone", f"{net.plan().macs_fraction:.3f}x MACs"):
        assert part in text
    assert f"{net.plan().params_fraction:.3f}x parameters" in text
    assert len(text.splitlines()) <= 6


def test_a_criterion_from_data_is_accepted():
    model, x = make("cnn")
    net = decompose(model, x, criterion=Taylor([x], lambda net, batch: net(batch).square().mean()))
    assert net.resize_(macs=0.5).macs <= 0.5 * net.plan().full_macs


def test_decompose_inside_inference_mode_gives_a_network_that_can_be_trained_after_extract():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)).eval()
    x = torch.randn(2, 1, 8, 8)
    with torch.inference_mode():
        net = decompose(model, example_input=torch.randn(1, 1, 8, 8))
        net.resize_(ratio=1.0)
    small = net.extract()
    small(x).sum().backward()
    assert small[0].weight.grad is not None


def test_a_named_tuple_batch_reaches_forward_as_it_is():
    Batch = namedtuple("Batch", ["image", "label"])
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.BatchNorm1d(5))
    batch = Batch(torch.randn(4, 1, 3, 3), torch.zeros(4))
    net = decompose(model, example_input=batch, forward=lambda net, b: net(b.image))
    report = net.calibrate_([batch], sizes=[0.5, 1.0])
    assert report.batches == 1


class Views(nn.Module):
    """Calls `.view` on a feature map, which no other layout than the usual one allows."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(2, 8, 3), nn.Linear(8 * 36, 3)

    def forward(self, x):
        return self.fc(self.conv(x).view(len(x), -1))


def is_channels_last(weight):
    return weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def test_factors_are_laid_out_with_channels_last_on_a_cpu():
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    net = decompose(model, example_input=torch.zeros(1, 2, 8, 8))
    net.resize_(ranks={"0": 2, "2": 2})
    x = torch.randn(3, 2, 8, 8)
    assert is_channels_last(net.module[2][0].weight)
    torch.testing.assert_close(net(x), net.extract().to(memory_format=torch.contiguous_format)(x))


def test_a_model_that_calls_view_on_a_feature_map_keeps_the_usual_layout():
    net = decompose(Views(), example_input=torch.zeros(1, 2, 8, 8))
    net.resize_(ranks={"conv": 2, "fc": 1})
    assert net(torch.randn(3, 2, 8, 8)).shape == (3, 3)
    assert net.module.conv[0].weight.is_contiguous()


def test_a_lazy_layer_needs_an_input():
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    with refused("model", "1.weight", Saying("an example_input")):
        decompose(model)
    net = decompose(model, example_input=torch.zeros(1, 4))
    assert "lazy layer" in net.skipped["1"]
    net.resize_(ratio=0.5)
    assert net(torch.zeros(3, 4)).shape == net.extract()(torch.zeros(3, 4)).shape == (3, 2)


# Ranks that the hardware likes, and times


def timed_profile(net, times, **more):
    """A profile of this network, as if it had been measured here."""
    sizes = []
    for size, milliseconds in times.items():
        plan = net.selector.of_size(size, align=more.get("align"))
        sizes.append(TimedSize.of(plan, Sample((milliseconds / 1e3,))))
    entry = timed_now(runtime="torch", batch=1, threads=torch.get_num_threads(), sizes=sizes, **more)
    return LatencyProfile.of(net.selector, [entry])


@pytest.mark.parametrize("size", [{"macs": 0.5}, {"params": 0.5}, {"ratio": 0.4}])
def test_ranks_are_rounded_to_multiples(size):
    model, x = make("cnn")
    net = decompose(model, x)
    plan = net.resize_(**size, align=4)
    assert plan == net.plan(**size, align=4)
    assert plan != net.plan(**size)
    factored = [name for name in plan.ranks if name not in plan.dense]
    assert factored
    assert all(plan.ranks[name] % 4 == 0 for name in factored)
    assert flops_per_sample(net, x) == 2 * plan.macs
    assert parameters_of(net) == plan.params
    assert [net.module.get_submodule(name)[0].out_channels for name in factored if name == "4"] == [plan.ranks["4"]]


def test_auto_is_within_nothing_of_unrounded_on_a_resnet20_at_every_size():
    """Its layers are narrow, and keep their ranks: the accuracy is the same because the network is."""
    net = decompose(models.resnet20(num_classes=10).eval(), torch.zeros(1, 3, 32, 32))
    for macs in np.arange(0.05, 1.001, 0.01).clip(max=1.0).tolist():
        plan = net.plan(macs=macs)
        assert (plan, plan.align) == (net.plan(macs=macs, align=1), "auto")


def test_auto_rounds_the_ranks_of_wide_layers_by_default():
    torch.manual_seed(0)
    x = torch.randn(1, 300)
    net = decompose(nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 20)), x)
    plain, auto = net.plan(macs=0.6, align=1), net.plan(macs=0.6, align="auto")
    assert net.resize_(macs=0.6, align=1) == plain
    assert net.resize_(macs=0.6) == net.resize_(macs=0.6, align=None) == auto
    assert plain.ranks["0"] % 4 != 0
    assert auto.ranks["0"] % 4 == 0
    assert abs(auto.ranks["0"] - plain.ranks["0"]) <= 0.05 * plain.ranks["0"] + 1  # and one that the budget may cost
    assert auto.macs <= 0.6 * auto.full_macs
    assert flops_per_sample(net, x) == 2 * auto.macs


def test_plans_of_smaller_budgets_are_contained_in_those_of_larger_ones_and_a_part_has_those_of_the_whole(tmp_path):
    """Also where ranks are rounded, which is the default; a part is what was loaded at a size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 700), nn.ReLU(), nn.Linear(700, 280), nn.ReLU(), nn.Linear(280, 20))
    net = decompose(model, torch.randn(1, 300))
    net.save(tmp_path / "net.safetensors")
    for way in ("macs", "params"):
        budgets = np.linspace(0.03, 1.0, 60).tolist()
        plans = [net.plan(**{way: budget}) for budget in budgets]
        for small, large in itertools.pairwise(plans):
            assert all(small.ranks[name] <= large.ranks[name] for name in small.ranks)
        for largest in (20, 35, 50):
            part = load(tmp_path / "net.safetensors", model=model, **{way: budgets[largest]})
            assert part.plan() == plans[largest]
            assert [part.plan(**{way: budget}) for budget in budgets[:largest]] == plans[:largest]


def test_telling_a_plan_changes_nothing_and_a_plan_that_was_told_can_be_taken():
    model, x = make("cnn")
    net = decompose(model, x)
    full = net.plan()
    told, module = net.plan(macs=0.5), net.module
    assert full.is_full
    assert (net.plan(), net.module) == (full, module)
    assert net.resize_(told) == net.plan() == told
    assert net.resize_(full) == net.plan() == full
    assert net.plan(align="auto") == full  # no size, and the default
    for wrong in ({"align": 8}, {"batch": 1}):
        with pytest.raises(InvalidArgumentError) as caught:
            net.plan(**wrong)
        assert (caught.value.option, caught.value.came) == ("size", "none")


def test_a_plan_is_given_alone_and_sizes_by_their_names():
    model, x = make("cnn")
    net = decompose(model, x)
    plan = net.plan(macs=0.5)
    for first, size, came in ((plan, {"macs": 0.5}, "a plan, macs"), (0.5, {}, "float")):
        with pytest.raises(InvalidArgumentError) as caught:
            net.resize_(first, **size)
        assert (caught.value.option, caught.value.came) == ("plan", came)
        assert caught.value.allowed == "a RankPlan alone, or a size by keywords, such as macs=0.25"
    with pytest.raises(InvalidArgumentError) as caught:
        net.resize_()
    assert (caught.value.option, caught.value.came) == ("size", "none")
    for function in (net.resize_, net.plan):
        with pytest.raises(TypeError) as caught:
            function(mac=0.5)
        assert (caught.value.option, caught.value.came) == ("mac", 0.5)
    assert net.plan().is_full
    for word in ("macs, params:", "ratio:", "ranks:", "latency_ms:", "align:", "batch:"):
        assert word in DecomposedNet.resize_.__doc__


def test_what_is_not_calibrated_is_a_field_of_the_plan_and_is_said_once():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).eval()
    net = decompose(model, torch.randn(4, 8))
    assert net.plan().warning is None  # the original
    told = net.plan(macs=0.6)  # without a word
    assert "calibrate_(loader)" in told.warning
    assert told == dataclasses.replace(told, warning=None)
    with pytest.warns(UserWarning, match="calibrate_") as caught:
        taken = net.resize_(told)
    assert [str(each.message) for each in caught] == [told.warning] == [taken.warning]
    assert caught[0].filename == __file__
    assert net.resize_(macs=0.5).warning == told.warning  # warnings are errors here
    net.calibrate_([torch.randn(32, 8)])
    assert net.plan().warning is net.plan(macs=0.6).warning is net.resize_(told).warning is None


def test_an_aligned_size_holds_the_best_approximation_of_its_ranks():
    model, x = make("cnn")
    net = decompose(model, x)
    plan = net.resize_(macs=0.5, align=4)
    expected = truncated(model[4].weight, plan.ranks["4"], "spatial")
    np.testing.assert_allclose(effective_weight(net.module[4]), expected, atol=1e-5)


def test_a_time_takes_the_largest_size_that_holds_it():
    net, _ = reduced()
    net.latency = timed_profile(net, {0.4: 2.0, 0.8: 4.0, 1.0: 5.0})
    low, high = (net.plan(macs=size).macs_fraction for size in (0.4, 0.8))
    assert net.resize_(latency_ms=3) == net.plan() == net.plan(macs=(low + high) / 2)
    assert net.resize_(latency_ms=2) == net.plan(macs=0.4)
    assert net.resize_(latency_ms=100).is_full
    with refused("latency_ms", 1, kind=BudgetError):
        net.resize_(latency_ms=1)
    assert net.plan().is_full


def test_the_measured_alignment_is_used():
    net, _ = reduced()
    net.latency = timed_profile(net, {0.5: 2.0, 1.0: 5.0}, align=4, trials=[(1, 1.0), (4, 0.9)])
    assert net.resize_(macs=0.6, align="measured") == net.plan(macs=0.6, align=4)
    assert net.resize_(latency_ms=2) == net.plan(macs=0.5, align=4)


@pytest.mark.parametrize("size", [{"latency_ms": 5}, {"macs": 0.5, "align": "measured"}])
def test_a_network_without_a_profile_says_how_to_get_one(size):
    net, _ = reduced()
    assert net.latency is None
    option = "align" if "align" in size else "latency_ms"
    with refused(option, size[option], Saying("decomposable bench")):
        net.resize_(**size)


def test_a_profile_of_another_network_is_refused():
    net, _ = reduced()
    other = decompose(cnn(), torch.randn(IMAGE), form="channel")
    net.latency = timed_profile(other, {0.5: 2.0, 1.0: 5.0})
    with refused("latency", "another network", kind=DecomposableError):
        net.resize_(latency_ms=5)


def test_the_profile_beside_a_file_is_read_when_it_is_needed(tmp_path):
    net, _ = reduced()
    net.latency_beside = tmp_path / "net.safetensors"
    assert net.latency is None
    beside = LatencyProfile.path_beside(net.latency_beside)
    beside.write_text("spoilt")
    net.resize_(macs=0.5)  # does not need it
    with refused(kind=ArtifactError, path=beside, reason=Saying("^not a latency profile")):
        net.resize_(latency_ms=5)
    profile = timed_profile(net, {0.5: 2.0, 1.0: 5.0})
    beside.unlink()
    profile.save(beside)
    assert net.latency == profile
    assert net.resize_(latency_ms=2) == net.plan(macs=0.5)
    net.latency = None
    assert net.latency is None


def test_a_size_can_be_extracted_that_is_not_current():
    net, x = reduced()
    current, plan = net.module, net.plan(macs=0.6)
    apart = net.extract(plan)
    assert net.module is current
    net.resize_(plan)
    assert torch.equal(apart(x), net(x))
    mine = {storage(t) for t in apart.state_dict().values()}
    assert not mine & {storage(t) for t in net.state_dict().values()}
    assert all(p.requires_grad for p in apart.parameters())


def test_a_plan_of_another_network_or_of_more_bases_is_refused(tmp_path):
    torch.manual_seed(0)
    net = decompose(models.small_cnn(), example_input=torch.zeros(1, 1, 8, 8))
    net.save(tmp_path / "net.safetensors")
    small = load(tmp_path / "net.safetensors", macs=0.4)
    before = small.plan()
    for use in (small.resize_, small.extract):
        with refused("plan", allowed=Saying("^an int, 1 to ")) as caught:
            use(net.plan(macs=0.8))
        assert caught.value.came == net.plan(macs=0.8).ranks[caught.value.layer] > before.ranks[caught.value.layer]
        for wrong in (decompose(models.small_cnn((8, 8))).plan(), decompose(models.small_cnn((12, 8))).plan(), "x"):
            with pytest.raises(InvalidArgumentError) as caught:
                use(wrong)
            assert caught.value.option == "plan"
    assert small.plan() == before


def test_what_is_extracted_in_inference_mode_can_be_trained():
    net = decompose(models.small_cnn(), example_input=torch.zeros(1, 1, 8, 8))
    with torch.inference_mode():
        net.resize_(macs=0.5)
        modules = [net.extract(), net.extract(net.plan(macs=0.4))]
    for module in modules:
        module.train()(torch.randn(4, 1, 8, 8)).sum().backward()
        assert all(p.grad is not None for p in module.parameters())


def test_only_a_profile_is_taken_for_one():
    net = decompose(models.small_cnn(), example_input=torch.zeros(1, 1, 8, 8))
    with refused("latency", "abc", "a LatencyProfile or None"):
        net.latency = "abc"
