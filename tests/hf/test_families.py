"""Every family of `families.py`: decomposed, trained jointly, resized, saved, loaded, exported and run at any size.

A handful run in `make test`; all of them, and their exports, in `make test-all`.
"""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, transformers
from torch.utils.flop_counter import FlopCounterMode

import decomposable as dn
from decomposable.elastic import ElasticOptions
from decomposable.hf import from_pretrained, save_pretrained
from decomposable.hf.pretrained import WEIGHTS
from decomposable_edge.errors import ArtifactError, InvalidArgumentError

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = ("bert", "gpt2", "t5", "vit", "wav2vec2")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
DECODERS = [name for name, family in FAMILIES.items() if family.kind == "decoder"]
BOTH = ["t5", "bart", "marian"]


def slow_unless(quick, names):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def call(net, batch):
    return net(**batch)


def logits(net, batch):
    with torch.no_grad():
        return net(**batch).logits


@pytest.fixture(scope="module")
def made():
    """Networks that several tests need, by the name of their family."""
    nets = {}

    def get(name):
        if name not in nets:
            family = FAMILIES[name]
            model = family.build()
            nets[name] = model, dn.decompose(model, family.inputs(), forward=call)
        model, net = nets[name]
        net.resize_(macs=1.0)
        return FAMILIES[name], model, net

    return get


def sizes(net):
    return (1.0, 0.6, net.selector.smallest_size)


def test_there_are_families_of_every_kind():
    assert len(FAMILIES) >= 15
    assert {family.kind for family in FAMILIES.values()} == {"encoder", "decoder", "both", "vision", "audio"}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_resized_saved_and_loaded(name, made, tmp_path):
    family, model, net = made(name)
    batch = family.inputs()
    assert not any("in its place" in reason for reason in net.skipped.values())
    torch.testing.assert_close(logits(net, batch), logits(model, batch))
    net.save(tmp_path / "net.safetensors")
    again = dn.load(tmp_path / "net.safetensors", model=family.build())
    assert net.selector.smallest_size < 0.5
    for size in sizes(net):
        for each in (net, again):
            each.resize_(macs=size)
        assert net.plan().macs <= size * net.plan().full_macs + 1
        assert torch.equal(logits(again, batch), logits(net, batch))
        assert torch.equal(logits(net.extract(), batch), logits(net, batch))
        assert sum(p.numel() for p in net.extract().parameters()) == net.plan().params
    part = dn.load(tmp_path / "net.safetensors", model=family.build(), macs=0.6)
    net.resize_(macs=0.6)
    torch.testing.assert_close(logits(part, batch), logits(net, batch))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_trained_jointly(name):
    family = FAMILIES[name]
    model, batch = family.build(), family.labelled()
    names = [name for name, _ in model.named_parameters()]
    joint = dn.JointObjective(model, ratio=(0.1, 0.4), seed=0)
    losses = joint.backward(lambda net: net(**batch).loss)
    assert losses.full.isfinite()
    assert losses.low.isfinite()
    assert [name for name, _ in model.named_parameters()] == names
    assert all(layer.parameter.grad is not None for layer in joint.layers if layer.parameter.requires_grad)

    def distance(low, full):
        return F.mse_loss(low.logits, full.logits)

    options = ElasticOptions(macs=(0.5, 0.6))
    elastic = dn.Elastic(
        model, example_input=family.inputs(), steps=2, forward=call, distance=distance, options=options
    )
    for _ in range(2):
        losses = elastic.backward(forward=lambda net: net(**batch), loss=lambda out: out.loss)
    assert losses.macs <= 0.6
    assert losses.low.isfinite()


@pytest.mark.parametrize("name", NAMES)
def test_macs_are_those_of_the_flop_counter(name, made):
    family, _, net = made(name)
    batch = {key: value[:1] for key, value in family.inputs().items()}
    for size in (1.0, 0.6):
        net.resize_(macs=size)
        with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            with FlopCounterMode(display=False) as counter:
                net(**batch)
            # What no formula here counts, such as turning a positional embedding, is small where there is any.
            assert net.macs_for(batch) == pytest.approx(counter.get_total_flops() / 2, rel=0.03)
    assert net.macs_for(family.inputs()) == net.plan().macs


