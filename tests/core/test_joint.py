import contextlib
import copy
import io
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import decomposable.core.forms as forms_module
import decomposable.core.lowrank as lowrank_module
from decomposable import JointObjective
from decomposable_edge.errors import DecomposableError, InvalidArgumentError, NonFiniteError, UnsupportedModelError

RATIO = 0.4


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# An independent statement of the method: dense weights, torch.linalg.svd and its own autograd, float64.


def as_matrix(weight: torch.Tensor, form: str) -> torch.Tensor:
    """The paper's matrix, transposed; in the spatial form the kernel's rows go with the output channels."""
    if form == "spatial" and weight.dim() == 4 and weight.shape[2:] != (1, 1):
        return weight.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    return weight.flatten(1)


def as_weight(matrix: torch.Tensor, like: torch.Tensor, form: str) -> torch.Tensor:
    if form == "spatial" and like.dim() == 4 and like.shape[2:] != (1, 1):
        out, into, height, width = like.shape
        return matrix.view(out, height, into, width).permute(0, 2, 1, 3)
    return matrix.view_as(like)


def truncated(weight: torch.Tensor, form: str, rank: int) -> torch.Tensor:
    u, s, vt = torch.linalg.svd(as_matrix(weight, form), full_matrices=False)
    return as_weight(u[:, :rank] * s[:rank] @ vt[:rank], weight, form)


def kernels(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    }


def expected_ranks(model: nn.Module, form: str, ratio: float, min_rank: int = 1) -> dict[str, int]:
    """All singular values of the network in one sorted list, of which the largest are kept."""
    sigmas = {n: torch.linalg.svdvals(as_matrix(w.detach().double(), form)) for n, w in kernels(model).items()}
    everything = sorted(((float(s), name) for name, sigma in sigmas.items() for s in sigma), reverse=True)
    kept = [name for _, name in everything[: round(ratio * len(everything))]]
    return {name: min(max(kept.count(name), min_rank), len(sigma)) for name, sigma in sigmas.items()}


def expected(model, closure, ranks: dict[str, int], form: str = "spatial", balance: float = 0.5):
    """The joint gradient of every trainable parameter, and the low-rank loss."""
    model = copy.deepcopy(model)
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    full = torch.autograd.grad(closure(copy_with(model, {})), list(trainable.values()), allow_unused=True)
    low_weights = {n: truncated(p, form, ranks[n]) for n, p in model.named_parameters() if n in ranks}
    low_loss = closure(copy_with(model, low_weights))
    low = torch.autograd.grad(low_loss, list(trainable.values()), allow_unused=True)
    mixed = {}
    for name, f, g in zip(trainable, full, low, strict=True):
        rebalanced = g * f.norm() / g.norm() if name in ranks else g
        mixed[name] = (1 - balance) * f + balance * rebalanced
    return mixed, low_loss.detach()


