"""A method that is none of the package's: registering it is enough to train and resume it."""

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest

import decomposable as dn
from decomposable.commands.main import main
from decomposable.recipes.settings import Settings
from decomposable.recipes.values import MethodSettings
from decomposable.training import methods
from decomposable.training.methods import METHODS, Method
from decomposable.training.methods.decomposing import decomposed
from decomposable.training.methods.flat import flat, from_text, with_overrides
from decomposable.training.runs import plain_settings
from decomposable_edge.errors import InvalidArgumentError

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
QUICK = {"epochs": 2, "train_images": 200, "calibration_images": 100, "sizes": (1.0, 0.5)}


@dataclass(frozen=True, kw_only=True)
class ToySettings(MethodSettings):
    toy_share: float = 0.5  # of the gradient that is used
    toy_shares: tuple[float, ...] = (0.5, 1.0)

    swept: ClassVar = {"toy_share": "toy_shares"}
    checks: ClassVar = ((("toy_share",), "a part in (0, 1]", lambda v: 0 < v <= 1),)


class ToyStep:
    """A part of the gradient, and a count of the steps that a resumed run goes on with."""

    def __init__(self, network, share):
        self.network, self.share, self.steps = network, share, 0

    def backward(self, closure):
        loss = closure(self.network)
        (self.share * loss).backward()
        self.steps += 1
        return {"loss": loss.detach(), "toy_steps": float(self.steps)}

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Toy(Method):
    name = "toy"
    summary = "a part of the gradient"
    label = "a toy of ours"
    settings = ToySettings

    def step(self, network, settings):
        return ToyStep(network, settings.of(ToySettings).toy_share)

    def sized(self, network, material, settings):
        return decomposed(network, material, settings)


class Bare(Method):
    name = "bare"
    summary = "says nothing of itself"

    def sized(self, network, material, settings):
        return decomposed(network, material, settings)


@pytest.fixture
def toy():
    before = dict(METHODS)
    methods.register(Toy())
    methods.register(Bare())
    yield
    METHODS.clear()
    METHODS.update(before)


class Killed(Exception):
    pass


def killing(line):
    if "epoch 2/2, step 2/4" in line:
        raise Killed


def test_it_is_trained_and_resumed_with_its_own_settings(toy, tmp_path):
    arguments = {**QUICK, "method": "toy", "toy_share": 0.25, "device": "cpu", "checkpoint_seconds": 0.0}
    whole = dn.train("digits", out=tmp_path / "whole", **arguments)
    assert whole["settings"]["toy_share"] == 0.25
    with pytest.raises(Killed):
        dn.train("digits", out=tmp_path / "cut", progress=killing, **arguments)
    with pytest.raises(InvalidArgumentError, match=r"the run has toy_share=0\.25, now it is 0\.5"):
        dn.train("digits", out=tmp_path / "cut", resume=True, **{**arguments, "toy_share": 0.5})
    resumed = dn.train("digits", out=tmp_path / "cut", resume=True, **arguments)
    assert resumed["sizes"] == whole["sizes"]
    last = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert next(line for line in reversed(last) if line["kind"] == "epoch")["toy_steps"] == 6.5  # of 5 to 8
    networks = [(tmp_path / run / "network.safetensors").read_bytes() for run in ("whole", "cut")]
    assert networks[0] == networks[1]


