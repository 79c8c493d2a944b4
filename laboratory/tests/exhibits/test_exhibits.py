"""Exhibits of the paper: what they train at both scales; and all of them on the digits, where they prove nothing."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

from decomposable import recipes
from decomposable.data import digits
from decomposable.recipes import Task
from decomposable.recipes.small import DIGITS, DigitsSettings
from decomposable.training.methods import METHODS
from decomposable.training.methods.flat import with_overrides
from decomposable_edge.errors import InvalidArgumentError
from decomposable_lab.commands.main import main
from decomposable_lab.comparison.running import How
from decomposable_lab.comparison.watching import Watchers
from decomposable_lab.exhibits import running
from decomposable_lab.exhibits.catalogue import EXHIBITS, find
from decomposable_lab.exhibits.context import at_size
from decomposable_lab.exhibits.scales import LAPTOP, PAPER, Group, Scale, merged
from decomposable_lab.exhibits.shown import Series, judged
from decomposable_lab.exhibits.verdicts import (
    ALMOST_ALL,
    better,
    by_budget,
    chance,
    not_worse,
    tally,
    the_best,
    told_apart,
)

NAMES = [
    "2a",
    "2b",
    "2c",
    "2d",
    "2e",
    "2f",
    "3a",
    "3b",
    "3c",
    "table-1",
    "table-2",
    "section-4.4",
    "appendix-a",
    "appendix-channel",
    "appendix-e",
    "proposition-1",
    "proposition-2",
    "beyond",
]


def connected(settings: DigitsSettings = DIGITS) -> Task:
    return Task(
        build_model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10)),
        load_data=lambda: digits.load_data(train_images=settings.train_images),
    )


QUICK = {
    "epochs": 2,
    "train_images": 150,
    "calibration_images": 100,
    "sizes": (1.0, 0.5, 0.25),
    "tuning_epochs": 1,
    "compare_energies": (0.95,),
    "compare_strengths": (3e-4,),
}
TRIAL = Scale(
    name="trial",
    curves=(Group(folder="digits", recipe="digits", methods=(), settings=QUICK, network="digits"),),
    ablation=Group(folder="short", recipe="digits", methods=(), settings=QUICK, network="digits"),
    connected=Group(
        folder="connected", recipe=f"{__name__}:connected", methods=(), settings=QUICK, network="connected"
    ),
    balances=(0.5, 1.0),
)


def order(names, folder, **rest):
    how = {"command": "decomposable-lab compare --exhibit all --out /somewhere/runs", "device": "cpu"}
    return running.Order(exhibits=[find(name) for name in names], scale=TRIAL, out=folder, how=how, **rest)


def test_every_exhibit_has_the_name_that_was_promised():
    assert list(EXHIBITS) == NAMES
    with pytest.raises(InvalidArgumentError, match="exhibit table1: unknown; did you mean table-1"):
        find("table1")
    with pytest.raises(InvalidArgumentError, match="--scale desk: unknown; allowed: paper, laptop"):
        running.ordered("2a", "desk", out=None)
    assert [each.name for each in running.ordered("all", "laptop", out=None).exhibits] == NAMES


def test_exhibits_may_be_made_on_some_of_the_networks():
    whole, part = (running.ordered("3c", "laptop", out=None, only=only) for only in (None, ["fashion-mnist"]))
    assert [group.folder for group in whole.groups] == ["fashion-mnist", "cifar10-resnet20"]
    assert [group.folder for group in part.groups] == ["fashion-mnist"]
    assert running.ordered("2b", "laptop", out=None, only=["fashion-mnist"]).groups[0].folder == "fashion-mnist-short"
    with pytest.raises(
        InvalidArgumentError, match="--only mnist: unknown; allowed at this scale: fashion-mnist, cifar"
    ):
        running.ordered("3c", "laptop", out=None, only=["mnist"])


@pytest.mark.parametrize("scale", [PAPER, LAPTOP], ids=lambda scale: scale.name)
def test_what_is_trained_at_each_scale_can_be(scale):
    groups = merged(group for exhibit in EXHIBITS.values() for group in exhibit.groups(scale))
    for group in groups:
        with_overrides(recipes.default_settings(recipes.find(group.recipe)), group.settings)
        assert group.methods
        assert set(group.methods) <= METHODS.keys()
    assert len({group.folder for group in groups}) == len(groups)
    main = next(group for group in groups if group.folder == scale.curves[0].folder)
    assert set(main.methods) == METHODS.keys()
    assert len(main.seeds) >= 2


def test_seeds_and_settings_may_be_others_than_the_scales():
    changed = running.ordered("all", "paper", out=None, seeds=[3], overrides={"epochs": 1, "balance": 0.2})
    assert {group.seeds for group in changed.groups} == {(3,)}
    assert {group.all_settings.epochs for group in changed.groups} == {1}
    titles = {group.folder: group.title for group in changed.groups}
    assert titles["cifar10-vgg15"] == "VGG-15 on CIFAR-10, 1 epoch"
    balances = {group.all_settings.balance for group in changed.groups}
    assert {0.2, 0.1, 1.0} <= balances  # what an exhibit is about stays its own
    paper = running.ordered("3c", "paper", out=None)
    assert next(group.title for group in paper.groups) == "VGG-15 on CIFAR-10, 200 epochs"


def test_one_folder_has_one_protocol():
    one = Group(folder="a", recipe="digits", methods=("plain",), settings={"epochs": 1})
    assert merged([one, replace(one, methods=("trp",), seeds=(0, 1))])[0].methods == ("plain", "trp")
    with pytest.raises(InvalidArgumentError, match="a: two protocols in one folder"):
        merged([one, replace(one, settings={"epochs": 2})])


def points(*pairs, seeds=2):
    return [{"macs_fraction": x, "accuracy": y, "lowest": y, "highest": y, "seeds": seeds} for x, y in pairs]


def verdict_on(ours, rivals, *rest):
    return better("it is better", tally(ours, rivals, *rest)).verdict


def test_curves_are_compared_at_the_rivals_sizes():
    ours = points((1.0, 90.0), (0.25, 80.0))
    assert at_size(ours, 0.5) == pytest.approx(85.0)
    assert math.isnan(at_size(ours, 0.1))
    found = tally(ours, [points((1.0, 89.0), (0.5, 84.0))])
    assert str(found) == "ahead at 2, equal at 0, behind at 0 of 2 sizes; least at 1× (+1.0) and 0.5× (+1.0)"
    assert better("it is better", found).verdict == "holds"
    assert verdict_on(ours, [points((1.0, 91.0), (0.5, 84.0))]) == "partly"
    assert verdict_on(ours, [points((0.5, 86.0))]) == "fails"
    assert verdict_on(ours, [points((0.1, 86.0))]) == "not tried"
    assert str(tally(ours, [points((0.1, 86.0))])).endswith("of 0 sizes; not compared at 1")
    assert judged("x", [], "nothing").verdict == "not tried"


def test_a_plan_that_lies_a_little_below_its_budget_counts_for_it():
    ours, rival = points((1.0, 90.0), (0.0999, 80.0)), points((0.0928, 85.0))
    assert verdict_on(ours, [rival], (0.1, 1.0)) == "fails"
    assert at_size(ours, 0.0928) == 80.0


def test_a_smaller_network_of_the_rival_counts_at_the_smallest_size():
    """Who may spend a tenth may spend less: a better network of 0.08x is a better one for 0.1x."""
    ours = points((1.0, 90.0), (0.1, 80.0))
    found = tally(ours, [points((1.0, 88.0), (0.08, 85.0), (0.05, 70.0))], (0.1, 1.0))
    assert found.outcomes == ["ahead", "behind"]
    assert found.gaps[0.1] == pytest.approx(-5.0)
    assert tally(ours, [points((0.1, 79.0), (0.05, 85.0))], (0.1, 1.0)).outcomes == ["ahead"]  # it has one there
    assert tally(ours, [points((0.08, 85.0))]).outcomes == []  # nobody asked for a smallest size


def test_networks_that_do_not_exist_are_not_compared():
    slimmable, ours = points((0.25, 90.0), (0.06, 87.0)), points((0.14, 86.0), (0.1, 88.0), (0.05, 60.0))
    found = by_budget(slimmable, ours)
    assert (found.outcomes, found.alone) == (["ahead", "behind"], 1)
    assert found.gaps == {0.14: pytest.approx(1.0), 0.1: pytest.approx(-1.0)}


def test_a_tally_can_be_turned_and_added():
    found = tally(points((1.0, 90.0), (0.5, 80.0)), [points((1.0, 89.0), (0.5, 82.0))])
    assert found.turned.outcomes == ["behind", "ahead"]
    assert found.turned.gaps == {1.0: pytest.approx(-1.0), 0.5: pytest.approx(2.0)}
    assert (found + found.turned).outcomes == ["ahead", "behind", "behind", "ahead"]
    assert (found + found.turned).gaps == {1.0: pytest.approx(-1.0), 0.5: pytest.approx(-2.0)}


@pytest.mark.parametrize(
    ("rivals", "verdict"),
    [
        ({"a": (80.0, 81.0), "b": (85.0, 86.0)}, "holds"),
        ({"a": (80.0, 81.0), "b": (89.0, 91.5)}, "partly"),
        ({"a": (80.0, 81.0), "b": (92.0, 93.0)}, "fails"),
    ],
)
def test_who_is_beaten_once_is_not_the_best(rivals, verdict):
    assert the_best("it is the best", (90.0, 91.0), rivals, "").verdict == verdict


def test_methods_whose_ranges_overlap_are_equal_and_not_better():
    ours = [{**point, "lowest": point["accuracy"] - 0.5} for point in points((1.0, 90.0), (0.25, 80.0))]
    found = tally(ours, [points((1.0, 89.8), (0.5, 84.0), (0.25, 81.0))])
    assert found.outcomes == ["equal", "ahead", "behind"]
    assert better("x", found).verdict == "partly"
    assert not_worse("x", found).verdict == "partly"
    assert not_worse("x", tally(ours, [points((1.0, 89.8))])).verdict == "holds"


@pytest.mark.parametrize(("theirs", "outcome"), [(90.4, "equal"), (89.6, "equal"), (89.4, "ahead"), (90.6, "behind")])
def test_single_runs_are_told_apart_by_half_a_point(theirs, outcome):
    ours, theirs = (points((1.0, 2.0 + accuracy), seeds=1) for accuracy in (90.0, theirs))
    assert tally(ours, [theirs]).outcomes == [outcome]


def test_the_more_errors_a_single_run_makes_the_less_its_last_points_say():
    assert chance(95.0) == chance(92.0) == 0.25
    assert chance(60.0) == pytest.approx(1.2)
    assert (told_apart(62.0, 60.0), told_apart(63.0, 60.0), told_apart(57.0, 60.0)) == ("equal", "ahead", "behind")


def test_almost_all_is_nine_of_ten():
    passed = [True] * 9 + [False]
    assert judged("x", passed, "", share=ALMOST_ALL).verdict == "holds"
    assert judged("x", [*passed, False], "", share=ALMOST_ALL).verdict == "partly"
    assert judged("x", passed, "").verdict == "partly"


def test_what_is_no_number_is_none_in_a_record():
    assert Series(name="a", x=[1, 2], y=[math.nan, 1 / 3]).y == [None, 0.333333]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exhibits")
    torch.set_num_threads(1)
    said = []
    watchers = Watchers(progress=lambda line: None, say=said.append)
    names = ["2b", "2c", "2d", "2f", "appendix-e", "proposition-1", "proposition-2"]
    found, failures = running.run(order(names, folder), how=How(jobs=1), watchers=watchers)
    assert failures == {}
    return folder, found, said


def test_exhibits_are_measured_and_kept(measured):
    folder, found, said = measured
    assert sum(line.startswith("short: ") for line in said) == 1  # trained once for all
    for name, content in found.items():
        kept = json.loads((folder / "exhibits" / f"{name}.json").read_text())
        assert kept == json.loads(json.dumps(content))
        assert kept["claims"]
        assert kept["figures"] or kept["tables"]
        assert kept["command"] == "decomposable-lab compare --exhibit all --out runs"
        assert {"commit", "machine", "made", "trainings"} <= kept.keys()
        for figure in kept["figures"]:
            for series in figure["series"]:
                assert len(series["x"]) == len(series["y"]) > 0


def test_what_must_hold_does_hold(measured):
    _, found, _ = measured
    verdicts = {claim["text"]: claim["verdict"] for content in found.values() for claim in content["claims"]}
    for text in (
        "The error of a layer's output never rises with its rank (channel form and linear layers).",
        "In the spatial form that holds before the vertical taps are summed.",
        "KL(p ‖ p̃) stays below the bound.",
    ):
        assert verdicts[text] == "holds", text


def test_a_network_that_was_not_kept_leaves_the_other_exhibits(measured, tmp_path):
    folder, _, _ = measured
    shutil.copytree(folder, tmp_path / "kept")
    (tmp_path / "kept" / "short" / "us-net" / "0" / "network.safetensors").unlink()
    said = []
    watchers = Watchers(progress=lambda line: None, say=said.append)
    found, failures = running.run(order(["2f", "2d"], tmp_path / "kept"), how=How(jobs=1), watchers=watchers)
    assert list(found) == ["2d"]
    assert list(failures) == ["2f"]
    assert any(line.startswith("2f: not measured: ") and "it was not kept" in line for line in said)


def test_what_was_measured_can_be_judged_again_without_its_networks(measured, tmp_path):
    folder, found, _ = measured
    shutil.copytree(folder, tmp_path / "kept")
    place = tmp_path / "kept" / "short" / "decomposable" / "0"
    (place / "network.safetensors").unlink()
    watchers = Watchers(progress=lambda line: None)
    again, failures = running.run(order(["2c", "2d"], tmp_path / "kept"), how=How(jobs=1), watchers=watchers)
    assert (list(again), list(failures)) == (["2c"], ["2d"])  # the ranks were not kept, the accuracies were
    assert again["2c"]["figures"] == found["2c"]["figures"]
    assert [each["what"] for each in again["2c"]["measurements"]] == ["criteria"]
    record = json.loads((place / "record.json").read_text())
    (place / "record.json").write_text(json.dumps({**record, "finished": "later"}))  # trained anew: measured anew
    again, failures = running.run(order(["2c"], tmp_path / "kept"), how=How(jobs=1), watchers=watchers)
    assert (list(again), list(failures)) == ([], ["2c"])


def test_an_exhibit_says_where_its_trainings_come_from(measured):
    _, found, _ = measured
    runs = found["2f"]["trainings"][0]["runs"]
    assert [(run["method"], run["seed"], run["tries"]) for run in runs] == [("decomposable", 0, 1), ("us-net", 0, 1)]
    assert all(run["cpu"] and run["minutes"] >= 0 and run["command"].startswith("decomposable") for run in runs)


def test_forms_and_widths_are_no_tries():
    group = replace(TRIAL.curves[0], settings={**QUICK, "compare_energies": (0.9, 0.95)})
    assert running._tries("trp", group) == 2  # in two forms each
    assert running._tries("tucker", group) == running._tries("width", group) == running._tries("elastic", group) == 1
    assert running._tries("tucker", PAPER.curves[0]) == 96


def test_what_is_done_is_not_done_again(measured):
    folder, _, _ = measured
    network = folder / "short" / "decomposable" / "0" / "network.safetensors"
    before = network.stat().st_mtime_ns
    found, _ = running.run(order(["2d"], folder), how=How(jobs=1), watchers=Watchers(progress=lambda line: None))
    assert list(found) == ["2d"]
    assert network.stat().st_mtime_ns == before


def test_an_estimate_trains_nothing(tmp_path):
    estimates, seconds = running.estimated(order(["2d"], tmp_path), jobs=1, progress=lambda line: None)
    assert [(group.folder, entry.part.method, entry.state) for group, entry in estimates] == [
        ("short", "decomposable", "to do")
    ]
    assert seconds > 0
    assert not any(tmp_path.iterdir())


def test_the_command_takes_seeds_for_exhibits(tmp_path, capsys):
    def order_of(*more):
        return main(["exhibits", "2d", "--scale", "laptop", "--out", str(tmp_path / "out"), *more])

    assert order_of("--seeds", "x") == 2
    assert "--seeds x; allowed" in capsys.readouterr().err
    assert order_of("--seeds", "") == 2
    assert "--seeds: none" in capsys.readouterr().err
    assert order_of("--methods", "plain") == 2
    assert "unrecognized arguments: --methods plain" in capsys.readouterr().err
    assert main(["exhibits", "2d", "--out", str(tmp_path / "out")]) == 2
    assert "--scale is needed; allowed: paper, laptop" in capsys.readouterr().err


def test_what_has_no_data_here_is_named_in_an_estimate(tmp_path):
    wanted = running.ordered("3c", "paper", only=["imagenet-resnet50"], out=tmp_path / "out", data=tmp_path)
    estimates, seconds = running.estimated(wanted, jobs=1, progress=lambda line: None)
    assert seconds == 0.0
    assert {(group.folder, entry.state) for group, entry in estimates} == {("imagenet-resnet50", "no data")}
    assert {entry.part.method for _, entry in estimates} == {"plain", "slimmable", "us-net", "width", "decomposable"}
    assert all(str(tmp_path) in entry.reason for _, entry in estimates)


@pytest.mark.slow
def test_all_exhibits(tmp_path):
    torch.set_num_threads(1)
    watchers = Watchers(progress=lambda line: None)
    found, failures = running.run(order(NAMES, tmp_path), how=How(jobs=1), watchers=watchers)
    assert failures == {}
    assert list(found) == NAMES
    assert found["beyond"]["explorers"][0]["sizes"]
    assert found["beyond"]["is_ours"]
    assert len(found["table-1"]["printed"][0]["rows"]) == 7
    rows = {row[0]: row for row in found["table-2"]["tables"][0]["rows"]}
    assert float(rows["normal learning, full size"][-1]) == 1.0
