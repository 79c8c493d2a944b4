import dataclasses
import re

import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable.commands import main as cli
from decomposable.network import artifact
from decomposable_edge.errors import BudgetError
from decomposable_edge.sizing.plans import SizeRequest
from refusals import Saying, refused

ONLY = "only convolutions and Linear are decomposed"


OWN = "Own has a forward of its own"


class Own(nn.LSTM):
    """An LSTM that nobody can open: its forward may do anything."""

    def forward(self, x):
        return super().forward(x)


class Tagger(nn.Module):
    """An LSTM between an embedding and a small linear layer: hardly any of it can be decomposed."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.lstm = Own(16, 32, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 4)

    def forward(self, tokens):
        return self.head(self.norm(self.lstm(self.embedding(tokens))[0][:, -1]))


TOKENS = torch.zeros(2, 7, dtype=torch.long)
WEIGHTS = 4 * 32 * (16 + 32)  # of the LSTM
MACS = 7 * WEIGHTS + 32 * 4
PARAMS = 50 * 16 + WEIGHTS + 2 * 4 * 32 + 2 * 32 + 32 * 4 + 4


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return dn.decompose(Tagger(), TOKENS)


def test_weights_outside_decomposed_layers_are_in_skipped_with_their_shares(net):
    lstm = f"{7 * WEIGHTS / MACS:.1%} of the MACs, {(WEIGHTS + 256) / PARAMS:.1%} of the parameters"
    embedding = f"0.0% of the MACs, {800 / PARAMS:.1%} of the parameters"
    assert net.skipped == {"embedding": f"Embedding: {ONLY}; {embedding}", "lstm": f"{OWN}; {lstm}"}
    assert (net.plan().macs, net.plan().params) == (MACS, PARAMS)


def test_shares_are_of_parameters_alone_where_macs_are_not_known():
    net = dn.decompose(Tagger())
    assert net.skipped["lstm"] == f"{OWN}; {(WEIGHTS + 256) / PARAMS:.1%} of the parameters"


def test_a_part_whose_macs_nobody_counts_says_so():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.ones(8, 8))

        def forward(self, x):
            return x @ self.matrix

    net = dn.decompose(nn.Sequential(nn.Linear(8, 8, bias=False), Own()), torch.zeros(1, 8))
    assert net.skipped == {"1": f"Own: {ONLY}; MACs not counted, 50.0% of the parameters"}


@pytest.mark.parametrize("kind", ["depthwise", "transposed", "attention"])
def test_the_shares_of_all_parts_and_of_the_smallest_size_add_up(kind):
    if kind == "attention":
        model, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.zeros(2, 5, 16)
    elif kind == "depthwise":
        model, x = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=8)), torch.zeros(1, 4, 8, 8)
    else:
        model, x = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ConvTranspose2d(8, 4, 3)), torch.zeros(1, 4, 8, 8)
    net = dn.decompose(model, x)
    shares = [float(re.search(r"([\d.]+)% of the MACs", reason).group(1)) for reason in net.skipped.values()]
    assert sum(shares) == pytest.approx(100 * net.selector.fixed_macs / net.plan().full_macs, abs=0.1 * len(shares))


def test_a_weight_that_two_parts_share_counts_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.hidden, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.hidden(self.embedding(tokens)))

    net = dn.decompose(Tied(), torch.zeros(1, 3, dtype=torch.long))
    assert "0.0% of the MACs, 55.0% of the parameters" in net.skipped["embedding"]
    assert "57.9% of the MACs, 0.0% of the parameters" in net.skipped["head"]


def blocked(measure):
    """What is said to block a budget that cannot be met."""
    if measure == "macs":
        return f"'lstm' {7 * WEIGHTS / MACS:.1%}"
    lstm, embedding = (WEIGHTS + 256) / PARAMS, 800 / PARAMS
    return f"'lstm' {lstm:.1%}, 'embedding' {embedding:.1%}"


@pytest.mark.parametrize("measure", ["macs", "params"])
def test_a_budget_that_cannot_be_met_names_what_blocks_it(net, measure):
    with refused(measure, 0.5, Saying("^0.9"), kind=BudgetError, blocking=blocked(measure)):
        net.resize_(**{measure: 0.5})


def test_no_part_is_named_where_all_layers_are_decomposed():
    net = dn.decompose(nn.Sequential(nn.Linear(30, 30), nn.LayerNorm(30)), torch.zeros(1, 30))
    with refused("macs", 0.001, kind=BudgetError, blocking="") as caught:
        net.resize_(macs=0.001)
    assert "left alone" not in str(caught.value)


@pytest.fixture
def file(net, tmp_path):
    net.save(tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def test_after_loading_as_well(net, file):
    for other in (dn.load(file, model=Tagger()), artifact.read(file), artifact.outline(file)):
        assert dict(other.skipped) == net.skipped
        with refused("macs", kind=BudgetError, blocking=blocked("macs")):
            other.selector.of_size(0.5, "macs")
    with refused("params", kind=BudgetError, blocking=blocked("params")):
        dn.load(file, model=Tagger(), params=0.5)


def test_files_that_do_not_say_what_is_left_alone_are_read(net, tmp_path):
    silent = dataclasses.replace(net.selector, left_alone=())
    dataclasses.replace(net.artifact(), selector=silent).save(tmp_path / "old.safetensors")
    with refused("macs", kind=BudgetError, blocking=""):
        artifact.read(tmp_path / "old.safetensors").selector.plan_for(SizeRequest(macs=0.5))


def test_at_the_command_line(file, tmp_path, capsys):
    assert cli.main(["resize", str(file), "--macs", "0.5", "-o", str(tmp_path / "small.safetensors")]) != 0
    assert capsys.readouterr().err.strip().endswith(blocked("macs"))
    assert cli.main(["sizes", str(file)]) == 0
    assert "Left alone: 'lstm' 99.7% of the MACs" in capsys.readouterr().out


@pytest.mark.slow
def test_on_the_device(tmp_path):
    pytest.importorskip("onnxruntime")
    from decomposable_edge import AnySizeSession

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 64, 3, groups=8), nn.Flatten(), nn.Linear(64, 4)).eval()
    net = dn.decompose(model, torch.randn(2, 4, 3, 3))
    with refused("macs", 0.01, kind=BudgetError, blocking=Saying("^'1' ")) as caught:
        net.resize_(macs=0.01)
    net.save(tmp_path / "net.safetensors", onnx=True)
    with pytest.raises(BudgetError, match=f"^{re.escape(str(caught.value))}$"):
        AnySizeSession(tmp_path / "net.safetensors").resize(macs=0.01)


# A missing forward=


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, inputs, mask):
        return self.b(self.a(inputs)) * mask


BATCH = {"inputs": torch.randn(4, 8), "mask": torch.ones(4, 1)}
CAME = "a dict of inputs, mask"
ADVICE = "forward=lambda net, batch: net(**batch)"


def test_a_missing_forward_for_a_dict_batch_says_so():
    with refused("example_input", CAME, ADVICE) as caught:
        dn.decompose(Masked(), BATCH)
    assert "(TypeError: " in str(caught.value)  # what the model said
    net = dn.decompose(Masked(), BATCH, forward=lambda net, batch: net(**batch))
    net.calibrate_([BATCH], sizes=[0.5])
    with refused("batch", CAME, ADVICE):
        dn.decompose(Masked()).calibrate_([BATCH], sizes=[0.5])


def test_a_model_that_refuses_in_words_of_its_own():
    class Wants(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8)

        def forward(self, inputs=None, mask=None):
            if mask is None:
                raise ValueError("specify\nmask")
            return self.l(inputs)

    with refused("example_input", CAME, ADVICE) as caught:
        dn.decompose(Wants(), BATCH)
    assert "(ValueError: specify mask)" in str(caught.value)


def test_a_missing_forward_for_a_tuple_says_so_too():
    with refused("example_input", "a tuple of 2 entries", "forward=lambda net, batch: net(*batch)"):
        dn.decompose(Masked(), tuple(BATCH.values()))


@pytest.mark.parametrize("batch", [torch.zeros(1, 3), (torch.zeros(1, 3), torch.zeros(1)), {"only": torch.zeros(1, 3)}])
def test_other_errors_of_a_model_stay_what_they_are(batch):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        dn.decompose(nn.Linear(8, 8), batch)


def test_an_optional_input_that_a_dict_has_besides_the_first_is_said_to_be_left_out():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x, mask=None):
            return self.layer(x if mask is None else x * mask)

    batch = {"x": torch.randn(2, 6), "mask": torch.ones(2, 6)}
    with pytest.warns(UserWarning, match=r"whose forward takes mask, too.*forward=lambda net, batch"):
        dn.decompose(Masked(), batch)
    dn.decompose(Masked(), batch, forward=lambda net, b: net(**b))  # says nothing