def test_its_settings_are_typed_and_refused_as_all_others(toy, capsys):
    settings = from_text(Settings(epochs=3), ["toy_share=0.25"])
    assert (settings.of(ToySettings), settings.epochs) == (ToySettings(toy_share=0.25), 3)
    assert settings == Settings(epochs=3, of_methods=(ToySettings(toy_share=0.25),))
    assert with_overrides(settings, toy_share=0.5, epochs=200) == Settings()
    for text, words in {
        "toy_share=2": r"toy_share=2\.0; allowed: a part in \(0, 1\]",
        "toy_share=x": "toy_share=x; allowed: a number",
        "toy_shore=1": "no setting is called toy_shore; did you mean toy_share?",
    }.items():
        with pytest.raises(InvalidArgumentError, match=words):
            from_text(settings, [text])
    assert main(["train", "digits", "--dry-run", "--set", "method=toy", "toy_share=0.75"]) == 0
    assert "toy_share=0.75" in capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_the_settings_of_one_method_are_no_part_of_the_runs_of_another(tmp_path):
    arguments = {**QUICK, "method": "plain", "device": "cpu"}
    dn.train("digits", out=tmp_path, **arguments)
    before = dict(METHODS)
    methods.register(Toy())
    try:
        said = []
        record = dn.train("digits", out=tmp_path, resume=True, say=said.append, **arguments)
        assert said == ["this run is complete; nothing to do"]
        assert "toy_share" not in record["identity"]["settings"]
        assert "toy_share" in plain_settings(Settings())
    finally:
        METHODS.clear()
        METHODS.update(before)


def test_a_name_that_is_taken_is_refused(toy):
    class Other(Bare):
        name = "plain"

    @dataclass(frozen=True, kw_only=True)
    class Taken(MethodSettings):
        elastic_start: float = 0.5

    class Third(Bare):
        name = "third"
        settings = Taken

    with pytest.raises(InvalidArgumentError, match="method=plain: there is one of this name"):
        methods.register(Other())
    with pytest.raises(InvalidArgumentError, match="method=third: elastic_start is a setting of others"):
        methods.register(Third())
    assert "third" not in METHODS
    assert "elastic_start" in flat(Settings())


@dataclass(frozen=True, kw_only=True)
class WithoutDefault(MethodSettings):
    needed: int


@dataclass(frozen=True, kw_only=True)
class WithWrongDefault(MethodSettings):
    part: float = 2.0
    checks: ClassVar = ((("part",), "a part in (0, 1]", lambda v: 0 < v <= 1),)


@dataclass(frozen=True, kw_only=True)
class NamedAsAFunction(MethodSettings):
    of: int = 1


@dataclass(frozen=True, kw_only=True)
class NamedAsTheChecks(MethodSettings):
    checks: int = 1


@dataclass(frozen=True, kw_only=True)
class NamedAsTheSweep(MethodSettings):
    swept: int = 1


@dataclass(frozen=True, kw_only=True)
class NamedAsAShared(MethodSettings):
    epochs: int = 1


def made(**attributes):
    return type("Made", (Bare,), attributes)()


class Nameless(Method):
    summary = "has no name"


class Silent(Method):
    name = "silent"


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Bare, r"allowed: an object of a class that is a Method"),
        (Nameless(), r"method=None; allowed: a name"),
        (Silent(), r"method=silent: there is no summary"),
        *((made(name=name), r"method=.*; allowed: a name") for name in ("../evil", "", "a/b", "A", "all", "a\n", 3)),
        (made(settings=3), r"method=bare: settings=3; allowed: a class of MethodSettings"),
        (made(settings=WithoutDefault), r"method=bare: its settings cannot be made \(.*needed.*\); allowed: "),
        (made(settings=WithWrongDefault), r"method=bare: its settings cannot be made \(part=2\.0; allowed: a part"),
        (made(settings=NamedAsAFunction), r"method=bare: of is something else of all settings"),
        (made(settings=NamedAsTheChecks), r"method=bare: checks is something else of all settings"),
        (made(settings=NamedAsTheSweep), r"method=bare: swept is something else of all settings"),
        (made(settings=NamedAsAShared), r"method=bare: epochs is a setting of others"),
    ],
)
def test_a_method_that_cannot_work_is_refused_in_one_line_and_not_kept(method, words):
    before = dict(METHODS)
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        methods.register(method)
    assert str(caught.value).isprintable()
    assert before == METHODS
    assert Settings().epochs == 200


def test_its_settings_are_listed_behind_those_of_the_package(toy):
    names = list(flat(Settings()))
    assert names[names.index("elastic_order") :][:4] == ["elastic_order", "toy_share", "toy_shares", "mean"]
