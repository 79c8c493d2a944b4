import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from decomposable.core.layers import ChainLayers, find_layers
from decomposable.core.tracing import call_with_first, layer_costs, not_counted, other_macs, trace
from decomposable.core.tree import rewire

some_networks = settings(deadline=None, derandomize=True, max_examples=30)
FORMS = ["channel", "spatial"]


def macs_as_torch_counts_them(model: nn.Module, x: torch.Tensor) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(x)
    assert counter.get_total_flops() % 2 == 0
    return counter.get_total_flops() // 2


def costs(model: nn.Module, x, form: str = "spatial", **options):
    """(cost by layer name, MACs of everything else)."""
    layers, _ = find_layers(model, form)
    seen = trace(model, x, **options)
    return {cost.name: cost for cost in layer_costs(layers, seen)}, other_macs(layers, seen)


def total_macs(model: nn.Module, x, form: str = "spatial", **options) -> int:
    by_layer, others = costs(model, x, form, **options)
    return others + sum(cost.dense_macs for cost in by_layer.values())


def with_two_factors(model: nn.Module, form: str, ranks: dict[str, int]) -> nn.Module:
    """The model with every layer as two factors of the given rank."""
    replacements = {}
    for layer in find_layers(model, form)[0]:
        chain = ChainLayers(layer.modules[0], layer.chain)
        rank, (outputs, inputs, *kernel) = ranks[layer.name], layer.shape
        shapes = (rank, inputs, *kernel), (outputs, rank, *(1 for _ in kernel))
        if layer.form == "spatial":
            shapes = (rank, inputs, 1, kernel[1]), (outputs, rank, kernel[0], 1)
        for module in layer.modules:
            replacements[module] = chain.build(*map(torch.zeros, shapes))
    return rewire(model, replacements)


@st.composite
def cnns(draw) -> nn.Sequential:
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    layers, width = [], 3
    for _ in range(draw(st.integers(1, 3))):
        out = draw(st.integers(1, 6))
        kernel = draw(pair)
        layers += [
            nn.Conv2d(
                width,
                out,
                kernel,
                stride=draw(pair),
                padding=draw(st.tuples(st.integers(0, 2), st.integers(0, 2))),
                dilation=draw(st.integers(1, 2)),
                bias=draw(st.booleans()),
            ),
            nn.BatchNorm2d(out),
            nn.ReLU(),
        ]
        width = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))


IMAGES = torch.zeros(1, 3, 45, 38)


@some_networks
@given(model=cnns())
def test_dense_macs_agree_with_the_flop_counter(model):
    assert total_macs(model, IMAGES) == macs_as_torch_counts_them(model, IMAGES)


@pytest.mark.parametrize("form", FORMS)
@some_networks
@given(model=cnns(), data=st.data())
def test_macs_of_two_factors_agree_with_the_flop_counter(form, model, data):
    by_layer, others = costs(model, IMAGES, form)
    ranks = {name: data.draw(st.integers(1, cost.full_rank)) for name, cost in by_layer.items()}
    factored = with_two_factors(model, form, ranks)
    formula = others + sum(cost.macs(ranks[name], dense=False) for name, cost in by_layer.items())
    assert formula == macs_as_torch_counts_them(factored, IMAGES)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
def test_same_padding_is_counted(form, padding_mode):
    model = nn.Sequential(nn.Conv2d(3, 5, (4, 3), padding="same", padding_mode=padding_mode))
    by_layer, _ = costs(model, IMAGES, form)
    assert by_layer["0"].dense_macs == macs_as_torch_counts_them(model, IMAGES)
    assert by_layer["0"].macs(2, dense=False) == macs_as_torch_counts_them(
        with_two_factors(model, form, {"0": 2}), IMAGES
    )


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(6, 8, 3, groups=2, stride=2),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.ConvTranspose2d(6, 4, (2, 3), groups=2),
    ],
    ids=["grouped", "depthwise", "transposed and grouped"],
)
def test_layers_left_alone_agree_with_the_flop_counter(module):
    x = torch.zeros(1, 6, 9, 7)
    model = nn.Sequential(module)
    by_layer, others = costs(model, x)
    assert by_layer == {}
    assert others == macs_as_torch_counts_them(model, x)


