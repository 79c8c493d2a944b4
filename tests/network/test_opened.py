"""Attention and recurrent layers all the way: trained jointly, decomposed, resized, tuned, loaded and exported."""

import numpy as np
import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable.core.gradients import norm
from decomposable.elastic import ElasticOptions
from decomposable.network.artifact import save_size, size_state_dict
from refusals import Saying, refused

X = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(0))


class Tagger(nn.Module):
    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.recurrent = kind(16, 24, batch_first=True, **options)
        self.head = nn.Linear(24 * (2 if options.get("bidirectional") else 1), 4)

    def forward(self, x):
        return self.head(self.recurrent(x)[0])


class Translator(nn.Module):
    """An encoder and a decoder, which attends to itself and to the other."""

    def __init__(self):
        super().__init__()
        self.body = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x, x[:, :4]))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x))


MODELS = {
    "lstm": Tagger,
    "gru, both ways": lambda: Tagger(nn.GRU, num_layers=2, bidirectional=True),
    "encoder": Encoder,
    "translator": Translator,
}


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


@pytest.mark.parametrize("name", MODELS)
def test_it_is_decomposed_resized_saved_and_loaded(name, tmp_path):
    model = make(name)
    net = dn.decompose(model, X)
    assert {reason.split(";")[0] for reason in net.skipped.values()} <= {
        "products of two activations, as inside attention, which have no weights"
    }
    assert net.selector.smallest_size < 0.35
    path = tmp_path / "net.safetensors"
    net.save(path)
    again = dn.load(path, model=make(name))
    with torch.no_grad():
        torch.testing.assert_close(net(X), model(X))
        for size in (1.0, 0.6, net.selector.smallest_size):
            plan = net.resize_(macs=size)
            small = net.extract()
            assert torch.equal(again.extract(again.plan(macs=size))(X), small(X))
            torch.testing.assert_close(small(X), net(X))
            assert sum(p.numel() for p in small.parameters()) == plan.params
            assert net.macs_for(X) == plan.macs
            state = size_state_dict(net.artifact(), plan)
            assert list(state) == list(small.state_dict())
            save_size(net, plan, tmp_path / "size.safetensors")
            torch.testing.assert_close(dn.load(tmp_path / "size.safetensors", model=make(name))(X), net(X))
        net.resize_(macs=0.6)
        torch.testing.assert_close(dn.load(path, model=make(name), macs=0.6)(X), net(X))


def test_another_model_is_refused(tmp_path):
    dn.decompose(make("lstm"), X).save(tmp_path / "net.safetensors")
    with refused("model", "recurrent"):
        dn.load(tmp_path / "net.safetensors", model=make("encoder"))
    with refused("model", Saying("layer 'recurrent")):
        dn.load(tmp_path / "net.safetensors", model=Tagger(nn.GRU))


@pytest.mark.parametrize("name", ["lstm", "encoder"])
def test_what_is_rejected_stays_closed_as_in_files_of_before(name, tmp_path):
    model = make(name)
    net = dn.decompose(model, X, filter_fn=lambda _, name: not ("recurrent" in name or "self_attn" in name))
    kinds = {type(module) for module in net.module.modules()}
    assert kinds & {nn.LSTM, nn.MultiheadAttention}
    assert any(reason.startswith("rejected by filter_fn") for reason in net.skipped.values())
    net.save(tmp_path / "net.safetensors")
    again = dn.load(tmp_path / "net.safetensors", model=make(name))
    with torch.no_grad():
        torch.testing.assert_close(again(X), model(X))


@pytest.mark.parametrize("name", MODELS)
def test_the_low_rank_network_has_the_users_parameters(name):
    model = make(name).train()
    joint, names = dn.JointObjective(model, ratio=0.3), dict(model.named_parameters())
    seen = []

    def closure(net):
        seen.append(dict(net.named_parameters()))
        return net(X).square().mean()

    joint.backward(closure)
    assert seen[0].keys() == seen[1].keys() == names.keys()
    assert all(seen[1][name] is parameter is seen[0][name] for name, parameter in names.items())
    assert all(parameter.grad is not None for parameter in names.values())
    assert type(model.get_submodule("head")) is nn.Linear


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_rebalanced_weight_by_weight(name):
    """(1 − λ) ∇_f + λ ∇ ‖∇_f‖/‖∇‖ for each projection of a packed weight, and the plain mean for all else."""
    model = make(name).double()
    x = X.double()
    joint = dn.JointObjective(model, ratio=0.3, balance=0.3)
    full, low = joint.gradients(lambda net: net(x).square().mean())
    joint.backward(lambda net: net(x).square().mean())
    wanted = {p: 0.7 * full[p] + 0.3 * low[p] for p in full}
    for layer in joint.layers:
        one, other = (layer.cut.of(each[layer.parameter]) for each in (full, low))
        layer.cut.of(wanted[layer.parameter]).copy_(0.7 * one + 0.3 * other * norm(one) / norm(other))
    for parameter, expected in wanted.items():
        torch.testing.assert_close(parameter.grad, expected)


def test_full_rank_is_the_full_network():
    model = make("encoder")
    joint = dn.JointObjective(model, ratio=1.0)
    losses = joint.backward(lambda net: net(X).square().mean())
    torch.testing.assert_close(losses.low, losses.full)


