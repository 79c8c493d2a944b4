import copy
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from decomposable.core.forms import FORMS, form_for, matrix_form, to_matrix
from decomposable.core.layers import ChainLayers, avoid_fast_paths_, find_layers, require_layers
from decomposable.core.standin import StandIn
from decomposable.core.svd import svd
from decomposable.core.tree import rewire
from refusals import Saying, refused

some_layers = settings(deadline=None, derandomize=True, max_examples=80)
PADDING_MODES = ["zeros", "reflect", "replicate", "circular"]


def chain_of(module, form):
    return ChainLayers(module, FORMS[form].chain(module.weight.shape))


def from_factors(module, form, p, q, factory=None):
    weights = matrix_form(form).stages_of(p, q, module.weight.shape)
    return (factory or chain_of(module, form)).build(*(weight.contiguous() for weight in weights))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def at_full_rank(module: nn.Conv2d | nn.Linear, form: str) -> StandIn:
    """The two layers that hold all of the layer's SVD."""
    form = form_for(module.weight.shape, form)
    u, s, v = svd({"layer": to_matrix(module.weight.detach(), form)})["layer"]
    return from_factors(module, form, u, s[:, None] * v.mT)


def assert_same_output(module: nn.Module, form: str, x: torch.Tensor) -> None:
    torch.testing.assert_close(at_full_rank(module, form)(x), module(x), rtol=1e-10, atol=1e-10)


@st.composite
def convolutions(draw):
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    widths = st.tuples(st.integers(0, 3), st.integers(0, 3))
    padding = draw(st.one_of(st.sampled_from(["same", "valid"]), widths))
    return nn.Conv2d(
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        kernel_size=draw(st.tuples(st.integers(1, 4), st.integers(1, 4))),
        stride=1 if padding == "same" else draw(pair),  # PyTorch refuses strides with "same"
        padding=padding,
        dilation=draw(pair),
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(PADDING_MODES)),
        dtype=torch.float64,
    )


# The two layers that stand in for one


@some_layers
@given(conv=convolutions(), form=st.sampled_from(["channel", "spatial"]), is_batched=st.booleans())
def test_two_factors_of_full_rank_compute_the_convolution(conv, form, is_batched):
    x = torch.randn(2, conv.in_channels, 13, 14, dtype=torch.float64)
    assert_same_output(conv, form, x if is_batched else x[0])


@pytest.mark.parametrize("padding_mode", PADDING_MODES)
@pytest.mark.parametrize("padding", ["same", "valid", (2, 1)])
@pytest.mark.parametrize("form", ["channel", "spatial"])
def test_every_padding_of_an_even_kernel_splits_exactly(form, padding, padding_mode):
    conv = nn.Conv2d(3, 5, (4, 2), padding=padding, padding_mode=padding_mode, dtype=torch.float64)
    assert_same_output(conv, form, torch.randn(2, 3, 9, 8, dtype=torch.float64))


@some_layers
@given(
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    bias=st.booleans(),
    axes=st.lists(st.integers(1, 3), max_size=3),
)
def test_two_factors_of_full_rank_compute_the_linear_layer_on_any_number_of_axes(sizes, bias, axes):
    linear = nn.Linear(*sizes, bias=bias, dtype=torch.float64)
    assert_same_output(linear, "spatial", torch.randn(*axes, sizes[0], dtype=torch.float64))


@pytest.mark.parametrize("form", ["channel", "spatial"])
def test_the_pair_is_two_plain_layers_that_say_their_sizes(form):
    conv = nn.Conv2d(6, 8, (3, 5), stride=(2, 1), padding=(1, 2))
    first, second = at_full_rank(conv, form)
    rank = first.out_channels
    assert type(first) is type(second) is nn.Conv2d
    assert (first.in_channels, second.in_channels, second.out_channels) == (6, rank, 8)
    assert first.weight.shape[0] == second.weight.shape[1] == rank


def test_spatial_form_splits_the_geometry_by_axis():
    conv = nn.Conv2d(4, 4, (3, 5), stride=(2, 3), padding=(1, 2), dilation=(1, 2))
    first, second = at_full_rank(conv, "spatial")
    assert (first.kernel_size, second.kernel_size) == ((1, 5), (3, 1))
    assert (first.stride, second.stride) == ((1, 3), (2, 1))
    assert (first.padding, second.padding) == ((0, 2), (1, 0))
    assert (first.dilation, second.dilation) == ((1, 2), (1, 1))