def copy_with(model: nn.Module, weights: dict[str, torch.Tensor]):
    """A function that calls the model with other weights, and buffers of its own."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return lambda *args: torch.func.functional_call(model, {**weights, **buffers}, args)


def spread_(model: nn.Module, form: str = "spatial", factor: float = 0.85) -> nn.Module:
    """Give every kernel singular values well apart from each other, so that nothing is clipped."""
    with torch.no_grad():
        for i, weight in enumerate(kernels(model).values()):
            u, s, vt = torch.linalg.svd(as_matrix(weight, form), full_matrices=False)
            sigma = (1 + 0.5 * i) * factor ** torch.arange(len(s), dtype=s.dtype)
            weight.copy_(as_weight(u * sigma @ vt, weight, form))
    return model


def assert_grads(model: nn.Module, gradients: dict[str, torch.Tensor], **tolerance) -> None:
    tolerance = tolerance or {"rtol": 1e-6, "atol": 1e-8}
    for name, parameter in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}")


def cnn(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, (3, 2), padding=1, padding_mode="circular"),
        nn.BatchNorm2d(8),
        nn.Tanh(),
        nn.Conv2d(8, 5, 1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(20, 4),
    ).to(dtype)


def mlp(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7, bias=False), nn.Tanh(), nn.Linear(7, 4)).to(dtype)


def images(dtype: torch.dtype = torch.float64, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 3, 9, 8, generator=generator, dtype=torch.float64).to(dtype)


def vectors(dtype: torch.dtype = torch.float64, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 6, generator=generator, dtype=torch.float64).to(dtype)


LABELS = torch.arange(6) % 4


def loss_on(x: torch.Tensor):
    return lambda net: F.cross_entropy(net(x), LABELS)


# The gradient


@pytest.mark.parametrize("runs_as", ["as chosen", "factored", "dense"])
@pytest.mark.parametrize("form", ["channel", "spatial"])
def test_gradient_of_a_cnn_is_the_papers(form, runs_as, monkeypatch):
    if runs_as != "as chosen":
        monkeypatch.setattr(lowrank_module, "chain_is_faster", lambda *_, **__: runs_as == "factored")
    model = spread_(cnn(), form)
    ranks = expected_ranks(model, form, RATIO)
    assert len(set(ranks.values())) > 1
    gradients, low_loss = expected(model, loss_on(images()), ranks, form)
    losses = JointObjective(model, form=form, ratio=RATIO).backward(loss_on(images()))
    torch.testing.assert_close(losses.low, low_loss)
    assert_grads(model, gradients)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("balance", [0.3, 0.5, 1.0])
def test_gradient_of_an_mlp_is_the_papers(ratio, balance):
    model = spread_(mlp())
    ranks = expected_ranks(model, "spatial", ratio)
    gradients, _ = expected(model, loss_on(vectors()), ranks, balance=balance)
    JointObjective(model, ratio=ratio, balance=balance).backward(loss_on(vectors()))
    assert_grads(model, gradients)


@settings(deadline=None, derandomize=True, max_examples=20)
@given(
    sizes=st.tuples(st.integers(2, 8), st.integers(2, 8), st.integers(2, 8)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 2),
    form=st.sampled_from(["channel", "spatial"]),
    ratio=st.floats(0.1, 1),
)
def test_gradient_is_the_papers_for_any_shape(sizes, kernel, stride, form, ratio):
    model = nn.Sequential(
        nn.Conv2d(3, sizes[0], kernel, stride=stride, padding=1),
        nn.Tanh(),
        nn.Conv2d(sizes[0], sizes[1], kernel[::-1]),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(sizes[1], sizes[2]),
    ).double()
    spread_(model, form)

    def closure(net):
        return net(images()).square().sum()

    gradients, _ = expected(model, closure, expected_ranks(model, form, ratio), form)
    JointObjective(model, form=form, ratio=ratio).backward(closure)
    assert_grads(model, gradients)


def test_losses_are_those_of_the_two_networks_and_detached():
    model = spread_(cnn())
    full = loss_on(images())(copy.deepcopy(model)).detach()
    _, low = expected(model, loss_on(images()), expected_ranks(model, "spatial", RATIO))
    losses = JointObjective(model, ratio=RATIO).backward(loss_on(images()))
    torch.testing.assert_close(losses.full, full)
    torch.testing.assert_close(losses.low, low)
    assert losses.ratio == RATIO
    assert not losses.full.requires_grad
    assert not losses.low.requires_grad


def plain_gradients(model: nn.Module, closure) -> dict[str, torch.Tensor]:
    twin = copy.deepcopy(model)
    closure(twin).backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def test_at_full_rank_it_is_the_plain_gradient():
    model = cnn()
    gradients = plain_gradients(model, loss_on(images()))
    JointObjective(model, ratio=1.0).backward(loss_on(images()))
    assert_grads(model, gradients)


def test_balance_0_is_plain_training_without_a_low_rank_pass():
    model = cnn()
    gradients = plain_gradients(model, loss_on(images()))
    calls = []

    def closure(net):
        calls.append(net)
        return loss_on(images())(net)

    losses = JointObjective(model, balance=0).backward(closure)
    assert calls == [model]
    assert losses.ran == "full"
    assert math.isnan(losses.low)
    assert_grads(model, gradients, rtol=0, atol=0)


def test_balance_1_has_the_direction_of_the_low_and_the_norm_of_the_full_gradient():
    model = spread_(mlp())
    full = plain_gradients(model, loss_on(vectors()))
    JointObjective(model, ratio=0.3, balance=1).backward(loss_on(vectors()))
    for name, weight in kernels(model).items():
        torch.testing.assert_close(weight.grad.norm(), full[name].norm())
        assert F.cosine_similarity(weight.grad.flatten(), full[name].flatten(), dim=0) < 0.999


def test_gradients_are_added_to_those_that_are_there():
    model = mlp()
    objective = JointObjective(model, ratio=RATIO)
    objective.backward(loss_on(vectors()))
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    objective.backward(loss_on(vectors()))
    assert_grads(model, {name: grad + 1 for name, grad in once.items()})


def test_two_micro_batches_give_the_sum_of_two_calls():
    model = spread_(cnn())
    ranks = expected_ranks(model, "spatial", RATIO)
    batches = [images(seed=1), images(seed=2)]
    each = [expected(model, loss_on(x), ranks)[0] for x in batches]
    objective = JointObjective(model, ratio=RATIO)
    for x in batches:
        objective.backward(loss_on(x))
    assert_grads(model, {name: each[0][name] + each[1][name] for name in each[0]})


class SumOfParameters(nn.Module):
    """Parameters whose gradients autograd returns as one and the same tensor, or as an expanded one."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4, bias=False)
        self.p, self.q = (nn.Parameter(torch.zeros(4)) for _ in range(2))
        self.r = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.fc(x) + (self.p + self.q) + self.r.sum()


@pytest.mark.parametrize("balance", [0, 0.5])
def test_accumulation_is_right_where_parameters_have_one_gradient_in_common(balance):
    model, x = SumOfParameters(), vectors(torch.float32)
    objective = JointObjective(model, ratio=RATIO, balance=balance)
    for _ in range(2):
        objective.backward(lambda net: net(x).sum())
    torch.testing.assert_close(model.p.grad, torch.full((4,), 12.0))
    torch.testing.assert_close(model.q.grad, torch.full((4,), 12.0))


@pytest.mark.parametrize("balance", [0, 0.5])
def test_gradients_can_be_clipped_in_place(balance):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.r = nn.Linear(6, 4), nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return self.fc(x).sum() + self.r.sum()

    model, x = Plain(), vectors(torch.float32)
    JointObjective(model, ratio=RATIO, balance=balance).backward(lambda net: net(x))
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    torch.testing.assert_close(total, torch.tensor(0.1), rtol=1e-3, atol=0)


def test_a_kernel_without_low_rank_gradient_keeps_its_share_of_the_full_one():
    """A zero gradient cannot be scaled to any norm."""
    model = mlp()
    full = plain_gradients(model, loss_on(vectors()))

    def closure(net):
        return loss_on(vectors())(net) * (1.0 if net is model else 0.0)

    JointObjective(model, ratio=RATIO).backward(closure)
    assert_grads(model, {name: 0.5 * grad for name, grad in full.items()})


# What the pass may not touch


def test_buffers_are_those_after_a_full_pass_alone():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = cnn()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(4, dtype=torch.float64), persistent=False)

        def forward(self, x):
            y = self.net(x)
            self.calls += 1
            self.mean = 0.9 * self.mean + y.detach().mean(0)
            return y

    model = Counting()
    alone = copy.deepcopy(model)
    alone(images())
    JointObjective(model, ratio=RATIO).backward(loss_on(images()))
    assert model.calls == 1
    for (name, buffer), other in zip(model.named_buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=0, atol=0, msg=name)