@pytest.mark.parametrize("name", MODELS)
def test_turns_budgets_and_resuming(name):
    def objective(model):
        options = ElasticOptions(macs=(0.4, 0.8), low_steps_per_full=1, refresh=2)
        return dn.Elastic(model, example_input=X, steps=100, distance=distance, seed=1, options=options)

    def distance(low, full):
        return nn.functional.mse_loss(low, full)

    def steps(model, joint, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            joint.backward(forward=lambda net: net(X), loss=lambda out: out.square().mean())
            optimizer.step()

    def begun():
        model = make(name)
        return model, objective(model), torch.optim.SGD(model.parameters(), lr=0.1)

    model, joint, optimizer = begun()
    steps(model, joint, optimizer, 4)
    state, weights = joint.state_dict(), {key: value.clone() for key, value in model.state_dict().items()}
    steps(model, joint, optimizer, 4)
    other, again, sgd = begun()
    other.load_state_dict(weights)
    again.load_state_dict(state)
    steps(other, again, sgd, 4)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", ["lstm", "encoder"])
def test_it_is_tuned_and_cut_by_data(name):
    net = dn.decompose(make(name), data=[X] * 4, criterion="output")
    report = net.tune_([X] * 4, sizes=[0.5], steps=5, distance=lambda low, full: (low - full).square().mean())
    assert report.after[0] <= report.before[0]
    net.resize_(macs=0.5)
    assert net(X).isfinite().all()


def test_packed_batches_at_a_smaller_size():
    class Packed(Tagger):
        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(x, [7, 5, 2], batch_first=True)
            return self.head(self.recurrent(packed)[1][0][-1])

    torch.manual_seed(0)
    model = Packed().eval()
    net = dn.decompose(model, X)
    with torch.no_grad():
        torch.testing.assert_close(net(X), model(X))
        net.resize_(macs=0.5)
        assert net(X).shape == (3, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_it_is_exported_and_run_at_any_size(name, tmp_path):
    edge = pytest.importorskip("decomposable_edge")
    pytest.importorskip("onnxscript")
    net = dn.decompose(make(name), X)
    dynamic = {"input": {1: "length"}} if name == "encoder" else None  # a loop over time has so many steps
    net.save(tmp_path / "net.safetensors", onnx=True, dynamic=dynamic)
    session = edge.AnySizeSession(tmp_path / "net.safetensors")
    for size in (1.0, 0.6, net.selector.smallest_size):
        net.resize_(macs=size)
        session.resize(macs=size, align=1)
        for x in (X, X[:1, :5]) if dynamic else (X, X[:1]):
            np.testing.assert_allclose(session.run(x.numpy()), net(x).detach().numpy(), rtol=1e-3, atol=1e-4)


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)
        self.head = nn.Linear(16, 4)

    def forward(self, x, mask):
        return self.head(self.body(x, src_key_padding_mask=mask))


def test_an_encoder_with_a_padding_mask():
    torch.manual_seed(0)
    model, mask = Padded().eval(), torch.zeros(3, 7, dtype=torch.bool)
    mask[0, 5:] = True
    batch = {"x": X, "mask": mask}
    net = dn.decompose(model, batch, forward=lambda net, b: net(**b))
    seen = ~mask
    torch.testing.assert_close(net(**batch)[seen], model(**batch)[seen], rtol=1e-4, atol=1e-5)
    net.resize_(macs=0.6)
    assert net(**batch)[seen].isfinite().all()
    joint = dn.JointObjective(model, macs=(0.4, 0.8), example_input=batch, forward=lambda net, b: net(**b))
    joint.backward(lambda net: net(**batch).square().mean())
    assert model.body.use_nested_tensor  # the user's model stays as it is


class Reader(nn.Module):
    """Reads a weight of its recurrent layer, or asks for its class."""

    def __init__(self, how):
        super().__init__()
        self.first, self.recurrent, self.head = nn.Linear(16, 16), nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 4)
        self.how = how

    def forward(self, x):
        if self.how == "weight":
            state = torch.zeros(1, len(x), 24, device=self.recurrent.weight_hh_l0.device)
            return self.head(self.recurrent(self.first(x), (state, state))[0])
        if not isinstance(self.recurrent, nn.LSTM):
            raise TypeError("an LSTM is needed")
        return self.head(self.recurrent(self.first(x))[0])


@pytest.mark.parametrize("how", ["weight", "class"])
def test_a_module_that_the_model_needs_as_it_is_stays_closed(how):
    torch.manual_seed(0)
    model = Reader(how).eval()
    net = dn.decompose(model, X)
    assert "recurrent" in net.skipped
    assert "the model does not run without it" in net.skipped["recurrent"]
    assert {layer.name for layer in net.layers} == {"first", "head"}
    torch.testing.assert_close(net(X), model(X), rtol=1e-4, atol=1e-5)
    net.resize_(ratio=0.3)
    assert net(X).isfinite().all()


def test_a_model_that_fails_itself_says_so():
    class Broken(Tagger):
        def forward(self, x):
            raise ValueError("broken from the start")

    with pytest.raises(ValueError, match="broken from the start"):
        dn.decompose(Broken().eval(), X)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_recurrent_layers_under_autocast(kind):
    torch.manual_seed(0)
    model = Tagger(kind).eval()
    net = dn.decompose(model, X)
    net.resize_(macs=0.6)
    joint = dn.JointObjective(model, ratio=(0.2, 0.5))
    with torch.autocast("cpu", torch.bfloat16):
        assert net(X).isfinite().all()
        joint.backward(lambda net: net(X).float().square().mean())
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["lstm", "encoder"])
def test_one_sample_without_a_batch_costs_what_a_batch_of_one_does(name):
    one = dn.decompose(make(name), X[:1]).plan().macs
    assert dn.decompose(make(name), X[0]).plan().macs == one
    assert dn.decompose(make(name), X[0], filter_fn=lambda module, name: name == "head").plan().macs == one
