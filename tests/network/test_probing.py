import pytest
import torch
import torch.nn.functional as F
from torch import nn

from decomposable import decompose
from decomposable.export.any_size_graph import in_chains
from refusals import Saying, refused

X = (2, 8)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Three(nn.Module):
    """Three layers; subclasses do something unusual with the second."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.c(self.middle(torch.tanh(self.a(x))))

    def middle(self, x):
        return self.b(x)


class UsesWeight(Three):
    def middle(self, x):
        return F.linear(x, self.b.weight, self.b.bias)


class UsesTransposed(Three):
    def middle(self, x):
        return x @ self.b.weight.t()


class UsesCopy(Three):
    def middle(self, x):
        return x @ self.b.weight.data.clone()


class UsesListed(Three):
    """By a reference that no module has."""

    def __init__(self):
        super().__init__()
        self.weights = [self.b.weight]

    def middle(self, x):
        return x @ self.weights[0]


class UsesBoth(Three):
    def middle(self, x):
        return self.b(x) + self.b.weight.norm()


class UsesHook(Three):
    def __init__(self):
        super().__init__()
        self.b.register_forward_hook(lambda module, args, y: y + args[0] @ module.weight)


class Asks(Three):
    """What may be asked for without using the weight's values."""

    def middle(self, x):
        weight = self.b.weight
        x = x.to(weight.device, weight.dtype).reshape(-1, weight.shape[1])
        assert weight.is_floating_point()
        assert isinstance(weight, torch.Tensor)
        assert (weight.dim(), weight.numel(), weight.size(0)) == (2, 64, self.b.out_features)
        return self.b(x) * self.b.bias.sum() / self.b.in_features


@pytest.mark.parametrize("kind", [UsesWeight, UsesTransposed, UsesCopy, UsesListed, UsesBoth, UsesHook])
def test_a_layer_whose_weight_is_used_other_than_by_calling_it_is_left_alone(kind):
    model, x = kind().eval(), torch.randn(X)
    net = decompose(model, x)
    assert list(net.plan().ranks) == ["a", "c"]
    assert "its weight is used other than by calling it (" in net.skipped["b"]
    net.resize_(ratio=0.2)
    assert torch.equal(net.module.b.weight, model.b.weight)
    net.resize_(macs=1.0)
    torch.testing.assert_close(net(x), model(x))


def test_asking_for_what_is_known_of_a_weight_is_no_use_of_it():
    model, x = Asks().eval(), torch.randn(X)
    net = decompose(model, x)
    assert (list(net.plan().ranks), net.skipped) == (["a", "b", "c"], {})
    for ratio in (1.0, 0.5, 0.1):
        net.resize_(ratio=ratio)
        assert net(x).shape == net.extract()(x).shape == X


