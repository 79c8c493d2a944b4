"""Recipes: what the paper states, and functions of one's own."""

import math
import sys
from dataclasses import fields

import pytest
import torch
from torch import nn

from decomposable import recipes
from decomposable.recipes import BUILT_IN, Task, default_settings, find, make_task
from decomposable.recipes.settings import Settings
from decomposable_edge.errors import InvalidArgumentError

PROMISED = ["epochs", "seed", "batch_size", "form", "balance", "ratio", "refresh"]


def test_the_built_in_recipes_are_the_promised_ones():
    small = "digits fashion-mnist cifar10-resnet20 cifar10-resnet56 cifar10-vit python-text-lm"
    assert list(BUILT_IN) == [*small.split(), "cifar10-vgg15", "cifar100-resnet34", "imagenet-resnet50"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_recipe_knows_the_promised_settings_and_says_what_it_is(name):
    recipe = find(name)
    known = {field.name for field in fields(default_settings(recipe))}
    assert known >= set(PROMISED)
    assert recipe.__doc__


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_recipe_builds_its_model_without_data(name):
    recipe = find(name)
    with torch.device("meta"):  # shapes only
        model = make_task(recipe, None, default_settings(recipe)).build_model()
    assert isinstance(model, nn.Module)


CIFAR = {
    "epochs": 200,
    "batch_size": 128,
    "learning_rate": 0.1,
    "decay": 0.2,
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 5e-4,
    "balance": 0.5,
    "warmup_epochs": 0.0,
    "schedule": "steps",
    "min_rank": 1,
    "refresh": 1,
    "criterion": "singular_value",
}
IMAGENET = {**CIFAR, "epochs": 100, "batch_size": 256, "decay": 0.1, "weight_decay": 1e-4}
PAPER = {  # appendix D, tables "setup_cifar" and "setup_imagenet", and section 4 for the ratio
    "cifar10-vgg15": (
        {**CIFAR, "ratio": (0.01, 0.25), "mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)},
        [60, 120, 160],
        14_977_728,
    ),
    "cifar100-resnet34": (
        {**CIFAR, "ratio": (0.01, 0.5), "mean": (0.5071, 0.4865, 0.4409), "std": (0.2673, 0.2564, 0.2762)},
        [60, 120, 160],
        None,
    ),
    "imagenet-resnet50": (
        {**IMAGENET, "ratio": (0.01, 0.8), "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
        [30, 60, 90],
        None,
    ),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_recipes_have_the_papers_settings(name):
    expected, milestones, kernels = PAPER[name]
    settings = default_settings(find(name))
    assert {key: getattr(settings, key) for key in expected} == expected
    assert [round(m * settings.epochs) for m in settings.milestones] == milestones
    with torch.device("meta"):
        model = make_task(find(name), None, settings).build_model()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    assert norms
    assert all((m.eps, m.momentum) == (1e-5, 0.1) for m in norms)  # torch's momentum is one minus the paper's
    if kernels is not None:
        layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        assert sum(math.prod(m.weight.shape) for m in layers) == kernels


@pytest.mark.parametrize("name", ["cifar10-vgg15", "cifar100-resnet34"])
def test_initial_weights_are_he_normal(name):
    torch.manual_seed(0)
    model = make_task(find(name), None, default_settings(find(name))).build_model()
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 20_000:
            fan_in = module.weight[0].numel()
            assert module.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.03)
        elif isinstance(module, nn.Linear) and module.bias is not None:
            assert not module.bias.any()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cifar10_resnet20", ["did you mean cifar10-resnet20", "package.module:function"]),
        ("digit", ["did you mean digits"]),
        ("x", ["unknown recipe x", "fashion-mnist"]),
        ("no.such.module:f", ["no.such.module cannot be imported"]),
        ("decomposable.recipes.small:nothing", ["has no function called nothing"]),
        ("decomposable.recipes.small:DIGITS", ["has no function called DIGITS"]),
    ],
)
def test_what_is_no_recipe_is_refused_in_one_line(name, words):
    with pytest.raises(InvalidArgumentError) as caught:
        find(name)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_function_of_ones_own_is_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_recipe_module.py").write_text(
        "from torch import nn\n"
        "from decomposable.recipes import Settings, Task\n"
        "def mine(data, settings=Settings(epochs=7)):\n"
        "    return Task(build_model=lambda: nn.Linear(2, 2), load_data=lambda: data)\n"
    )
    monkeypatch.chdir(tmp_path)
    recipe = find("my_recipe_module:mine")
    assert default_settings(recipe).epochs == 7
    task = make_task(recipe, tmp_path, default_settings(recipe))
    assert isinstance(task.build_model(), nn.Linear)
    assert task.load_data() == tmp_path
    del sys.modules["my_recipe_module"]


def test_a_recipe_takes_data_settings_both_or_neither():
    task = Task(build_model=nn.Identity, load_data=lambda: None)
    for recipe in (lambda: task, lambda data: task, lambda settings: task, lambda data, settings: task):
        assert make_task(recipe, None, Settings()) is task
    assert default_settings(lambda: task) == Settings()


def test_a_recipe_of_another_shape_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"takes an argument folder; allowed: data, settings"):
        make_task(lambda folder: None, None, Settings())
    with pytest.raises(InvalidArgumentError, match=r"returned int; allowed: a decomposable\.recipes\.Task"):
        make_task(lambda: 3, None, Settings())


def test_the_loss_is_cross_entropy_unless_said_otherwise():
    net, batch = nn.Identity(), (torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
    assert torch.equal(recipes.cross_entropy(net, batch), nn.functional.cross_entropy(*batch))