def test_weights_modules_and_flags_are_left_as_they_are():
    model = cnn()
    model[4].eval()
    before, modules = copy.deepcopy(model.state_dict()), list(model.modules())
    flags = [module.training for module in modules]
    JointObjective(model, ratio=RATIO).backward(loss_on(images()))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert list(model.modules()) == modules
    assert [module.training for module in modules] == flags


def test_layers_in_eval_mode_stay_in_eval_mode_in_the_low_rank_network():
    model = cnn()
    model[4].eval()
    flags = []

    def closure(net):
        flags.append([net[i].training for i in range(10)])
        return loss_on(images())(net)

    JointObjective(model, ratio=RATIO).backward(closure)
    assert flags[0] == flags[1]


def test_dropout_draws_independent_masks():
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5))
    outputs = []

    def closure(net):
        outputs.append(net(torch.ones(50, 6)))
        return outputs[-1].sum()

    JointObjective(model, ratio=1.0).backward(closure)
    assert ((outputs[0] == 0) != (outputs[1] == 0)).any()


# Parameters and optimisers


def test_frozen_parameters_get_no_gradient_and_the_others_the_same():
    model = spread_(cnn())
    model[0].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    gradients, _ = expected(model, loss_on(images()), expected_ranks(model, "spatial", RATIO))
    JointObjective(model, ratio=RATIO).backward(loss_on(images()))
    assert model[0].weight.grad is None
    assert model[3].bias.grad is None
    assert_grads(model, gradients)


def test_freezing_later_is_noticed():
    model = mlp()
    objective = JointObjective(model, ratio=RATIO)
    model[0].weight.requires_grad_(False)
    objective.backward(loss_on(vectors()))
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None


def test_a_layer_that_no_pass_uses_gets_no_gradient():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x):
            return self.used(x)

    model = Spare()
    JointObjective(model, ratio=RATIO).backward(loss_on(vectors(torch.float32)))
    assert model.spare.weight.grad is None
    assert model.used.weight.grad is not None


def test_several_optimiser_groups_train():
    model = cnn(torch.float32)
    groups = [{"params": list(kernels(model).values()), "weight_decay": 1e-3}]
    groups.append({"params": [p for n, p in model.named_parameters() if n not in kernels(model)], "lr": 0.05})
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    objective = JointObjective(model, ratio=(0.3, 0.9), seed=0)
    history = []
    for _ in range(30):
        optimizer.zero_grad()
        history.append(objective.backward(loss_on(images(torch.float32))))
        optimizer.step()
    assert history[-1].full < 0.5 * history[0].full
    assert history[-1].low < history[0].low


def test_a_weight_shared_by_two_layers_gets_the_gradient_of_both():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4)).double()
    model[2].weight = model[0].weight
    spread_(model)
    objective = JointObjective(model, ratio=RATIO)
    assert [layer.name for layer in objective.layers] == ["0", "3"]
    ranks = {f"{name}.weight": rank for name, rank in select(objective, RATIO).items()}
    gradients, _ = expected(model, loss_on(vectors()), ranks)
    objective.backward(loss_on(vectors()))
    assert_grads(model, gradients)


def test_rejected_layers_are_plain_parameters():
    model = spread_(mlp())
    objective = JointObjective(model, ratio=RATIO, filter_fn=lambda module, name: name != "2")
    assert objective.skipped == {"2": "rejected by filter_fn"}
    ranks = {f"{name}.weight": rank for name, rank in select(objective, RATIO).items()}
    gradients, _ = expected(model, loss_on(vectors()), ranks)
    objective.backward(loss_on(vectors()))
    assert_grads(model, gradients)


# Mixed precision, memory formats, compilation


@pytest.mark.parametrize("where", ["in the closure", "around the step"])
def test_autocast_in_bfloat16_is_finite_and_close(where):
    model = spread_(cnn(torch.float32))
    x = images(torch.float32)
    JointObjective(model, ratio=RATIO).backward(loss_on(x))
    exact = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()

    def autocast(active):
        return torch.autocast("cpu", torch.bfloat16) if active else contextlib.nullcontext()

    def closure(net):
        with autocast(where == "in the closure"):
            return F.cross_entropy(net(x), LABELS)

    with autocast(where == "around the step"):
        JointObjective(model, ratio=RATIO).backward(closure)
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32
        assert (p.grad - exact[name]).norm() <= 0.1 * exact[name].norm() + 1e-3, name


