import copy
import json
import pickle
from dataclasses import FrozenInstanceError, dataclass, fields, replace

import pytest

from decomposable.recipes.settings import Settings
from decomposable.training.methods.decomposable import JointSettings
from decomposable.training.methods.elastic import ElasticSettings
from decomposable.training.methods.flat import flat, from_plain, from_text, with_overrides
from decomposable.training.methods.registry import kinds
from decomposable_edge.errors import InvalidArgumentError, SettingError


def test_the_defaults_are_the_papers_for_cifar():
    settings = Settings()
    assert (settings.epochs, settings.batch_size, settings.learning_rate, settings.decay) == (200, 128, 0.1, 0.2)
    assert [round(m * settings.epochs) for m in settings.milestones] == [60, 120, 160]
    assert (settings.momentum, settings.nesterov, settings.weight_decay) == (0.9, True, 5e-4)
    assert (settings.balance, settings.ratio[0]) == (0.5, 0.01)


def test_text_becomes_what_the_setting_is():
    texts = ["epochs=3", "ratio=0.05, 0.8", "nesterov=false", "weight_decay=1e-3", "form=channel", "sizes=1,0.5"]
    settings = from_text(Settings(), texts)
    assert (settings.epochs, settings.ratio, settings.nesterov) == (3, (0.05, 0.8), False)
    assert (settings.weight_decay, settings.form, settings.sizes) == (1e-3, "channel", (1.0, 0.5))


