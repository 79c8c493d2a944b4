import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decomposable.core.criteria import CRITERIA, energy, find_criterion, scores_of, singular_value, uniform
from decomposable_edge.sizing.order import prefix_ranks
from refusals import Saying, refused

some_spectra = settings(deadline=None, derandomize=True, max_examples=50)
values = st.floats(1e-3, 1e3)
spectra = st.lists(values, min_size=1, max_size=12).map(lambda v: np.array(sorted(v, reverse=True)))


def test_singular_value_scores_are_the_singular_values():
    np.testing.assert_array_equal(singular_value(np.array([4.0, 2.5, 0.0])), [4, 2.5, 0])


def test_energy_scores_by_hand():
    np.testing.assert_allclose(energy(np.array([3.0, 2.0, 1.0])), [14 / 14, 5 / 14, 1 / 14])


def test_uniform_scores_by_hand():
    np.testing.assert_allclose(uniform(np.array([9.0, 1.0, 0.1, 0.0])), [0.875, 0.625, 0.375, 0.125])


@some_spectra
@given(sigma=spectra)
@pytest.mark.parametrize("name", CRITERIA)
def test_each_layer_loses_its_smallest_bases_first(name, sigma):
    assert (np.diff(CRITERIA[name](sigma)) <= 0).all()


@some_spectra
@given(sigma=spectra, missing=st.floats(0.001, 0.999))
def test_energy_keeps_the_fewest_bases_that_leave_no_more_than_the_threshold_missing(sigma, missing):
    kept = int((energy(sigma) > missing).sum())
    total = np.square(sigma).sum()

    def share(rank):
        return np.square(sigma[:rank]).sum() / total

    assert 1 - share(kept) <= missing + 1e-9
    assert 1 - share(kept - 1) > missing - 1e-9


@some_spectra
@given(sigma=spectra, scale=st.sampled_from([1e-30, 1e-20, 1.0, 1e20]))
def test_energy_and_uniform_do_not_depend_on_the_scale_of_a_layer(sigma, scale):
    for criterion in (energy, uniform):
        np.testing.assert_allclose(criterion(sigma * scale), criterion(sigma), rtol=1e-9)


def test_energy_of_a_zero_weight_is_finite():
    np.testing.assert_array_equal(energy(np.zeros(3)), [0, 0, 0])


def test_energy_tells_small_tails_apart():
    tail = energy(np.array([1.0, 1e-9, 1e-10, 1e-11]))[1:]
    assert (np.diff(tail) < 0).all()
    assert tail[-1] == pytest.approx(1e-22)


@pytest.mark.parametrize(("ratio", "expected"), [(0.25, [1, 2, 3]), (0.5, [2, 4, 6]), (0.75, [3, 6, 9])])
def test_uniform_keeps_equal_shares_of_every_layer(ratio, expected):
    full = np.array([4, 8, 12])
    scores = [uniform(np.linspace(size, 1, size)) for size in full]
    assert prefix_ranks(scores, ratio, np.ones(3, int), full).tolist() == expected


def test_singular_values_of_different_layers_are_compared_as_they_are():
    scores = [singular_value(np.array([9.0, 8.0, 7.0])), singular_value(np.array([6.0, 0.5, 0.4]))]
    assert prefix_ranks(scores, 0.5, np.ones(2, int), np.array([3, 3])).tolist() == [3, 1]


@pytest.mark.parametrize("name", ["singular_value", "energy", "uniform"])
def test_criteria_are_found_by_name(name):
    assert find_criterion(name) is CRITERIA[name]


def test_a_function_is_a_criterion_itself():
    assert find_criterion(np.sqrt) is np.sqrt


@pytest.mark.parametrize("wrong", ["singular_values", "taylor", None, 3])
def test_unknown_criterion_is_refused_with_what_is_allowed(wrong):
    with refused("criterion", wrong, Saying("^'singular_value', ")):
        find_criterion(wrong)


def test_a_near_miss_is_pointed_out():
    with refused("criterion", "enregy") as caught:
        find_criterion("enregy")
    assert "did you mean 'energy'" in str(caught.value)


def test_scores_of_an_own_criterion_are_taken_as_floats():
    np.testing.assert_array_equal(scores_of(lambda sigma: [3, 1], "fc", [np.array([2.0, 1.0])]), [[3.0, 1.0]])


@pytest.mark.parametrize("bad", [[1.0], [[1.0, 2.0]], [1.0, float("nan")], [1.0, float("inf")]])
def test_an_own_criterion_that_returns_nonsense_is_refused_with_the_layer(bad):
    with refused("criterion", allowed="2 finite scores", layer="block.fc"):
        scores_of(lambda sigma: bad, "block.fc", [np.array([2.0, 1.0])])


def test_scores_by_layer_stay_whatever_the_singular_values_are():
    given = {"fc": [np.array([2.0, 2.0, 0.5])]}
    found = find_criterion(given)
    for sigma in (np.array([3.0, 2.0, 1.0]), np.array([9.0, 0.0, 0.0])):
        np.testing.assert_array_equal(scores_of(found, "fc", [sigma]), [[2.0, 2.0, 0.5]])
    given["fc"][0][0] = 7.0
    np.testing.assert_array_equal(scores_of(found, "fc", [np.ones(3)]), [[2.0, 2.0, 0.5]], "a copy is kept")


@pytest.mark.parametrize("wrong", [[[1.0, 2.0]], [[1.0, float("nan")]], [[[2.0, 1.0]]], [], 3, ["falling"], None])
def test_scores_that_are_not_in_falling_order_are_refused_with_the_layer(wrong):
    with refused("criterion", allowed=Saying("in falling order"), layer="block.fc") as caught:
        find_criterion({"block.fc": wrong})
    assert caught.value.came is wrong


@pytest.mark.parametrize(
    ("given", "came"),
    [({}, []), ({"fc": [[2.0, 1.0]]}, [2]), ({"fc": [[2.0, 1.0, 0.0]] * 2}, [3, 3])],
)
def test_scores_of_other_layers_are_refused(given, came):
    with refused("criterion", came, Saying(r"^scores for \[3\] bases"), layer="fc"):
        scores_of(find_criterion(given), "fc", [np.ones(3)])