def test_a_bfloat16_model_gets_finite_bfloat16_gradients():
    model = mlp(torch.bfloat16)
    JointObjective(model, ratio=RATIO).backward(loss_on(vectors(torch.bfloat16)))
    assert all(p.grad.dtype == torch.bfloat16 and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("where", ["argument", "closure"])
def test_grad_scaler_gives_the_same_gradient_after_unscaling(where):
    model = spread_(cnn(torch.float32))
    x = images(torch.float32)
    JointObjective(model, ratio=RATIO).backward(loss_on(x))
    exact = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objective = JointObjective(model, ratio=RATIO)
    if where == "argument":
        losses = objective.backward(loss_on(x), scaler=scaler)
        torch.testing.assert_close(losses.full, loss_on(x)(copy.deepcopy(model)).detach())
    else:
        objective.backward(lambda net: scaler.scale(loss_on(x)(net)))
    torch.testing.assert_close(model[9].bias.grad, 1024 * exact["9.bias"], rtol=1e-4, atol=1e-4)
    scaler.unscale_(optimizer)
    assert_grads(model, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("broken", ["full", "low"])
def test_grad_scaler_sees_an_overflow_of_either_pass_and_skips_the_step(broken):
    model = mlp(torch.float32)
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure(net):
        is_broken = (net is model) == (broken == "full")
        return loss_on(vectors(torch.float32))(net) * (float("inf") if is_broken else 1.0)

    JointObjective(model, ratio=RATIO).backward(closure, scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_channels_last_gives_the_same_gradient():
    model = spread_(cnn())
    gradients, _ = expected(model, loss_on(images()), expected_ranks(model, "spatial", RATIO))
    model = model.to(memory_format=torch.channels_last)
    JointObjective(model, ratio=RATIO).backward(loss_on(images().to(memory_format=torch.channels_last)))
    assert_grads(model, gradients)


def test_an_error_in_the_closure_comes_through():
    model = cnn()

    def closure(net):
        if net is not model:
            raise RuntimeError("out of paper")
        return loss_on(images())(net)

    with pytest.raises(RuntimeError, match="out of paper"):
        JointObjective(model, ratio=RATIO).backward(closure)


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("how", ["torch.compile", "in place", "child"])
def test_compiled_models_give_the_same_gradient(how):
    model = spread_(mlp())
    gradients, _ = expected(model, loss_on(vectors()), expected_ranks(model, "spatial", RATIO))
    compiled = model
    if how == "torch.compile":
        compiled = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    else:
        compiled = nn.Sequential(torch.compile(nn.Sequential(*model[:3]), backend="eager"), *model[3:])
    objective = JointObjective(compiled, ratio=RATIO)
    assert not any("_orig_mod" in layer.name for layer in objective.layers)
    objective.backward(loss_on(vectors()))
    assert_grads(model, gradients)


# Closures


def test_a_closure_that_ignores_its_network_is_warned_about_once():
    model = mlp()
    objective = JointObjective(model, ratio=RATIO)
    with pytest.warns(UserWarning, match="the closure ignores the network it is given"):
        objective.backward(lambda net: loss_on(vectors())(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objective.backward(lambda net: loss_on(vectors())(model))


@pytest.mark.usefixtures("dynamo")
def test_a_closure_that_ignores_its_network_is_noticed_for_a_compiled_model_too():
    model = torch.compile(mlp(), backend="eager")
    with pytest.warns(UserWarning, match="ignores the network"):
        JointObjective(model, ratio=RATIO).backward(lambda net: loss_on(vectors())(model))


def test_a_good_closure_is_not_warned_about():
    model = cnn()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objective = JointObjective(model, ratio=RATIO)
        for _ in range(2):
            objective.backward(loss_on(images()))
    assert model[0].weight.grad is not None


class ReadsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x):
        return F.linear(self.a(x), self.b.weight)


class Calls(ReadsWeight):
    def forward(self, x):
        return self.b(self.a(x))


def test_a_weight_that_the_model_takes_from_its_layer_is_truncated_as_where_the_layer_is_called():
    """The full weight in the low-rank pass would train another network."""
    reading, calling = ReadsWeight().double(), Calls().double()
    calling.b.bias = None
    calling.load_state_dict(reading.state_dict(), strict=False)
    losses = []
    for model in (reading, calling):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            losses.append(JointObjective(model, ratio=RATIO).backward(loss_on(vectors())))
    torch.testing.assert_close(losses[0].low, losses[1].low)
    assert not torch.isclose(losses[0].low, losses[0].full)
    for name, parameter in calling.named_parameters():
        torch.testing.assert_close(reading.get_parameter(name).grad, parameter.grad)


def test_the_low_rank_layer_answers_for_the_layer():
    """Sizes, options, the weight's type and shape; and the values of the weight are W̃."""
    seen = {}

    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(6, 6)

        def forward(self, x):
            weight = self.l.weight
            seen[type(self.l).__name__] = (self.l.in_features, weight.dtype, weight.shape, weight.device)
            seen["rank"] = int(torch.linalg.matrix_rank(weight))
            return self.l(x.to(self.l.weight.dtype))

    JointObjective(Asks(), ratio=0.3).backward(lambda net: net(torch.randn(4, 6)).square().sum())
    assert seen["Linear"] == seen["LowRankLayer"] == (6, torch.float32, (6, 6), torch.device("cpu"))
    assert seen["rank"] == 2


class Returns(nn.Module):
    """Returns a dict with its loss, as models of the transformers library do."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, *, inputs, labels):
        logits = self.net(inputs)
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


def test_a_model_that_returns_a_dict_works_through_the_closure():
    plain = spread_(mlp())
    gradients, _ = expected(plain, loss_on(vectors()), expected_ranks(plain, "spatial", RATIO))
    model = Returns()
    model.net.load_state_dict(plain.state_dict())
    batch = {"inputs": vectors(), "labels": LABELS}
    JointObjective(model, ratio=RATIO).backward(lambda net: net(**batch)["loss"])
    assert_grads(model.net, gradients)


class Listed(nn.Module):
    """Keeps its layers in a plain list besides."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.order = list(self.net)

    def forward(self, x):
        for layer in self.order:
            x = layer(x)
        return x


def test_layers_reached_through_a_plain_list_are_low_rank_too():
    model = Listed()
    spread_(model.net)
    gradients, _ = expected(model.net, loss_on(vectors()), expected_ranks(model.net, "spatial", RATIO))
    JointObjective(model, ratio=RATIO).backward(loss_on(vectors()))
    assert_grads(model.net, gradients)


@pytest.mark.parametrize("ratio", [RATIO, 1.0])
@pytest.mark.parametrize("runs_as", ["factored", "dense"])
def test_hooks_of_a_layer_act_in_the_low_rank_pass_too(runs_as, ratio, monkeypatch):
    monkeypatch.setattr(lowrank_module, "chain_is_faster", lambda *_, **__: runs_as == "factored")
    model = spread_(mlp())
    model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[2].register_forward_hook(lambda module, args, output: 2 * output)
    _, low_loss = expected(model, loss_on(vectors()), expected_ranks(model, "spatial", ratio))
    losses = JointObjective(model, ratio=ratio).backward(loss_on(vectors()))
    torch.testing.assert_close(losses.low, low_loss)


class Hooked(nn.Module):
    """Collects a feature with a hook that is its own method, as feature extractors do."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 4)
        self.a.register_forward_hook(self.keep)
        self.feature = None

    def keep(self, module, args, output):
        self.feature = output

    def forward(self, x):
        return self.b(self.a(x))


def test_a_hook_that_is_a_method_of_the_model_reaches_the_low_rank_network():
    model, x = Hooked(), vectors(torch.float32)
    JointObjective(model, ratio=RATIO).backward(lambda net: net(x).sum() + net.feature.square().sum())
    assert torch.isfinite(model.a.weight.grad).all()


class ReadsSizes(nn.Module):
    """Asks its layers for their sizes, as many models do to reshape."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 2, 3), nn.Linear(2 * 7 * 6, 4)

    def forward(self, x):
        x = self.conv(x.to(self.conv.weight.dtype)) + self.conv.bias.mean()
        assert x.shape[1] == self.conv.out_channels
        return self.fc(x.view(-1, self.fc.in_features))


def test_a_model_may_ask_its_layers_for_their_sizes():
    model = ReadsSizes()
    JointObjective(model, ratio=RATIO).backward(loss_on(images(torch.float32)))
    assert torch.isfinite(model.fc.weight.grad).all()


def test_both_networks_have_the_same_named_parameters():
    """So that a penalty on net.parameters(), or a lookup by name, means the same for both."""
    model = cnn()
    seen = []

    def closure(net):
        seen.append(dict(net.named_parameters()))
        return loss_on(images())(net)

    JointObjective(model, ratio=RATIO).backward(closure)
    assert list(seen[0]) == list(seen[1])
    assert all(seen[0][name] is seen[1][name] for name in seen[0])


@pytest.mark.parametrize("is_training", [True, False])
def test_transformer_layers_work(is_training):
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True), nn.Linear(8, 4))
    model.train(is_training)
    x = torch.randn(6, 5, 8)
    losses = JointObjective(model, ratio=RATIO).backward(lambda net: F.cross_entropy(net(x).mean(1), LABELS))
    assert losses.low != losses.full
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_recurrent_layers_next_to_decomposed_ones_work():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.fc = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 4)

        def forward(self, x):
            return self.fc(self.lstm(x)[0][:, -1])

    model, x = Recurrent(), torch.randn(6, 3, 6)
    JointObjective(model, ratio=RATIO).backward(loss_on(x))
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_closure_may_differentiate_by_the_input_first():
    def penalised(net):
        x = vectors().requires_grad_()
        y = net(x).tanh().sum()
        return y + torch.autograd.grad(y, x, create_graph=True)[0].square().sum()

    model = spread_(mlp())
    gradients, _ = expected(model, penalised, expected_ranks(model, "spatial", RATIO))
    JointObjective(model, ratio=RATIO).backward(penalised)
    assert_grads(model, gradients)


class Checkpointed(nn.Module):
    def __init__(self, net, **options):
        super().__init__()
        self.net, self.options = net, options

    def forward(self, x):
        return self.net[4](checkpoint(self.net[:4], x, **self.options))


def test_checkpointed_models_get_the_same_gradient():
    model = spread_(mlp())
    gradients, _ = expected(model, loss_on(vectors()), expected_ranks(model, "spatial", RATIO))
    JointObjective(Checkpointed(model, use_reentrant=False), ratio=RATIO).backward(loss_on(vectors()))
    assert_grads(model, gradients)


def test_checkpointing_of_the_older_kind_is_right_or_refused_but_never_silently_without_gradient():
    model = spread_(mlp())
    gradients, _ = expected(model, loss_on(vectors()), expected_ranks(model, "spatial", RATIO))
    objective = JointObjective(Checkpointed(model, use_reentrant=True), ratio=RATIO)
    try:
        objective.backward(loss_on(vectors().requires_grad_()))
    except DecomposableError as error:
        assert "use_reentrant" in str(error)  # noqa: PT017
    else:
        assert model[0].weight.grad is not None
        assert_grads(model, gradients)


@pytest.mark.parametrize("returned", [None, 3.0, torch.zeros(2, requires_grad=True)])
def test_a_closure_must_return_one_number(returned):
    with pytest.raises(InvalidArgumentError, match=r"closure: it returned .*; allowed: a loss, one scalar"):
        JointObjective(mlp()).backward(lambda net: returned)


def test_a_loss_that_depends_on_no_parameter_is_refused():
    with pytest.raises(InvalidArgumentError, match="depends on no trainable parameter"):
        JointObjective(mlp()).backward(lambda net: net(vectors()).sum().detach())


# Z, ranks and limits


def select(objective: JointObjective, ratio: float) -> dict[str, int]:
    return objective.select_ranks(objective._bases.of_current_weights(), ratio)


@pytest.mark.parametrize("form", ["channel", "spatial"])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.77, 1.0])
@pytest.mark.parametrize("min_rank", [1, 5])
def test_ranks_are_those_of_the_largest_singular_values_of_the_network(form, ratio, min_rank):
    model = spread_(cnn(), form)
    found = select(JointObjective(model, form=form, min_rank=min_rank), ratio)
    truth = expected_ranks(model, form, ratio, min_rank)
    assert {f"{name}.weight": rank for name, rank in found.items()} == truth


