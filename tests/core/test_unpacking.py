"""Modules with several weights, opened: the same outputs, and the same gradients for the user's own parameters."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from decomposable.core.unpacked import opened, replaceable
from decomposable.core.unpacking.parts import Copies, ViewLinear

KINDS = [ViewLinear, Copies()]


def both(module, make):
    return module, opened(module, make)


def check_same(module, twin, *args, **kwargs):
    expected, found = module(*args, **kwargs), twin(*args, **kwargs)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 6, "vdim": 10}, {"batch_first": True}])
@pytest.mark.parametrize("need_weights", [True, False])
def test_attention(make, options, need_weights):
    torch.manual_seed(0)
    module, twin = both(nn.MultiheadAttention(8, 2, **options).double(), make)
    q = torch.randn(5, 5, 8).double()
    k, v = (torch.randn(5, 5, options.get(key, 8)).double() for key in ("kdim", "vdim"))
    padding = torch.zeros(5, 5, dtype=torch.bool)
    padding[0, 3:] = True
    masks = [
        {},
        {"key_padding_mask": padding},
        {"attn_mask": nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.double), "is_causal": True},
        {"attn_mask": torch.randn(10, 5, 5).double(), "key_padding_mask": torch.zeros(5, 5).double()},
        {"average_attn_weights": False},
    ]
    for given in masks:
        check_same(module, twin, q, k, v, need_weights=need_weights, **given)
    check_same(module, twin, q[0], k[0], v[0], need_weights=need_weights, key_padding_mask=padding[0])
    check_same(module, twin, q[0], k[0], v[0], need_weights=need_weights, attn_mask=torch.randn(2, 5, 5).double())


def test_attention_needs_a_mask_for_its_hint():
    _, twin = both(nn.MultiheadAttention(8, 2), ViewLinear)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        twin(*[torch.zeros(1, 3, 8)] * 3, is_causal=True)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bidirectional": True}],
)
def test_recurrent(make, kind, options):
    torch.manual_seed(0)
    module, twin = both(kind(6, 5, **options).double(), make)
    x = torch.randn(4, 4, 6).double()
    ways = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    states = [torch.randn(ways, 4, 5).double() for _ in range(2)]
    hx = tuple(states) if kind is nn.LSTM else states[0]
    check_same(module, twin, x)
    check_same(module, twin, x, hx)
    single = tuple(each[:, 0] for each in states) if kind is nn.LSTM else states[0][:, 0]
    check_same(module, twin, x[0], single)
    packed = pack_sequence([torch.randn(n, 6).double() for n in (2, 5, 1, 5)], enforce_sorted=False)
    check_same(module, twin, packed, hx)
    check_same(module, twin, packed)


def test_recurrent_projections_and_relu():
    module, twin = both(nn.LSTM(6, 5, proj_size=3, num_layers=2), ViewLinear)
    check_same(module, twin, torch.randn(4, 2, 6))
    module, twin = both(nn.RNN(6, 5, nonlinearity="relu"), ViewLinear)
    check_same(module, twin, torch.randn(4, 2, 6))


def test_views_lead_gradients_to_the_users_parameters():
    torch.manual_seed(0)
    attention, lstm = nn.MultiheadAttention(8, 2, batch_first=True).double(), nn.LSTM(8, 4, batch_first=True).double()
    x = torch.randn(3, 5, 8).double()
    for module, run in ((attention, lambda net: net(x, x, x)[0]), (lstm, lambda net: net(x)[0])):
        twin, parameters = opened(module, ViewLinear), list(module.parameters())
        wanted = torch.autograd.grad(run(module).square().sum(), parameters)
        found = torch.autograd.grad(run(twin).square().sum(), parameters)
        torch.testing.assert_close(found, wanted)


def test_copies_of_one_weight_stay_one():
    model = nn.Sequential(nn.GRU(4, 4), nn.GRU(4, 4))
    model[1].weight_hh_l0 = model[0].weight_hh_l0
    make = Copies()
    one, other = (opened(module, make) for module in model)
    assert one.hh_l0.weight is other.hh_l0.weight
    assert one.ih_l0.weight is not other.ih_l0.weight
    assert one.hh_l0.weight is not model[0].weight_hh_l0


def test_what_cannot_be_opened_is_not():
    class Own(nn.LSTM):
        def forward(self, x):
            return super().forward(x)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.linear = nn.LSTM(4, 4), nn.Linear(4, 16)
            self.linear.weight = self.lstm.weight_ih_l0

    for model in (Own(4, 4), Tied(), nn.MultiheadAttention(4, 1, add_zero_attn=True), nn.LSTMCell(4, 4)):
        assert replaceable(model, in_training=True) == {}
    assert set(replaceable(nn.TransformerDecoderLayer(8, 2))) == {"self_attn", "multihead_attn"}