def test_a_later_assignment_wins_and_the_original_stays():
    original = Settings()
    assert from_text(original, ["epochs=3", "epochs=4"]).epochs == 4
    assert original.epochs == 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epoch=3", ["no setting is called epoch", "did you mean epochs"]),
        ("batch-size=3", ["batch-size", "did you mean batch_size"]),
        ("zzz=3", ["zzz", "allowed", "epochs"]),
        ("epochs", ["--set epochs", "key=value"]),
        ("epochs=three", ["epochs=three", "an int"]),
        ("epochs=3.5", ["epochs=3.5", "an int"]),
        ("epochs=0", ["epochs=0", "at least 1"]),
        ("ratio=0.5", ["ratio=0.5", "2 numbers"]),
        ("ratio=0.5,0.1", ["ratio=0.5,0.1", "low <= high"]),
        ("ratio=0,0.1", ["ratio=", "low <= high"]),
        ("ratio=a,b", ["ratio=a,b", "2 numbers"]),
        ("balance=1.5", ["balance=1.5", "[0, 1]"]),
        ("balance=nan", ["balance=nan", "[0, 1]"]),
        ("learning_rate=-1", ["learning_rate=-1", "above 0"]),
        ("learning_rate=inf", ["learning_rate=inf", "above 0"]),
        ("form=diagonal", ["form=diagonal", "spatial, channel"]),
        ("criterion=magic", ["criterion=magic", "singular_value"]),
        ("schedule=never", ["schedule=never", "steps, cosine, constant"]),
        ("precision=int3", ["precision=int3", "float32, bfloat16"]),
        ("nesterov=maybe", ["nesterov=maybe", "true or false"]),
        ("sizes=", ["sizes=", "parts of the MACs"]),
        ("sizes=2", ["sizes=2", "parts of the MACs"]),
        ("seed=-1", ["seed=-1", "from 0"]),
        ("mean=0.5", ["std=", "as many numbers as mean has"]),
        ("std=0", ["std=0", "above 0"]),
        ("milestones=0.5,1.5", ["milestones=0.5,1.5", "parts of the training"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text, words):
    with pytest.raises(InvalidArgumentError) as caught:
        from_text(Settings(), [text])
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


FIELDS = {field.name: field.type for kind in (Settings, *kinds()) for field in fields(kind)}
WHOLE = [name for name, kind in FIELDS.items() if kind in ("int", "tuple[int, ...]")]
FRACTIONS = [name for name, kind in FIELDS.items() if kind in ("float", "tuple[float, ...]")]


@pytest.mark.parametrize("name", [*WHOLE, *FRACTIONS])
def test_a_huge_number_is_refused_in_one_line(name):
    texts = ["1" + "0" * 400, "1e999"] if name in FRACTIONS else ["1" + "0" * 400, "1" + "0" * 5000, "2147483648"]
    for text in texts:
        with pytest.raises(InvalidArgumentError, match=rf"{name}=.*; allowed: |std=; allowed: ") as caught:
            from_text(Settings(), [f"{name}={text}"])
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 400


def test_a_huge_number_from_python_is_refused_in_one_line():
    for wrong in ({"epochs": 10**400}, {"epochs": 10**5000}, {"learning_rate": 10**400}, {"sizes": [10**5000]}):
        with pytest.raises(InvalidArgumentError, match=f"{next(iter(wrong))}=.*; allowed: "):
            with_overrides(Settings(), wrong)


def test_values_from_python_are_checked_as_well():
    assert with_overrides(Settings(), {"learning_rate": 1, "ratio": [0.1, 0.2]}).ratio == (0.1, 0.2)
    for wrong in ({"epochs": 2.0}, {"epochs": True}, {"form": 3}, {"ratio": "0.1,0.2"}, {"ratio": 0.1}):
        with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
            with_overrides(Settings(), wrong)


@dataclass(frozen=True, kw_only=True)
class Own(Settings):
    crops: int = 3
    label: str | None = None


def test_a_subclass_adds_settings_of_its_own():
    settings = from_text(Own(epochs=2), ["crops=5", "label=x"])
    assert (type(settings), settings.crops, settings.label, settings.epochs) == (Own, 5, "x", 2)
    assert from_text(Own(), ["label=none"]).label is None
    with pytest.raises(InvalidArgumentError, match="crops=x"):
        from_text(Own(), ["crops=x"])


def test_those_of_single_methods_are_dataclasses_of_their_own():
    settings = Settings(of_methods=(ElasticSettings(elastic_start=0.3), JointSettings()))
    assert settings.of_methods == (ElasticSettings(elastic_start=0.3),)  # defaults are left out
    assert settings.of(ElasticSettings).elastic_start == 0.3
    assert settings.of(JointSettings) == JointSettings()
    assert settings == with_overrides(Settings(), elastic_start=0.3) == from_text(Settings(), ["elastic_start=0.3"])
    assert settings != Settings()
    assert Settings(of_methods=(ElasticSettings(),)) == Settings()
    with pytest.raises(FrozenInstanceError):
        settings.of(ElasticSettings).elastic_start = 0.5


def test_all_of_them_have_flat_names_and_come_back_from_json():
    names = list(flat(Settings()))
    place = names.index("added_gap")
    assert names[place - 1] == "refresh"
    elastic = [field.name for field in fields(ElasticSettings)]
    assert names[place + 1 : place + 1 + len(elastic) + 1] == [*elastic, "mean"]
    assert "of_methods" not in names
    settings = with_overrides(Settings(epochs=3), added_gap=0.1, elastic_macs=(0.1, 0.2), elastic_order="data")
    stored = json.loads(json.dumps(flat(settings)))
    assert from_plain(Settings(), stored) == settings
    assert from_plain(Settings(), {**stored, "of_a_method_that_is_not_here": 3}) == settings
    with pytest.raises(InvalidArgumentError) as caught:
        from_text(Settings(), ["zzz=3"])
    assert str(caught.value) == f"no setting is called zzz; allowed: {', '.join(names)}"


def test_a_copy_is_the_same():
    settings = with_overrides(Settings(), elastic_start=0.3, added_gap=0.5)
    for same in (
        pickle.loads(pickle.dumps(settings)),
        copy.copy(settings),
        copy.deepcopy(settings),
        replace(settings),
        with_overrides(with_overrides(settings, added_gap=0.1), added_gap=0.5),
        Settings(of_methods=[JointSettings(added_gap=0.5), ElasticSettings(elastic_start=0.3)]),
    ):
        assert (same, hash(same)) == (settings, hash(settings))


@pytest.mark.parametrize("wrong", [3, None, "width", ("width",), {3: 4}, (ElasticSettings(), ElasticSettings())])
def test_what_is_no_settings_of_methods_is_refused_in_one_line(wrong):
    with pytest.raises(SettingError, match=r"^of_methods=.*; allowed: ") as caught:
        Settings(of_methods=wrong)
    assert caught.value.option == "of_methods"


def test_of_methods_is_no_name_on_the_command_line():
    with pytest.raises(InvalidArgumentError, match="no setting is called of_methods"):
        from_text(Settings(), ["of_methods=3"])


def test_a_method_of_the_laboratory_is_named_before_its_settings():
    with pytest.raises(InvalidArgumentError, match=r"method=magic; allowed: plain, decomposable, elastic"):
        from_text(Settings(), ["nonsense=1", "method=magic"])


def test_a_form_may_be_given_by_name_pattern():
    settings = from_text(Settings(), ["form=layer4.*:tucker,*:spatial"])
    assert settings.form == "layer4.*:tucker,*:spatial"
    assert from_text(Settings(), ["form=tucker"]).form == "tucker"
    for wrong in ("tuckr", "layer4.*:tuckr", ":", "layer4.*:"):
        with pytest.raises(SettingError, match=r"form=.*allowed: spatial, channel, tucker, or by name as in"):
            from_text(Settings(), [f"form={wrong}"])
