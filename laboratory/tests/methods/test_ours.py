"""How the library's own methods are compared."""

from decomposable.core.criteria import CRITERIA
from decomposable.core.forms import MATRIX_FORMS
from decomposable.recipes.settings import Settings
from decomposable_lab.methods.base import Training
from decomposable_lab.methods.ours import each_form_and_criterion, short_name, style_of, trainings_of


def test_names_are_those_of_the_papers_figures():
    assert short_name("base", "spatial", "singular_value") == "base_sp_sv"
    assert short_name("base", "channel", "taylor") == "base_ch_tay"
    assert short_name("trp", "channel", "energy") == "trp_ch_eng"


def test_every_form_and_criterion_has_one_name():
    variants = each_form_and_criterion("base")
    assert len(variants) == 8
    pairs = {(v["form"], v["criterion"]) for v in variants.values()}
    assert pairs == {(form, criterion) for form in MATRIX_FORMS for criterion in (*CRITERIA, "taylor")}
    assert all(name == short_name("base", **v) for name, v in variants.items())


def test_normal_learning_is_one_training_whose_network_is_decomposed_in_every_way():
    assert trainings_of("plain", Settings()) == (Training(curve="base", variants=each_form_and_criterion("base")),)
    assert trainings_of("elastic", Settings()) == (Training(curve="elastic"),)
    assert len({style_of(name).color for name in ("plain", "decomposable", "elastic", "trp", "us-net")}) == 5