@pytest.mark.parametrize("name", slow_unless(["gpt2"], DECODERS))
def test_macs_grow_with_the_length_and_attention_is_named(name, made):
    family, _, net = made(name)
    short, long = ({key: value.repeat(1, times) for key, value in family.inputs().items()} for times in (1, 2))
    assert net.macs_for(long) > 2 * net.macs_for(short)
    assert any(reason.startswith("products of two activations") for reason in net.skipped.values())


@pytest.mark.parametrize("name", slow_unless(["gpt2", "t5"], [*DECODERS, *BOTH]))
def test_it_generates_with_a_cache_at_every_size(name, made):
    _, model, net = made(name)
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert net.config is net.module.config
    assert net.config.vocab_size == model.config.vocab_size
    for size in sizes(net):
        net.resize_(macs=size)
        with_cache, without = (net.generate(ids, use_cache=flag, **given) for flag in (True, False))
        assert torch.equal(with_cache, without)
        assert torch.equal(with_cache, net.extract().generate(ids, use_cache=True, **given))


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_one_size(name, made, tmp_path):
    family, model, net = made(name)
    for size in sizes(net):
        net.resize_(macs=size)
        save_pretrained(net, tmp_path)
        again = from_pretrained(tmp_path)
        assert type(again) is type(model)
        assert torch.equal(logits(again, family.inputs()), logits(net, family.inputs()))
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".md", ".safetensors"}
    card = (tmp_path / "README.md").read_text()
    assert f"{net.plan().params:,} parameters" in card
    assert f"{net.plan().macs:,} multiply-accumulates" in card


def test_a_folder_is_not_believed(made, tmp_path):
    _, _, net = made("gpt2")
    with pytest.raises(ArtifactError) as caught:
        from_pretrained(tmp_path)
    assert WEIGHTS in caught.value.reason
    save_pretrained(net, tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("GPT2LMHeadModel", "os"))
    with pytest.raises(ArtifactError) as caught:
        from_pretrained(tmp_path)
    assert "'os'" in caught.value.reason
    plain = dn.decompose(torch.nn.Linear(8, 8), torch.zeros(1, 8))
    with pytest.raises(InvalidArgumentError) as caught:
        save_pretrained(plain, tmp_path)
    assert (caught.value.option, caught.value.came) == ("net", "Linear")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_exported_and_run_at_any_size(name, made, tmp_path):
    edge = pytest.importorskip("decomposable_edge")
    pytest.importorskip("onnxscript")
    family, _, net = made(name)
    if not family.exports:
        pytest.skip(family.why)
    net.save(tmp_path / "net.safetensors", onnx=True, dynamic=family.varying or None)
    session = edge.AnySizeSession(tmp_path / "net.safetensors")
    batches = [family.inputs()]
    if family.varying:
        batches.append({key: value[:1, :5] for key, value in family.inputs().items()})
    for size in sizes(net):
        net.resize_(macs=size)
        session.resize(macs=size, align=1)
        for batch in batches:
            found = session.run({key: value.numpy() for key, value in batch.items()})
            found = (
                found["logits"] if isinstance(found, dict) else found[0] if isinstance(found, tuple | list) else found
            )
            np.testing.assert_allclose(found, logits(net, batch).numpy(), rtol=1e-3, atol=1e-4)


def test_tied_embeddings_are_left_alone_and_said_so():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = dn.decompose(FAMILIES["gpt2"].build(), FAMILIES["gpt2"].inputs(), forward=call)
    assert "lm_head" in net.skipped
    assert "tied to embedding" in net.skipped["lm_head"]
    assert transformers.GPT2LMHeadModel is type(net.module)