def test_min_rank_and_limits_reach_the_low_rank_network(monkeypatch):
    ranks = []

    def recording(matrix, decomposition, rank, *more):
        ranks.append(rank)
        return truncate(matrix, decomposition, rank, *more)

    truncate = forms_module.truncate
    monkeypatch.setattr(forms_module, "truncate", recording)
    objective = JointObjective(mlp(), ratio=0.01, min_rank=2, limits={"2": (4, None), "4": (None, 1)})
    objective.backward(loss_on(vectors()))
    assert ranks == [2, 4, 1]


def test_the_criterion_decides_the_ranks():
    model = spread_(mlp())
    with torch.no_grad():
        model[0].weight.mul_(100)
    by_value = select(JointObjective(model), 0.4)
    by_energy = select(JointObjective(model, criterion="energy"), 0.4)
    uniform = select(JointObjective(model, criterion="uniform"), 0.5)
    own = select(JointObjective(model, criterion=lambda sigma: np.zeros_like(sigma)), 0.4)
    assert by_value == {"0": 6, "2": 1, "4": 1}  # 6 + 7 + 4 bases in all, of which 7
    assert by_energy["0"] < 6
    assert uniform == {"0": 3, "2": 3, "4": 2}
    assert own == {"0": 6, "2": 1, "4": 1}  # what is equal stays in order


