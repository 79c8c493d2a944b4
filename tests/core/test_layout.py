"""Which layout of memory the low-rank pass has, and that nobody but the network's own forward sees it."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from decomposable import JointObjective

RATIO = 0.4
LABELS = torch.arange(6) % 4


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def images() -> torch.Tensor:
    return torch.randn(6, 3, 9, 8, generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(216, 9), nn.Tanh(), nn.Linear(9, 4))


def loss(net: nn.Module) -> torch.Tensor:
    return F.cross_entropy(net(images()), LABELS)


def assert_same_gradients(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


class Shaped(nn.Module):
    """Convolutions, then something that may need one layout of memory, then a linear layer."""

    def __init__(self, reshape, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.drop, self.fc = nn.Conv2d(3, 4, 3), nn.Dropout(dropout), nn.Linear(4 * 7 * 6, 4)
        self.reshape = reshape

    def forward(self, x):
        return self.fc(self.reshape(self.drop(self.conv(x))))


class MapsOrVectors(Shaped):
    def forward(self, x):
        return super().forward(x) if x.dim() == 4 else self.fc(x)


class Viewed(nn.Module):
    def forward(self, x):
        return view(x)


def flatten(x):
    return x.flatten(1)


def view(x):
    return x.view(len(x), -1)


def check_layout(x):
    assert x.is_contiguous()
    return x.flatten(1)


def pair_up(x):
    return torch.view_as_complex(x.unflatten(3, (-1, 2))).abs().repeat(1, 1, 1, 2).flatten(1)


ANY_LAYOUT = {
    view: flatten,
    check_layout: flatten,
    pair_up: lambda x: pair_up(x.contiguous()),
}


@pytest.mark.parametrize("reshape", ANY_LAYOUT)
def test_a_model_that_needs_its_own_memory_layout_gets_it(reshape):
    models = Shaped(reshape), Shaped(ANY_LAYOUT[reshape])
    losses = [JointObjective(model, ratio=RATIO).backward(loss) for model in models]
    torch.testing.assert_close(losses[0].low, losses[1].low)
    assert_same_gradients(*models)


def test_a_memory_layout_that_does_not_fit_is_tried_once_only():
    calls = []

    def closure(net):
        calls.append(net)
        return loss(net)

    objective = JointObjective(Shaped(view), ratio=RATIO)
    objective.backward(closure)
    calls.clear()
    objective.backward(closure)
    assert len(calls) == 2


def test_a_model_whose_convolutions_are_cut_in_a_later_step_only_gets_its_own_layout():
    model = Shaped(view)
    with torch.no_grad():
        model.conv.weight *= 50  # the first step cuts the linear layer only
    objective = JointObjective(model, ratio=0.85)
    ranks = objective.select_ranks(objective._bases.of_current_weights(), 0.85)
    assert ranks["conv"] == objective.layers[0].full_rank
    assert ranks["fc"] < objective.layers[1].full_rank
    objective.backward(loss)
    assert objective._layout._is_taken is False
    objective.ratio = (0.1, 0.1)
    objective.backward(loss)


@pytest.mark.parametrize("form", ["spatial", "channel"])
def test_a_model_whose_first_ranks_are_one_gets_its_own_layout(form):
    """With one channel and rank 1 both layouts of every weight are the same bytes."""
    model = nn.Sequential(nn.Conv2d(1, 32, 3), Viewed(), nn.Linear(32 * 7 * 6, 4))
    objective = JointObjective(model, ratio=0.01, form=form)
    for ratio in (0.01, 0.7):
        objective.ratio = (ratio, ratio)
        objective.backward(lambda net: F.cross_entropy(net(images()[:, :1]), LABELS))
    assert objective._layout._is_taken is False


def test_a_layout_stays_open_until_a_convolution_has_run():
    objective = JointObjective(MapsOrVectors(view), ratio=RATIO)
    objective.backward(lambda net: F.cross_entropy(net(torch.ones(6, 4 * 7 * 6)), LABELS))
    assert objective._layout._is_taken is None
    objective.backward(loss)
    assert objective._layout._is_taken is False


def test_a_memory_layout_that_does_not_fit_leaves_no_trace_in_the_random_numbers():
    objective = JointObjective(Shaped(view, dropout=0.5), ratio=RATIO)
    results = []
    for _ in range(2):  # only the first step tries it
        torch.manual_seed(1)
        low = objective.backward(loss).low
        results.append((float(low), torch.rand(()).item()))
    assert results[0] == results[1]


class ViewsItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.view(len(gradient), -1).view_as(gradient)


class GradientViewed(nn.Module):
    def forward(self, x):
        return ViewsItsGradient.apply(x)


class Recursive(Shaped):
    """Calls its own forward for the first half of the batch."""

    def forward(self, x):
        return torch.cat([self.forward(x[:1]), super().forward(x[1:])]) if len(x) > 1 else super().forward(x)


def loss_of_maps(net):
    """As a closure may be that takes the outputs in the layout of the model before it was low-rank."""
    return net(images()).view(-1).square().mean()


def loss_through_parts(net):
    return net.fc(net.conv(images()).view(6, -1)).square().mean()


def loss_through_both(net):
    x = images()
    before, whole, after = net.conv(x).view(6, -1), net(x), net.conv(x).view(6, -1)
    return whole.square().mean() + (before * after).mean()


def loss_of_a_checkpoint(net):
    return checkpoint(net, images(), use_reentrant=False).square().mean()


TAKES_CHANNELS_LAST = [
    (lambda: Shaped(flatten), loss, True),
    (lambda: Shaped(view), loss, False),
    (lambda: Shaped(check_layout), loss, False),
    (lambda: Shaped(pair_up), loss, False),
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), GradientViewed(), nn.Conv2d(4, 4, 3)), loss_of_maps, False),
    (lambda: Recursive(view), loss, False),
    (lambda: Recursive(flatten), loss, True),
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), loss_of_maps, True),
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(2)), loss_of_maps, True),
    (lambda: Shaped(view), loss_through_parts, None),
    (lambda: Shaped(flatten), loss_through_both, True),
    (lambda: Shaped(flatten), loss_of_a_checkpoint, True),
    (mlp, loss, False),
]


@pytest.mark.parametrize(("build_model", "closure", "is_taken"), TAKES_CHANNELS_LAST)
def test_the_closure_is_called_exactly_twice_and_the_layout_changes_no_gradient(build_model, closure, is_taken):
    objective = JointObjective(build_model(), ratio=RATIO)
    usual = JointObjective(build_model(), ratio=RATIO)
    usual.model.load_state_dict(objective.model.state_dict())
    usual._layout._is_taken = False
    for _ in range(2):
        calls = []

        def counted_closure(net, calls=calls):
            calls.append(net)
            return closure(net)

        objective.backward(counted_closure)
        assert len(calls) == 2
        assert objective._layout._is_taken is is_taken
        assert "forward" not in vars(calls[1])
        usual.backward(closure)
        assert_same_gradients(objective.model, usual.model)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, AssertionError])
@pytest.mark.parametrize("is_before", [True, False])
def test_what_the_closure_raises_in_its_second_call_comes_through_and_decides_no_layout(error, is_before):
    objective = JointObjective(Shaped(flatten), ratio=RATIO)
    calls = []

    def closure(net):
        calls.append(net)
        if len(calls) == 2 and is_before:
            raise error("out of paper")
        result = loss(net)
        if len(calls) == 2:
            raise error("out of paper")
        return result

    with pytest.raises(error, match="out of paper"):
        objective.backward(closure)
    assert len(calls) == 2
    assert objective._layout._is_taken is (None if is_before else True)
    objective.backward(closure)
    assert len(calls) == 4
    assert objective._layout._is_taken is True


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
        KeyboardInterrupt("stop"),
        TimeoutError("alarm"),
        OSError("no space left on device"),
        KeyError("label"),
    ],
)
def test_what_comes_from_outside_in_the_first_forward_comes_through_and_decides_no_layout(error):
    model, raised = Shaped(flatten), []

    def interrupted(x):
        if objective._layout.memory_format == torch.channels_last and not raised:
            raised.append(error)
            raise error
        return x.flatten(1)

    model.reshape = interrupted
    objective = JointObjective(model, ratio=RATIO)
    with pytest.raises(type(error)):
        objective.backward(loss)
    assert objective._layout._is_taken is None
    objective.backward(loss)
    assert objective._layout._is_taken is True


def test_a_model_that_fails_in_any_layout_says_so_in_its_own_words_and_decides_nothing():
    model = Shaped(flatten)

    def broken(x):
        if is_broken:
            raise RuntimeError("out of order")
        return x.flatten(1)

    is_broken = False
    model.reshape = broken
    objective = JointObjective(model, ratio=RATIO)

    def closure(net):
        nonlocal is_broken
        is_broken = net is not model
        return loss(net)

    with pytest.raises(RuntimeError, match="out of order") as caught:
        objective.backward(closure)
    assert caught.value.__context__ is None
    assert objective._layout._is_taken is None


def test_trying_channels_last_calls_no_backward_hook_twice():
    model, seen = Shaped(flatten), []
    model.drop.register_full_backward_hook(lambda *_: seen.append(1))
    JointObjective(model, ratio=RATIO).backward(loss)
    assert len(seen) == 2


class Checkpointed(Shaped):
    def forward(self, x):
        return self.fc(checkpoint(lambda x: self.reshape(self.drop(self.conv(x))), x, use_reentrant=False))


def test_dropout_in_a_checkpoint_has_the_same_mask_when_it_is_repeated():
    models = Shaped(flatten, dropout=0.5), Checkpointed(flatten, dropout=0.5)
    for model in models:
        torch.manual_seed(1)
        JointObjective(model, ratio=RATIO).backward(loss)
    assert_same_gradients(*models)


def test_the_step_that_tries_the_layout_has_the_bits_of_the_later_ones():
    for reshape in (view, flatten):
        objective = JointObjective(Shaped(reshape, dropout=0.5), ratio=RATIO)
        results = []
        for _ in range(2):
            torch.manual_seed(1)
            objective.model.zero_grad()
            objective.backward(loss)
            results.append([p.grad for p in objective.model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("reshape", [view, flatten])
def test_the_low_rank_network_is_freed_with_the_step(reshape):
    objective, networks = JointObjective(Shaped(reshape), ratio=RATIO), []

    def closure(net):
        networks.append(weakref.ref(net))
        return loss(net)

    gc.disable()
    try:
        for _ in range(2):
            objective.backward(closure)
        assert [network() for network in networks[1::2]] == [None, None]
    finally:
        gc.enable()