def test_two_factors_of_full_rank_give_the_outputs_of_the_model():
    model, x = Asks().eval(), torch.randn(X)
    torch.testing.assert_close(in_chains(decompose(model, x))(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_weight_shared_by_two_layers_and_used_directly_is_left_alone_in_both():
    model = UsesWeight()
    model.c.weight = model.b.weight
    net = decompose(model, torch.randn(X))
    assert list(net.plan().ranks) == ["a"]
    assert [name for name, reason in net.skipped.items() if "other than by calling" in reason] == ["b", "c"]


class Checks(Three):
    def middle(self, x):
        if type(self.b) is not nn.Linear:
            raise TypeError(f"b has to be Linear,\n not {type(self.b).__name__}")
        return self.b(x)


class Passes(Three):
    """Crashes nowhere, and computes something else when the type is another."""

    def middle(self, x):
        return self.b(x) if isinstance(self.b, nn.Linear) else x


def test_a_layer_that_the_model_fails_without_is_left_alone_with_the_error():
    model, x = Checks().eval(), torch.randn(X)
    net = decompose(model, x)
    assert list(net.plan().ranks) == ["a", "c"]
    reason = "the model fails with two factors in its place (TypeError: b has to be Linear, not StandIn); "
    assert net.skipped["b"].startswith(reason)
    net.resize_(ratio=0.1)
    assert net(x).shape == X


def test_several_such_layers_are_found_among_many():
    class Block(Checks):
        pass

    model = nn.Sequential(*(Block() if i in (1, 2, 5) else Three() for i in range(6)))
    net = decompose(model, torch.randn(X))
    assert list(net.skipped) == ["1.b", "2.b", "5.b"]
    assert len(net.plan().ranks) == 15


def test_a_layer_that_is_no_longer_called_when_it_is_two_factors_is_left_alone():
    model, x = Passes().eval(), torch.randn(X)
    net = decompose(model, x)
    assert list(net.plan().ranks) == ["a", "c"]
    assert "the model calls it, but not the two factors in its place" in net.skipped["b"]


def test_a_layer_that_small_sizes_have_no_use_for_is_decomposed_all_the_same():
    class Gated(Three):
        def middle(self, x):
            return self.b(x) if x.abs().sum() > 6.5 else x

    model = Gated()
    with torch.no_grad():
        model.a.weight.copy_(torch.eye(8))
        model.a.bias.zero_()
    net = decompose(model, torch.ones(1, 8) * 2)
    assert list(net.plan().ranks) == ["a", "b", "c"]


def test_where_no_layer_can_be_replaced_it_says_why():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(4, 4)

        def forward(self, x):
            return x @ self.l.weight

    with refused("model", {"l": Saying("^its weight is used other than")}):
        decompose(One(), torch.zeros(1, 4))


def test_a_model_that_does_not_run_raises_its_own_error():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        decompose(Three(), torch.zeros(1, 5))


class Once(Three):
    """Runs one time only, whatever its layers are."""

    def __init__(self):
        super().__init__()
        self.runs = []

    def middle(self, x):
        self.runs.append(1)
        if len(self.runs) > 1:
            raise RuntimeError("it has run before")
        return self.b(x)


def test_no_layer_is_blamed_where_the_model_does_not_run_again_as_it_is():
    with pytest.raises(RuntimeError, match="it has run before"):
        decompose(Once(), torch.zeros(X))


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.checked, self.fc = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(144, 3)

    def forward(self, x):
        if isinstance(self.checked, nn.Sequential):
            raise TypeError("a convolution, please")
        y = self.checked(self.conv(x))
        return self.fc(y.view(len(y), -1))


def test_layout_and_layers_are_judged_apart():
    net = decompose(Views(), torch.zeros(1, 2, 8, 8))
    assert list(net.plan().ranks) == ["conv", "fc"]
    net.resize_(ranks={"conv": 2, "fc": 1})
    assert net(torch.randn(3, 2, 8, 8)).shape == (3, 3)


# What is as before afterwards


class Stateful(Three):
    """Draws numbers and counts its passes, in eval mode as well."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(8))

    def middle(self, x):
        self.count += 1
        self.last = x[0].detach()
        return self.b(x + torch.randn_like(x))


def test_random_numbers_and_buffers_are_as_before():
    model = Stateful()
    state = torch.get_rng_state()
    net = decompose(model, torch.randn(X, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.get_rng_state(), state)
    for network in (model, net.module, net.extract()):
        assert network.count == 0
        assert not network.last.any()


def test_hooks_see_two_passes_one_of_each_size():
    model, seen = Three(), []
    model.register_forward_hook(lambda module, args, y: seen.append(type(module.b).__name__))
    decompose(model, torch.randn(X))
    assert seen == ["Linear", "StandIn"]


def test_the_layers_of_the_network_have_the_forward_of_their_class():
    net = decompose(Three(), torch.randn(X))
    assert not any("forward" in vars(module) for module in net._base.modules())


def test_a_size_between_is_not_tried_without_an_input():
    assert list(decompose(UsesWeight()).plan().ranks) == ["a", "b", "c"]