def draws(count: int, **options) -> np.ndarray:
    objective = JointObjective(nn.Linear(2, 2), balance=0, **options)
    x = torch.ones(1, 2)
    return np.array([objective.backward(lambda net: net(x).sum()).ratio for _ in range(count)])


def test_z_is_uniform_between_its_bounds():
    drawn = np.sort(draws(400, ratio=(0.1, 0.6), seed=0))
    assert 0.1 <= drawn[0] <= drawn[-1] <= 0.6
    share = (np.arange(400) + 0.5) / 400
    assert np.abs((drawn - 0.1) / 0.5 - share).max() < 1.36 / 400**0.5  # Kolmogorov and Smirnov, 5%


def test_one_number_keeps_z_fixed():
    assert set(draws(5, ratio=0.25)) == {0.25}


def test_the_seed_decides_z_and_torchs_seed_is_the_default():
    assert (draws(5, seed=3) == draws(5, seed=3)).all()
    assert (draws(5, seed=3) != draws(5, seed=4)).any()
    torch.manual_seed(3)
    assert (draws(5) == draws(5, seed=3)).all()


def test_drawing_z_leaves_torchs_own_generator_alone():
    state = torch.get_rng_state()
    JointObjective(mlp(), ratio=(0.1, 0.9)).backward(loss_on(vectors()))
    # mlp() above draws its initial weights, so draw as many again from the state before
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    mlp()
    assert torch.equal(torch.get_rng_state(), after)


# Keeping bases


@pytest.fixture
def counted(monkeypatch):
    """The names that were decomposed, call by call."""
    calls = []
    plain = forms_module.svd

    def counting(matrices):
        calls.append(list(matrices))
        return plain(matrices)

    monkeypatch.setattr(forms_module, "svd", counting)
    return calls


def step(model: nn.Module, objective: JointObjective, x: torch.Tensor, lr: float = 0.1) -> None:
    model.zero_grad()
    objective.backward(loss_on(x))
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(lr * p.grad)


@pytest.mark.parametrize(("refresh", "decomposed"), [(1, 7), (2, 4), (3, 3), (7, 1)])
def test_the_svd_is_computed_every_so_many_steps(refresh, decomposed, counted):
    model = mlp()
    objective = JointObjective(model, ratio=RATIO, refresh=refresh)
    for _ in range(7):
        step(model, objective, vectors())
    assert len(counted) == decomposed


@pytest.mark.parametrize("refresh", [1, 3])
def test_bases_are_reused_while_the_weights_have_not_changed(refresh, counted):
    model = mlp()
    objective = JointObjective(model, ratio=RATIO, refresh=refresh)
    for _ in range(5):
        objective.backward(loss_on(vectors()))
    assert len(counted) == 1


def test_micro_batches_do_not_count_as_steps(counted):
    model = mlp()
    objective = JointObjective(model, ratio=RATIO, refresh=2)
    for _ in range(4):
        objective.backward(loss_on(vectors(seed=1)))
        step(model, objective, vectors(seed=2))
    assert len(counted) == 2


def scale(weight):
    weight.data.mul_(1.5)


def replace(weight):
    weight.data = weight.data * 1.5


def write_by_index(weight):
    weight.data[0, 0] += 1


def load(weight):
    weight.copy_(weight * 1.5)


def reorder(weight):
    weight.copy_(weight.flip(0))


@pytest.mark.parametrize("edit", [scale, replace, write_by_index, load, reorder])
def test_every_way_to_change_a_weight_is_noticed(edit, counted):
    model = mlp()
    objective = JointObjective(model, ratio=RATIO)
    objective.backward(loss_on(vectors()))
    with torch.no_grad():
        edit(model[2].weight)
    objective.backward(loss_on(vectors()))
    assert counted[1:] == [["2"]]


def test_a_weight_whose_entries_change_places_through_data_is_noticed(counted):
    model = mlp()
    objective = JointObjective(model, ratio=RATIO)
    objective.backward(loss_on(vectors()))
    model[2].weight.data = model[2].weight.data.flip(0)
    objective.backward(loss_on(vectors()))
    assert counted[1:] == [["2"]]


def test_a_layer_that_changes_every_other_step_is_refreshed_too(counted):
    """Two halves of a network trained in turn: each has to get new bases from time to time."""
    model = mlp()
    objective = JointObjective(model, ratio=RATIO, refresh=2)
    for i in range(8):
        objective.backward(loss_on(vectors()))
        with torch.no_grad():
            model[0 if i % 2 else 2].weight.mul_(1.1)
    later = [name for names in counted[1:] for name in names]
    assert {"0", "2"} <= set(later)


def appendix_a(u, s, v, rank: int, outer: torch.Tensor) -> torch.Tensor:
    """The gradient as printed, for M ≥ N, with whatever bases and lengths it is given."""
    kept_v, kept_u, cut_u, cut_v = v[:, :rank], u[:, :rank], u[:, rank:], v[:, rank:]
    rho = (s[None, rank:] / s[:rank, None]).clamp(max=0.99**0.5)
    a, b = kept_v.T @ outer.T @ cut_u, kept_u.T @ outer @ cut_v
    k = 1 / (1 - rho**2)
    right = kept_u @ (k * rho * a + k * b) @ cut_v.T
    left = cut_u @ (k * rho**2 * a + k * rho * b).T @ kept_v.T
    return outer @ kept_v @ kept_v.T + right + left


