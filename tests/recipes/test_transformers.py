"""The two transformers under the protocol of all recipes: plain, joint and elastic; resumed to the same bits."""

import math

import pytest
import torch

import decomposable as dn
from decomposable.data import python_text
from decomposable.data.base import Images, InMemory
from decomposable.data.python_text import Text
from decomposable.models import small_lm, small_vit
from decomposable.recipes import Task
from decomposable.recipes.settings import Settings
from decomposable.recipes.transformers import TEXT, VIT, TextSettings, next_token
from decomposable.training.evaluation import judged
from decomposable_edge.errors import DataError, SettingError

METHODS = ("plain", "decomposable", "elastic")
SHORT = {"epochs": 2, "batch_size": 16, "sizes": (1.0, 0.6), "warmup_epochs": 0.0}


def letters():
    """A text that repeats itself: what follows is known after a few bytes."""
    text = torch.arange(20_000, dtype=torch.int64).remainder(7).to(torch.uint8)
    return Text(train=text[:1700], test=text[:500], context=16, classes=8)


def lm(settings: TextSettings = TEXT) -> Task:
    return Task(build_model=lambda: small_lm(8, 16, 1, 2, 16), load_data=letters, loss=next_token)


def vit(settings: Settings = VIT) -> Task:
    def load():
        labels = torch.arange(96) % 4
        pixels = torch.randn(96, 3, 16, 16, generator=torch.Generator().manual_seed(0)) + labels.view(-1, 1, 1, 1)
        images = Images(pixels, labels)
        return InMemory(classes=4, train=images, test=images)

    return Task(build_model=lambda: small_vit(4, 16, 1, 2, 8, 16), load_data=load)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("recipe", [lm, vit])
def test_every_method_trains_them(recipe, method, tmp_path):
    record = dn.train(recipe, out=tmp_path / "run", method=method, learning_rate=5e-3, **SHORT)
    sizes = {row["size"]: row for row in record["sizes"]}
    assert set(sizes) == {1.0, 0.6}
    if recipe is lm:
        assert 1 <= sizes[1.0]["perplexity"] < 6  # who guesses evenly has 7
    else:
        assert "perplexity" not in sizes[1.0]
    net = dn.load(tmp_path / "run" / "network.safetensors")
    assert net.plan().macs_fraction == 1.0
    assert any(reason.startswith("products of two activations") for reason in net.skipped.values())


def test_a_resumed_run_with_adamw_is_the_same(tmp_path):
    whole = dn.train(lm, out=tmp_path / "whole", method="elastic", **SHORT)

    def stop(line):
        if (line.fraction or 0) > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dn.train(lm, out=tmp_path / "cut", method="elastic", checkpoint_seconds=0, progress=stop, **SHORT)
    again = dn.train(lm, out=tmp_path / "cut", method="elastic", resume=True, **SHORT)
    assert again["sizes"] == whole["sizes"]
    one, other = (dn.load(tmp_path / name / "network.safetensors").extract() for name in ("whole", "cut"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_perplexity_and_accuracy_of_a_text_are_those_of_all_positions():
    data, net = letters(), small_lm(8, 16, 1, 2, 16).eval()
    x, y = data.test_batch(torch.arange(data.test_count))
    with torch.no_grad():
        logits = net(x)
    chances = logits.double().softmax(dim=1)[torch.arange(y.numel()), y.flatten()]
    found = judged(net, data, batch_size=7)
    assert found.perplexity == pytest.approx(math.exp(-chances.log().mean()), rel=1e-5)
    assert found.accuracy == pytest.approx(100 * (logits.argmax(1) == y.flatten()).double().mean())


def test_the_language_model_sees_nothing_of_what_follows():
    net = small_lm().eval()
    tokens = torch.randint(256, (2, 20))
    changed = tokens.clone()
    changed[:, 12:] = 0
    with torch.no_grad():
        one, other = (net(each).view(2, 20, 256) for each in (tokens, changed))
    torch.testing.assert_close(one[:, :12], other[:, :12])
    assert not torch.allclose(one[:, 12:], other[:, 12:])


@pytest.mark.parametrize("setting", [{"context": 0}, {"windows": 0}, {"test_windows": -1}])
def test_a_text_without_windows_is_refused_by_name(setting):
    with pytest.raises(SettingError, match=f"{next(iter(setting))}.*an int of at least 1"):
        TextSettings(**setting)


def test_a_folder_without_a_text(tmp_path):
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="0 bytes to train with and 0 to test with"):
        python_text.load(folder=tmp_path)