@pytest.mark.parametrize(("module", "shape"), [(nn.Conv1d(6, 4, 3), (1, 6, 9)), (nn.Conv3d(6, 4, 2), (1, 6, 5, 4, 3))])
def test_convolutions_of_other_dimensions_agree_with_the_flop_counter(module, shape):
    x = torch.zeros(shape)
    assert total_macs(module, x) == macs_as_torch_counts_them(module, x)


@pytest.mark.parametrize("form", FORMS)
def test_spatial_first_factor_runs_at_input_height_and_output_width(form):
    """The convention of the paper, by hand: 45 × 38 pixels, strides 2 and 3."""
    conv = nn.Conv2d(3, 8, 3, stride=(2, 3), padding=1)
    by_layer, _ = costs(nn.Sequential(conv), IMAGES, form)
    rows_out, columns_out = 23, 13
    by_hand = {
        "channel": (27 + 8) * rows_out * columns_out,
        "spatial": 9 * 45 * columns_out + 24 * rows_out * columns_out,
    }
    assert by_layer["0"].macs_per_rank == by_hand[form]
    assert by_layer["0"].dense_macs == 8 * 27 * rows_out * columns_out


def test_macs_are_per_sample():
    model = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.Conv2d(6, 6, 3, groups=3), nn.Flatten(), nn.Linear(150, 5))
    one, *others = (total_macs(model, torch.zeros(n, 3, 15, 15)) for n in (1, 2, 7))
    assert set(others) == {one}


def test_an_unbatched_image_is_one_sample():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, (1, 3), stride=2))
    assert total_macs(model, torch.zeros(3, 9, 11)) == total_macs(model, torch.zeros(5, 3, 9, 11))


def test_an_unbatched_vector_is_one_sample():
    assert total_macs(nn.Linear(6, 5), torch.zeros(6)) == 30


def test_a_linear_layer_counts_every_position():
    model = nn.Linear(6, 5)
    x = torch.zeros(3, 4, 7, 6)
    assert total_macs(model, x) == 4 * 7 * 30


def test_a_module_used_twice_counts_twice():
    shared = nn.Conv2d(3, 3, 3, padding=1)
    model = nn.Sequential(shared, nn.MaxPool2d(2), shared)
    assert total_macs(model, IMAGES) == macs_as_torch_counts_them(model, IMAGES)
    by_layer, _ = costs(model, IMAGES, "spatial")
    factored = with_two_factors(model, "spatial", {"0": 2})
    assert by_layer["0"].macs(2, dense=False) == macs_as_torch_counts_them(factored, IMAGES)


def test_a_weight_shared_by_two_layers_counts_at_both_and_its_parameters_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    by_layer, _ = costs(model, torch.zeros(2, 4))
    assert by_layer["0"].dense_macs == 32
    assert by_layer["0"].dense_params == 16
    assert by_layer["0"].macs_per_rank == 16
    assert by_layer["0"].params_per_rank == 8


def test_a_layer_that_does_not_run_costs_no_macs():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x)

    by_layer, _ = costs(Lazy(), torch.zeros(1, 3))
    assert (by_layer["used"].dense_macs, by_layer["unused"].dense_macs) == (9, 0)
    assert by_layer["unused"].dense_params == 9


def test_layers_called_by_keyword_are_counted():
    class ByKeyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return self.conv(input=x)

    model = ByKeyword()
    assert total_macs(model, IMAGES) == macs_as_torch_counts_them(model, IMAGES)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_attention_counts_its_four_projections_and_its_products(by_keyword):
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(query=x, key=x, value=x) if by_keyword else self.attention(x, x, x)

    assert costs(Attend(), torch.zeros(3, 5, 8))[1] == 5 * 4 * 8 * 8 + 2 * 5 * 5 * 8


def test_attention_with_other_widths_for_keys_and_values():
    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True)

        def forward(self, x):
            return self.attention(x, x.new_zeros(3, 7, 6), x.new_zeros(3, 7, 4))

    by_hand = 5 * 8 * 8 + 7 * 6 * 8 + 7 * 4 * 8 + 5 * 8 * 8 + 2 * 5 * 7 * 8  # query, key, value, output, products
    assert costs(Cross(), torch.zeros(3, 5, 8))[1] == by_hand