@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (5, 5)], ids=["tall", "wide", "square"])
def test_with_kept_bases_the_gradient_is_appendix_a_with_the_projected_quantities(shape):
    model = spread_(nn.Linear(*shape, bias=False).double(), factor=0.7)
    x, y = torch.randn(9, shape[0]).double(), torch.randn(9, shape[1]).double()
    ratio = 0.5

    def closure(net):
        return F.mse_loss(net(x), y)

    objective = JointObjective(model, ratio=ratio, refresh=5, balance=1)
    objective.backward(closure)
    old = model.weight.detach().T.clone()  # the paper's W: inputs × outputs
    with torch.no_grad():
        model.weight.add_(0.02 * torch.randn_like(model.weight))
    model.zero_grad()
    losses = objective.backward(closure)

    is_tall = shape[0] >= shape[1]
    w, kept = model.weight.detach().T, torch.linalg.svd(old, full_matrices=False)
    w, bases = (w, kept.Vh.T) if is_tall else (w.T, kept.U)
    lengths = (w @ bases).norm(dim=0)
    order = lengths.argsort(descending=True)
    v, s = bases[:, order], lengths[order]
    u, rank = w @ v / s, round(ratio * min(shape))
    low = w @ v[:, :rank] @ v[:, :rank].T
    low = (low if is_tall else low.T).clone().requires_grad_()
    loss = F.mse_loss(x @ low, y)
    outer = torch.autograd.grad(loss, low)[0]
    gradient = appendix_a(u, s, v, rank, outer) if is_tall else appendix_a(u, s, v, rank, outer.T).T

    torch.testing.assert_close(losses.low, loss.detach())
    full = plain_gradients(model, closure)["weight"].T
    rebalanced = gradient * full.norm() / gradient.norm()
    torch.testing.assert_close(model.weight.grad.T, rebalanced, rtol=1e-7, atol=1e-9)


# Resuming


def run(model, steps: int, objective: JointObjective, optimizer) -> None:
    for i in range(steps):
        optimizer.zero_grad()
        objective.backward(loss_on(images(torch.float32, seed=i)))
        optimizer.step()


def build(refresh: int, is_partly_frozen: bool = False):
    torch.manual_seed(0)
    model = cnn(torch.float32)
    model.append(nn.Linear(4, 4))
    model.append(nn.Linear(4, 4))
    if is_partly_frozen:
        model[-1].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    return model, JointObjective(model, ratio=(0.1, 0.9), refresh=refresh, seed=0), optimizer