def test_channel_form_leaves_the_geometry_to_the_first_layer():
    conv = nn.Conv2d(4, 4, (3, 5), stride=(2, 3), padding=(1, 2), dilation=(1, 2))
    first, second = at_full_rank(conv, "channel")
    for option in ("kernel_size", "stride", "padding", "dilation"):
        assert getattr(first, option) == getattr(conv, option)
    assert (second.kernel_size, second.stride, second.padding) == ((1, 1), (1, 1), (0, 0))


@pytest.mark.parametrize("module", [nn.Conv2d(3, 4, 3), nn.Linear(3, 4)], ids=["conv", "linear"])
def test_the_bias_is_the_layers_own_and_sits_in_the_second_layer(module):
    first, second = at_full_rank(module, "spatial")
    assert first.bias is None
    assert second.bias is module.bias


def test_weights_are_used_as_they_are():
    linear = nn.Linear(5, 4)
    first, second = nn.Parameter(torch.randn(2, 5)), torch.randn(4, 2)
    pair = chain_of(linear, "channel").build(first, second)
    assert pair[0].weight is first
    assert pair[1].weight is second
    assert set(map(id, pair.parameters())) == {id(first), id(linear.bias)}


def test_building_a_pair_leaves_the_layer_and_earlier_pairs_alone():
    conv = nn.Conv2d(3, 4, 3)
    before = copy.deepcopy(conv.state_dict())
    factory = chain_of(conv, "spatial")
    one = from_factors(conv, "spatial", torch.ones(9, 2), torch.ones(2, 12), factory)
    other = from_factors(conv, "spatial", torch.zeros(9, 5), torch.zeros(5, 12), factory)
    assert (one[0].out_channels, other[0].out_channels) == (2, 5)
    assert (one[0].weight == 1).all()
    assert all(torch.equal(conv.state_dict()[k], v) for k, v in before.items())


def test_the_pair_has_the_training_flag_of_the_layer():
    assert not at_full_rank(nn.Linear(4, 3).eval(), "channel").training
    assert at_full_rank(nn.Linear(4, 3), "channel").training


def test_gradients_flow_to_weights_that_are_results_of_a_computation():
    linear = nn.Linear(5, 4)
    p, q = torch.randn(5, 2, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    from_factors(linear, "channel", p, q)(torch.randn(3, 5)).square().sum().backward()
    assert p.grad.norm() > 0
    assert q.grad.norm() > 0


# Which layers are decomposed


ONLY = "only convolutions and Linear are decomposed"


def names(model: nn.Module, form: str = "spatial", **options) -> list[str]:
    return [layer.name for layer in find_layers(model, form, **options)[0]]


def reasons(model: nn.Module, **options) -> dict[str, str]:
    return find_layers(model, "spatial", **options)[1]


def test_convolutions_and_linear_layers_are_found_in_order_with_their_full_ranks():
    model = nn.Sequential(nn.Conv2d(3, 8, (3, 5)), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4, 9))
    layers, skipped = find_layers(model, "spatial")
    assert [(layer.name, layer.form, layer.full_rank) for layer in layers] == [
        ("0", "spatial", 15),  # (3·5) × (8·3)
        ("2", "channel", 4),  # 8 × 4
        ("4", "channel", 4),  # 4 × 9
    ]
    assert skipped == {}


def test_pointwise_convolutions_take_the_channel_form():
    (layer,), _ = find_layers(nn.Sequential(nn.Conv2d(4, 6, 1)), "spatial")
    assert layer.form == "channel"