def test_a_transformer_layer_counts_all_its_products():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert total_macs(model, torch.zeros(3, 5, 8)) == 5 * (4 * 8 * 8 + 2 * 8 * 16 + 2 * 5 * 8)


def test_products_of_activations_are_counted_and_those_with_weights_or_tables_are_not():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))
            self.register_buffer("table", torch.ones(1, 8, 8))

        def forward(self, x):
            x = x @ self.weight + torch.bmm(x, self.table.expand(len(x), -1, -1))
            return torch.einsum("bqe,bke->bqk", x, x) @ x

    seen = trace(model := Mixing(), torch.zeros(3, 5, 8))
    assert seen.products == {model: 3 * 2 * 5 * 5 * 8}
    assert seen.per_sample(seen.products.total()) == 2 * 5 * 5 * 8


@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_recurrent_layers_count_their_weights_at_every_position(kind, gates):
    model = kind(6, 5, num_layers=2, batch_first=True)
    per_step = gates * 5 * (6 + 5) + gates * 5 * (5 + 5)
    assert costs(model, torch.zeros(3, 7, 6))[1] == 7 * per_step


def test_recurrent_layers_may_have_the_sequence_first():
    """As they have by default: then the batch is the second axis."""
    per_step = 4 * 5 * (6 + 5)
    assert costs(nn.LSTM(6, 5), torch.zeros(7, 3, 6))[1] == 7 * per_step


def test_transformer_layers_may_have_the_sequence_first():
    model = nn.TransformerEncoderLayer(8, 2, 16)
    assert total_macs(model, torch.zeros(5, 3, 8)) == 5 * (4 * 8 * 8 + 2 * 8 * 16 + 2 * 5 * 8)


def fed(*modules: nn.Module) -> list[tuple[int, int]]:
    """(normalisation layer, the layer that feeds it) by their places."""
    model = nn.Sequential(*modules)
    return [
        (modules.index(norm), modules.index(layer)) for norm, layer in trace(model, IMAGES).layer_before_norm.items()
    ]


def test_the_layer_that_feeds_a_normalisation_layer_is_seen():
    assert fed(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)) == [
        (1, 0),
        (4, 3),
    ]


@pytest.mark.parametrize("inplace", [False, True])
def test_a_layer_with_an_activation_between_does_not_feed_it(inplace):
    assert fed(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=inplace), nn.BatchNorm2d(4)) == []


def test_normalisation_activations_and_embeddings_cost_nothing():
    model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.PReLU())
    assert total_macs(model, torch.zeros(2, 3, dtype=torch.long)) == 0
    assert not_counted(model, trace(model, torch.zeros(2, 3, dtype=torch.long))) == {}


def test_modules_with_parameters_that_no_formula_counts_are_named():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.eye(3))

        def forward(self, x):
            return x @ self.matrix

    model = nn.Sequential(nn.Linear(3, 3), Own())
    assert not_counted(model, trace(model, torch.zeros(1, 3))) == {"1": "Own"}


def test_training_flags_are_as_before():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
    model[1].eval()
    trace(model, IMAGES)
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_statistics_and_gradients_are_as_before():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    trace(model, IMAGES + 3)
    assert (model[1].running_mean == 0).all()
    assert model[1].num_batches_tracked == 0
    assert model[0].weight.grad is None


def test_flags_and_hooks_are_as_before_where_the_pass_fails():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(7, 2))
    with pytest.raises(RuntimeError):
        trace(model, IMAGES)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    "batch",
    [IMAGES, (IMAGES, torch.zeros(1)), [IMAGES], {"image": IMAGES, "label": 3}],
    ids=["tensor", "tuple", "list", "dict"],
)
def test_a_batch_is_a_tensor_or_has_the_input_first(batch):
    model = nn.Conv2d(3, 4, 3)
    assert total_macs(model, batch) == macs_as_torch_counts_them(model, IMAGES)
    assert torch.equal(call_with_first(model, batch), model(IMAGES))


def test_an_own_way_to_call_the_model():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(self, x, y):
            return self.a(x) + self.b(y)

    batch = (torch.zeros(5, 3), torch.zeros(5, 4))
    assert total_macs(Two(), batch, forward=lambda net, b: net(*b)) == 6 + 8