@pytest.mark.parametrize("is_partly_frozen", [False, True])
@pytest.mark.parametrize("pause", [1, 2, 3, 4])
@pytest.mark.parametrize("refresh", [1, 3])
def test_a_resumed_run_repeats_bit_by_bit(refresh, pause, is_partly_frozen):
    model, objective, optimizer = build(refresh, is_partly_frozen)
    run(model, pause, objective, optimizer)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (model, objective, optimizer)], file)
    run(model, 5, objective, optimizer)

    file.seek(0)
    resumed, other_objective, other_optimizer = build(refresh, is_partly_frozen)
    for part, state in zip((resumed, other_objective, other_optimizer), torch.load(file), strict=True):
        part.load_state_dict(state)
    run(resumed, 5, other_objective, other_optimizer)
    for (name, value), other in zip(model.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize("refresh", [1, 3])
def test_a_run_resumed_between_micro_batches_repeats_bit_by_bit(refresh):
    model, objective, optimizer = build(refresh)
    run(model, 2, objective, optimizer)
    objective.backward(loss_on(images(torch.float32)))
    states = copy.deepcopy([model.state_dict(), objective.state_dict(), optimizer.state_dict()])
    model.zero_grad()
    run(model, 3, objective, optimizer)

    resumed, other_objective, other_optimizer = build(refresh)
    for part, state in zip((resumed, other_objective, other_optimizer), states, strict=True):
        part.load_state_dict(state)
    run(resumed, 3, other_objective, other_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_a_state_stays_what_it_was_while_training_goes_on():
    model, objective, optimizer = build(refresh=3)
    run(model, 2, objective, optimizer)
    state = objective.state_dict()
    before = copy.deepcopy(state)
    run(model, 3, objective, optimizer)
    assert torch.equal(state["generator"], before["generator"])
    for name, entry in before["bases"]["layers"].items():
        assert torch.equal(state["bases"]["layers"][name]["v"], entry["v"])


@pytest.mark.parametrize("missing", ["generator", "bases"])
def test_a_state_with_a_part_missing_is_refused(missing):
    objective = JointObjective(mlp())
    state = {k: v for k, v in objective.state_dict().items() if k != missing}
    with pytest.raises(InvalidArgumentError) as refusal:
        objective.load_state_dict(state)
    assert refusal.value.option == "state"
    assert missing in str(refusal.value.came)


def test_the_state_of_another_model_is_refused_with_the_layer_and_changes_nothing():
    other = JointObjective(nn.Sequential(nn.Linear(3, 3)), refresh=2)
    other.backward(lambda net: net(torch.ones(1, 3)).sum())
    objective = JointObjective(mlp(), refresh=2)
    before = objective.state_dict()
    with pytest.raises(InvalidArgumentError) as refusal:
        objective.load_state_dict(other.state_dict())
    assert refusal.value.came == "layer '0'"
    assert torch.equal(objective.state_dict()["generator"], before["generator"])


def test_the_state_of_a_layer_of_another_shape_is_refused():
    """Both have full rank 5, and bases for one would fit the other."""
    other = JointObjective(nn.Linear(7, 5), refresh=2)
    other.backward(lambda net: net(torch.ones(1, 7)).sum())
    with pytest.raises(InvalidArgumentError) as refusal:
        JointObjective(nn.Linear(6, 5), refresh=2).load_state_dict(other.state_dict())
    assert refusal.value.allowed == "a state of this model"


# Failures


def test_where_lapack_fails_the_step_is_a_plain_one_with_a_warning(monkeypatch):
    def fail(matrices):
        raise torch.linalg.LinAlgError("eigh: the algorithm failed to converge")

    model = cnn()
    gradients = plain_gradients(model, loss_on(images()))
    monkeypatch.setattr(forms_module, "svd", fail)
    with pytest.warns(UserWarning, match="ordinary full-rank step.*failed to converge"):
        losses = JointObjective(model, ratio=RATIO).backward(loss_on(images()))
    assert losses.full == losses.low
    assert_grads(model, gradients, rtol=0, atol=0)


def test_after_such_a_step_the_method_goes_on(monkeypatch):
    def fail(matrices):
        raise torch.linalg.LinAlgError("no convergence")

    model = spread_(mlp())
    gradients, _ = expected(model, loss_on(vectors()), expected_ranks(model, "spatial", RATIO))
    objective = JointObjective(model, ratio=RATIO)
    with monkeypatch.context() as patch:
        patch.setattr(forms_module, "svd", fail)
        with pytest.warns(UserWarning, match="full-rank step"):
            objective.backward(loss_on(vectors()))
    model.zero_grad()
    objective.backward(loss_on(vectors()))
    assert_grads(model, gradients)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("refresh", [1, 3])
@pytest.mark.parametrize("criterion", ["singular_value", "uniform"])
def test_a_weight_that_is_not_finite_raises_an_error_with_the_name_of_its_layer(bad, refresh, criterion):
    model = mlp()
    objective = JointObjective(model, ratio=RATIO, refresh=refresh, criterion=criterion)
    objective.backward(loss_on(vectors()))
    with torch.no_grad():
        model[2].weight[1, 2] = bad
    with pytest.raises(NonFiniteError, match=r"layer '2'.*NaN or infinity"):
        objective.backward(loss_on(vectors()))


def test_zero_and_rank_deficient_weights_train():
    model = mlp()
    with torch.no_grad():
        model[4].weight.zero_()
        model[2].weight[3:] = 0
    JointObjective(model, ratio=0.8).backward(loss_on(vectors()))
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert model[4].weight.grad.norm() > 0


@pytest.mark.parametrize("size", [1e-20, 1e-30])
def test_tiny_weights_train(size):
    model = mlp(torch.float32)
    with torch.no_grad():
        for weight in kernels(model).values():
            weight.mul_(size)
    JointObjective(model, ratio=RATIO).backward(loss_on(vectors(torch.float32)))
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


# Arguments


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"form": "cp"}, r"form='cp'.*'channel', 'spatial', 'tucker'"),
        ({"ratio": (0.5, 0.1)}, r"ratio=\(0.5, 0.1\); allowed"),
        ({"ratio": (0, 0.5)}, r"ratio=0; allowed: a number in \(0, 1\]"),
        ({"ratio": (0.5, 1.5)}, "ratio=1.5; allowed"),
        ({"ratio": (0.1, 0.2, 0.3)}, r"ratio=.*; allowed"),
        ({"ratio": "half"}, "ratio='half'; allowed"),
        ({"balance": 1.5}, "balance=1.5; allowed: a number from 0 to 1"),
        ({"balance": -0.1}, "balance=-0.1; allowed"),
        ({"balance": True}, "balance=True; allowed"),
        ({"balance": float("nan")}, "balance=nan; allowed"),
        ({"criterion": "magic"}, "criterion='magic'.*allowed"),
        ({"min_rank": 0}, "min_rank=0; allowed"),
        ({"limits": {"typo": (1, 2)}}, "'typo' matches none of the 3 layers"),
        ({"refresh": 0}, "refresh=0; allowed: an int of at least 1"),
        ({"refresh": 1.5}, "refresh=1.5; allowed"),
        ({"seed": "today"}, "seed='today'; allowed"),
        ({"filter_fn": lambda module, name: False}, "no layer to decompose.*rejected by filter_fn"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_arguments_are_refused_in_one_line(options, said):
    with pytest.raises(InvalidArgumentError, match=said) as caught:
        JointObjective(mlp(), **options)
    assert "\n" not in str(caught.value)


def test_a_model_of_the_wrong_kind_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"allowed: a torch\.nn\.Module"):
        JointObjective(lambda x: x)


@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
def test_sparse_gradients_of_an_embedding_are_mixed_like_others(balance):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3))
    tokens = torch.tensor([1, 2, 2])
    JointObjective(model, balance=balance, ratio=1.0).backward(lambda net: net(tokens).square().sum())
    expected = torch.autograd.grad(model(tokens).square().sum(), model[0].weight)[0].to_dense()
    torch.testing.assert_close(model[0].weight.grad.to_dense(), expected)


def test_forward_and_loss_are_the_closure():
    found, closure = [], loss_on(vectors())
    for call in ({"closure": closure}, {"forward": lambda net: closure(net), "loss": lambda out: out}):
        torch.manual_seed(0)
        model = mlp()
        losses = JointObjective(model, ratio=RATIO, seed=0).backward(**call)
        assert losses.ran == "both"
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_calls_that_cannot_be_are_refused():
    joint, any_one = JointObjective(mlp()), {"forward": lambda net: net, "loss": lambda out: out}
    for call in ({}, {"forward": any_one["forward"]}, {"loss": any_one["loss"]}, {"closure": len, **any_one}):
        with pytest.raises(InvalidArgumentError, match="allowed: a closure, or both forward= and loss="):
            joint.backward(**call)