def test_the_model_itself_may_be_the_layer():
    (layer,), _ = find_layers(nn.Linear(3, 4), "channel")
    assert layer.name == ""


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class DoubledConv(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return 2 * super()._conv_forward(x, weight, bias)


class Renamed(nn.Linear):
    """A subclass with nothing of its own in the forward pass."""


LEFT_ALONE = {
    "grouped": (nn.Conv2d(4, 4, 3, groups=2), r"grouped convolution \(groups=2\)"),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4), "depthwise convolution"),
    "transposed, in groups": (nn.ConvTranspose2d(4, 4, 3, groups=2), r"grouped convolution \(groups=2\)"),
    "transposed, depthwise": (nn.ConvTranspose1d(4, 4, 3, groups=4), "depthwise convolution"),
    "three axes, in groups": (nn.Conv3d(4, 4, 3, groups=2), r"grouped convolution \(groups=2\)"),
    "weight norm": (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "weight is computed"),
    "spectral norm": (nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 3)), "weight is computed"),
    "lazy linear": (nn.LazyLinear(4), "lazy layer"),
    "lazy conv": (nn.LazyConv2d(4, 3), "lazy layer"),
    "own forward": (Doubled(4, 4), "Doubled has a forward of its own"),
    "own convolution": (DoubledConv(4, 4, 3), "DoubledConv has a forward of its own"),
    "complex": (nn.Linear(4, 4, dtype=torch.complex64), "dtype torch.complex64"),
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_what_cannot_be_decomposed_is_left_alone_with_its_reason(kind):
    module, reason = LEFT_ALONE[kind]
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(module))
    assert names(model) == ["0"]
    assert re.search(reason, reasons(model)["1.0"])


def test_weight_norm_of_the_older_kind_is_left_alone():
    module = nn.utils.weight_norm(nn.Linear(4, 4))
    assert "weight is computed" in reasons(nn.Sequential(module))["0"]


def test_pruned_layers_are_left_alone():
    module = nn.Linear(4, 4)
    prune.random_unstructured(module, "weight", amount=0.5)
    assert "weight is computed" in reasons(nn.Sequential(module))["0"]


def test_a_layer_whose_forward_was_replaced_on_the_object_is_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain = model[0].forward
    model[0].forward = lambda x: 2 * plain(x)
    assert names(model) == ["1"]
    assert "forward of its own" in reasons(model)["0"]


def test_a_subclass_that_only_has_another_name_is_decomposed():
    assert names(nn.Sequential(Renamed(4, 4))) == ["0"]


def test_packed_attention_and_its_output_projection_are_left_alone():
    model = nn.TransformerEncoderLayer(8, 2, 16)
    assert names(model) == ["linear1", "linear2"]
    assert reasons(model) == {
        "self_attn": "packed attention weights",
        "self_attn.out_proj": "read directly by packed attention",
    }


def test_filter_fn_sees_module_and_name_and_its_rejects_are_listed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Conv2d(3, 3, 3)))
    seen = {}

    def only_linear(module, name):
        seen[name] = module
        return isinstance(module, nn.Linear)

    assert names(model, filter_fn=only_linear) == ["0"]
    assert reasons(model, filter_fn=only_linear) == {"1.0": "rejected by filter_fn"}
    assert seen == {"0": model[0], "1.0": model[1][0]}


def tied(first: nn.Module, second: nn.Module) -> nn.Sequential:
    second.weight = first.weight
    return nn.Sequential(first, second)


def test_a_weight_shared_by_two_layers_is_one_layer_under_the_first_name():
    model = tied(nn.Linear(4, 4), nn.Linear(4, 4))
    (layer,), skipped = find_layers(model, "spatial")
    assert layer.name == "0"
    assert layer.modules == (model[0], model[1])
    assert skipped == {}


def test_a_linear_layer_tied_to_an_embedding_is_left_alone():
    model = tied(nn.Embedding(9, 4), nn.Linear(4, 9))
    assert names(model) == []
    assert reasons(model) == {"0": f"Embedding: {ONLY}", "1": "weight tied to embedding '0'"}


@pytest.mark.parametrize("order", [1, -1])
def test_a_weight_shared_with_a_rejected_layer_is_left_alone(order):
    model = tied(nn.Linear(4, 4), nn.Linear(4, 4))
    kept, rejected = ("0", "1")[::order]
    found, skipped = find_layers(model, "spatial", lambda module, name: name != rejected)
    assert found == ()
    assert skipped == {rejected: "rejected by filter_fn", kept: f"weight tied to Linear '{rejected}'"}


