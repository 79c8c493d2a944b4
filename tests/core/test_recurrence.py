"""Recurrent layers with chains inside: all ways to run them give what `nn.LSTM` and its like give with W̃."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import decomposable as dn
from decomposable.core.unpacking import recurrent as recurrence

KINDS = {
    "lstm": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "lstm, projections": (nn.LSTM, {"proj_size": 5, "bidirectional": True}),
    "lstm, no bias": (nn.LSTM, {"bias": False, "batch_first": True}),
    "gru": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "rnn": (nn.RNN, {"bidirectional": True}),
    "relu": (nn.RNN, {"nonlinearity": "relu", "bias": False}),
}
X = torch.randn(9, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.double)


class Net(nn.Module):
    def __init__(self, kind, options):
        super().__init__()
        self.layer = kind(6, 8, **options)

    def forward(self, x, hx=None):
        return self.layer(x, hx)


def make(name, dtype=torch.double):
    """A decomposed layer at half its size, and one of PyTorch whose weights are its W̃."""
    torch.manual_seed(0)
    kind, options = KINDS[name]
    net = dn.decompose(Net(kind, options).to(dtype).eval(), X.to(dtype))
    net.resize_(ratio=0.4)
    small, plain = net.extract(), kind(6, 8, **options).to(dtype)
    with torch.no_grad():
        for part, parameter in plain.named_parameters():
            what, _, which = part.partition("_")
            layer = getattr(small.layer, which)
            parameter.copy_(layer.bias if what == "bias" else layer.weight + torch.zeros(()))
    return small, plain


def states_for(plain, x, is_batched=True):
    torch.manual_seed(1)
    batch = x.shape[0 if plain.batch_first else 1] if is_batched else 1
    count = plain.num_layers * (2 if plain.bidirectional else 1)
    h = torch.randn(count, batch, plain.proj_size or plain.hidden_size, dtype=x.dtype)
    c = torch.randn(count, batch, plain.hidden_size, dtype=x.dtype)
    h, c = (h, c) if is_batched else (h[:, 0], c[:, 0])
    return (h, c) if plain.mode == "LSTM" else h


def ways(monkeypatch):
    """The two ways of a pass that nobody records: PyTorch's kernel, and the loop."""
    for is_fused in (True, False):
        monkeypatch.setattr(recurrence, "_can_be_fused", lambda *_, is_fused=is_fused: is_fused)
        yield is_fused


@pytest.mark.parametrize("name", KINDS)
def test_every_way_gives_what_pytorch_gives(name, monkeypatch):
    small, plain = make(name)
    for _ in ways(monkeypatch):
        for x, is_batched in ((X, True), (X[:1], True), (X[:, 0], False)):
            torch.testing.assert_close(small(x), plain(x))
            hx = states_for(plain, x, is_batched)
            torch.testing.assert_close(small(x, hx), plain(x, hx))


def leaves(returned):
    return [returned] if isinstance(returned, torch.Tensor) else [t for each in returned for t in leaves(each)]


@pytest.mark.parametrize("name", KINDS)
def test_every_way_has_the_same_gradients_twice(name, monkeypatch):
    small, _ = make(name)
    found = []
    for _ in ways(monkeypatch):
        x = X.clone().requires_grad_()
        wanted = [x, *small.parameters()]
        loss = sum(each.square().sum() for each in leaves(small(x)))
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), wanted, allow_unused=True)
        found.append((first, second))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("name", ["lstm", "gru", "lstm, projections"])
def test_in_single_precision_too(name):
    small, plain = make(name, torch.float32)
    x = X.float()
    torch.testing.assert_close(small(x), plain(x), atol=1e-5, rtol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(small(x), plain(x), atol=1e-5, rtol=1e-4)


def test_long_sequences_are_fused_and_short_ones_are_not(monkeypatch):
    small, _ = make("lstm")
    monkeypatch.setattr(recurrence, "_STEP", 200)
    seen = []
    fused = recurrence._fused
    monkeypatch.setattr(recurrence, "_fused", lambda *args: seen.append(len(args[1])) or fused(*args))
    small(X), small(X[:1])
    assert set(seen) == {len(X)}


def test_whoever_watches_a_layer_sees_every_step():
    small, plain = make("lstm")
    for watch in (nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook):
        seen = []
        hook = watch(small.layer.hh_l0, lambda *args: seen.append(args[1][0].shape))  # noqa: B023
        torch.testing.assert_close(small(X), plain(X))
        hook.remove()
        assert seen == [(3, 8)] * len(X)
    seen = []
    hook = small.layer.ih_l1[0].register_full_backward_hook(lambda *args: seen.append(args[0]))
    small(X)[0].sum().backward()
    hook.remove()
    assert seen == [small.layer.ih_l1[0]]
    seen = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    small(X)
    hook.remove()
    assert seen.count(small.layer.hh_l0) == len(X)


def test_a_layer_of_another_kind_is_called():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    small, _ = make("relu")
    before = small(X)[0]
    own = small.layer.ih_l0
    small.layer.ih_l0 = Doubled(6, 8, bias=False).double()
    small.layer.ih_l0.weight.data.copy_(own.weight / 2 + torch.zeros(()))
    torch.testing.assert_close(small(X)[0], before)


def test_counters_see_the_products_of_the_chain():
    small, _ = make("lstm")
    with FlopCounterMode(display=False) as counter:
        small(X)
    weights = sum(p.numel() for name, p in small.named_parameters() if name.endswith("weight"))
    assert counter.get_total_flops() == 2 * weights * X.shape[0] * X.shape[1]


def test_other_types_and_transforms_run_as_before():
    small, plain = make("gru", torch.float32)
    x = X.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert small(x)[0].isfinite().all()
    torch.testing.assert_close(small.bfloat16()(x.bfloat16())[0].float(), plain(x)[0], atol=0.1, rtol=0.1)
    small, plain = make("lstm")
    _, tangent = torch.func.jvp(lambda x: small(x)[0], (X,), (torch.ones_like(X),))
    eps = 1e-6
    with torch.no_grad():
        torch.testing.assert_close(tangent, (plain(X + eps)[0] - plain(X - eps)[0]) / (2 * eps), atol=1e-6, rtol=1e-5)
    each = torch.func.vmap(lambda x: small(x)[0])(torch.stack([X, 2 * X]))
    torch.testing.assert_close(each[1], plain(2 * X)[0])


def test_dropout_between_layers_is_that_of_the_module():
    torch.manual_seed(0)
    net = dn.decompose(nn.LSTM(6, 8, num_layers=2, dropout=0.9).double(), X)
    net.train()
    assert not torch.equal(net(X)[0], net(X)[0])
    net.eval()
    assert torch.equal(net(X)[0], net(X)[0])


def test_it_is_compiled_traced_and_exported():
    small, plain = make("lstm")
    expected = plain(X)[0]
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(small, backend="eager", fullgraph=True)(X)[0], expected)
        torch.testing.assert_close(torch.jit.trace(small, (X,))(X)[0], expected)
        program = torch.export.export(small, (X,), dynamic_shapes={"x": {0: torch.export.Dim("steps")}})
        kinds = [str(node.target) for node in program.graph.nodes]
        assert kinds.count("scan") == 4  # layers · directions
        torch.testing.assert_close(program.module()(X[:4])[0], plain(X[:4])[0])