def test_a_weight_that_a_module_of_another_kind_holds_too_is_left_alone():
    class Own(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.matrix = weight

    linear = nn.Linear(4, 4)
    skipped = reasons(nn.Sequential(linear, Own(linear.weight)))
    assert skipped == {"0": "weight tied to Own '1'", "1": f"Own: {ONLY}"}


def test_a_module_used_in_two_places_is_one_layer():
    linear = nn.Linear(4, 4)
    (layer,), _ = find_layers(nn.Sequential(linear, nn.ReLU(), linear), "spatial")
    assert layer.modules == (linear,)


def test_compiled_children_keep_their_plain_names():
    model = nn.Sequential(torch.compile(nn.Sequential(nn.Linear(3, 3)), backend="eager"), nn.Conv1d(3, 3, 1, groups=3))
    assert names(model) == ["0.0"]
    assert list(reasons(model)) == ["1"]


class Own(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(shape))


def test_every_other_module_with_weights_of_its_own_is_listed():
    model = nn.Sequential(
        nn.Embedding(3, 4), nn.LSTM(4, 4), nn.ReLU(), nn.GRUCell(4, 4), nn.Bilinear(2, 2, 2), Own(3, 3)
    )
    kinds = {"0": "Embedding", "1": "LSTM", "3": "GRUCell", "4": "Bilinear", "5": "Own"}
    assert reasons(model) == {name: f"{kind}: {ONLY}" for name, kind in kinds.items()}


def test_scales_and_shifts_are_listed_only_where_they_are_many():
    few = nn.Sequential(nn.Linear(30, 30), nn.LayerNorm(10), nn.BatchNorm2d(9), Own(1, 20))
    assert reasons(few) == {}
    many = nn.Sequential(nn.Linear(10, 10), nn.LayerNorm(50), nn.PReLU())
    assert reasons(many) == {"1": f"LayerNorm: {ONLY}"}


@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
def test_a_layer_that_holds_more_than_weight_and_bias_is_left_alone(kind):
    """The two factors would not have it."""
    linear = nn.Linear(4, 4)
    if kind == "parameter":
        linear.scale = nn.Parameter(torch.ones(4))
    elif kind == "buffer":
        linear.register_buffer("scale", torch.ones(4))
    else:
        linear.scale = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), linear)
    assert names(model) == ["0"]
    assert reasons(model) == {"1": "it holds more than weight and bias ('scale')"}


def test_nothing_to_decompose_is_an_error_that_says_why():
    model = nn.Sequential(nn.ConvTranspose1d(3, 3, 1, groups=3))
    with refused("model", {"0": Saying("^depthwise")}, Saying("at least one convolution")):
        require_layers(*find_layers(model, "spatial"))
    with refused("model", {}):
        require_layers(*find_layers(nn.ReLU(), "spatial"))


def test_half_precision_layers_are_decomposed():
    assert names(nn.Sequential(nn.Linear(4, 4).half(), nn.Conv2d(3, 3, 3).bfloat16())) == ["0", "1"]


@pytest.mark.parametrize("is_stacked", [False, True])
def test_transformers_in_eval_mode_run_the_layers_that_replace_theirs(is_stacked):
    """Their fast paths would read the weights of layers that are no longer there."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64)
    if is_stacked:
        model = nn.TransformerEncoder(model, 2)
    model = model.eval().requires_grad_(False)
    found = [module for layer in find_layers(model, "spatial")[0] for module in layer.modules]
    twin = rewire(model, {module: at_full_rank(module, "spatial") for module in found})
    avoid_fast_paths_(twin)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    options = {"src_key_padding_mask": torch.tensor([[False, False, True], [False] * 3])}
    kept = ~options["src_key_padding_mask"]
    torch.testing.assert_close(twin(x, **options)[kept], model(x, **options)[kept], rtol=1e-8, atol=1e-8)


def test_truncated_factors_approximate_the_layer():
    """Not only at full rank: what the pair computes is the layer with the truncated weight."""
    conv = nn.Conv2d(4, 5, 3, padding=1, dtype=torch.float64)
    u, s, v = svd({"layer": to_matrix(conv.weight.detach(), "channel")})["layer"]
    pair = from_factors(conv, "channel", u[:, :2], s[:2, None] * v[:, :2].mT)
    left, sigma, right = torch.linalg.svd(conv.weight.flatten(1), full_matrices=False)
    low = (left[:, :2] * sigma[:2] @ right[:2]).view_as(conv.weight)
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(pair(x), F.conv2d(x, low, conv.bias, padding=1), rtol=1e-8, atol=1e-8)
