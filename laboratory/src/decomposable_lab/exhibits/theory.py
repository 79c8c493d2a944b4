"""Propositions 1 and 2 and appendix E, measured on trained networks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from decomposable.network.decomposed import DecomposedNet
from decomposable_lab import analysis
from decomposable_lab.analysis.layer_errors import ROUNDING
from decomposable_lab.comparison.explorer import readable
from decomposable_lab.exhibits.context import Context
from decomposable_lab.exhibits.shown import Axis, Claim, Figure, Series, Shown, Table, judged

IMAGES = 64
LIPSCHITZ_RATIOS = (0.5, 0.75, 0.9, 0.95)
BOUND_RATIOS = (0.1, 0.2, 0.3, 0.5, 0.75, 0.9)


def proposition_1(context: Context) -> Shown:
    """Return whether the error of a layer's output falls as its rank rises."""
    trained = context.of(context.scale.ablated("decomposable"))
    model, inputs = trained.model("decomposable"), trained.test_inputs(IMAGES)
    found = {form: analysis.errors_by_rank(model, inputs, form=form, images=IMAGES) for form in ("channel", "spatial")}
    spatial = {name: each for name, each in found["spatial"].items() if each.form == "spatial"}
    rows = []
    for name, each in found["channel"].items():
        other = spatial.get(name)
        behind = "–" if other is None else f"{other.rises} of {len(other.energy)}"
        before = "–" if other is None else f"{other.rises_before_taps} of {len(other.energy)}"
        rows.append([name, f"{each.rises} of {len(each.energy)}", before, behind])
    channel_rises = sum(each.rises for each in found["channel"].values())
    before_rises = sum(each.rises_before_taps for each in spatial.values())
    behind_rises = sum(each.rises for each in spatial.values())
    pairs = sum(len(each.energy) for each in spatial.values())
    name, image, largest = _largest_rise(spatial)
    labels = dict(zip(found["channel"], readable(model, found["channel"]), strict=True))
    example = spatial[name] if name else next(iter(found["channel"].values()))
    ranks = list(range(example.output.shape[1]))[1:-1]
    rows = [[labels[row[0]], *row[1:]] for row in rows]
    return Shown(
        figures=[
            Figure(
                title=f"Error over rank: {labels[example.name]} in the spatial form, one image",
                x=Axis(label=f"rank, of {ranks[-1] + 1}"),
                y=Axis(label="‖y − ŷ‖² / ‖y‖²", is_log=True),
                series=[
                    Series(name="of the output", x=ranks, y=example.output[image][1:-1] / example.energy[image]),
                    Series(
                        name="before the vertical taps are summed",
                        x=ranks,
                        y=example.before_taps[image][1:-1] / example.before_taps[image, 0],
                        is_dashed=True,
                    ),
                ],
                note=f"Where the error rises most from one rank to the next: by {largest:.1%} of what it is.",
            )
        ],
        tables=[
            Table(
                title=f"In how many of {IMAGES} images the error of a layer rises somewhere with its rank",
                columns=["layer", "channel form", "spatial form, before the taps are summed", "spatial form, output"],
                rows=rows,
            )
        ],
        claims=[
            judged(
                "The error of a layer's output never rises with its rank (channel form and linear layers).",
                [channel_rises == 0],
                f"it rises in {channel_rises} of {sum(len(e.energy) for e in found['channel'].values())} cases",
            ),
            judged(
                "In the spatial form that holds before the vertical taps are summed.",
                [before_rises == 0],
                f"it rises in {before_rises} of {pairs} cases",
            ),
            judged(
                "In the spatial form, too, the error of a layer's output never rises with its rank.",
                [behind_rises == 0],
                f"it rises in {behind_rises} of {pairs} cases, from a rank to the next by up to {largest:.1%} of "
                "what it is: the proposition is of a matrix product, and the taps are summed behind it",
            ),
        ],
    )


def _largest_rise(found: Mapping[str, analysis.RankErrors]) -> tuple[str, int, float]:
    """Of which layer and image the error rises most from one rank to the next, and by what part of it."""
    best = ("", 0, 0.0)
    for name, each in found.items():
        errors = each.output[:, 1:-1]  # at full rank there is none
        rises = np.diff(errors, axis=1) / np.maximum(errors[:, :-1], ROUNDING * each.energy[:, None])
        if rises.size and float(rises.max()) > best[2]:
            best = (name, int(rises.max(axis=1).argmax()), float(rises.max()))
    return best


def proposition_2(context: Context) -> Shown:
    """Return the divergence of cut networks, and its bound, on a fully connected network."""
    trained = context.of(context.scale.connected.with_methods("decomposable"))
    net = trained.network("decomposable")
    assert isinstance(net, DecomposedNet)
    inputs = trained.test_inputs(1000)
    found = {}
    for ratio in BOUND_RATIOS:
        net.resize_(ratio=ratio)
        found[ratio] = analysis.divergence(net, inputs)
    means = {ratio: (float(each.kl.mean()), float(each.bound.mean())) for ratio, each in found.items()}
    rows = [
        [f"{ratio:g}", f"{kl:.3g}", f"{bound:.3g}", f"{found[ratio].tightness:.1e}"]
        for ratio, (kl, bound) in means.items()
    ]
    return Shown(
        figures=[
            Figure(
                title="Divergence of the softmax from the full network's, and its bound",
                x=Axis(label="Z, the part of all bases that is kept"),
                y=Axis(label="nats, mean of 1,000 test images", is_log=True),
                series=[
                    Series(
                        name="bound of proposition 2", x=list(means), y=[b for _, b in means.values()], is_dashed=True
                    ),
                    Series(name="KL(p ‖ p̃)", x=list(means), y=[max(kl, 1e-9) for kl, _ in means.values()]),
                ],
            )
        ],
        tables=[
            Table(title="How tight it is", columns=["Z", "KL, mean", "bound, mean", "KL / bound, mean"], rows=rows)
        ],
        claims=[
            judged(
                "KL(p ‖ p̃) stays below the bound.",
                [each.holds for each in found.values()],
                f"at {sum(each.holds for each in found.values())} of {len(found)} sizes, with "
                f"{len(next(iter(found.values())).kl):,} images each; it is {_range(found)} of the bound",
            )
        ],
    )


def _range(found: dict[float, analysis.Divergence]) -> str:
    values = [each.tightness for each in found.values()]
    return f"{min(values):.1e} to {max(values):.1e}"


@dataclass(frozen=True)
class _Constants:
    """Lipschitz constants of all layers at each rank ratio Z."""

    found: dict[float, analysis.Lipschitz]

    @cached_property
    def known(self) -> NDArray[np.bool_]:
        """Return the layers that an error reaches at every Z: products of others would not be comparable."""
        return np.all([np.isfinite(each.empirical) for each in self.found.values()], axis=0)

    @cached_property
    def products(self) -> dict[float, NDArray[np.float64]]:
        """Ω̂ of the layers before the known ones: the products of those from each known one to the last."""
        return {
            ratio: np.asarray(np.cumprod(each.empirical[self.known][::-1])[::-1], dtype=np.float64)
            for ratio, each in self.found.items()
        }


def appendix_e(context: Context) -> Shown:
    """Show Lipschitz constants of layers and their products, in theory and measured."""
    trained = context.of(context.scale.chained("decomposable"))
    net = trained.network("decomposable")
    assert isinstance(net, DecomposedNet)
    inputs = [x for x, _ in trained.some]
    count = sum(map(len, inputs))
    found = {}
    for ratio in LIPSCHITZ_RATIOS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # between calibrated sizes, too, a layer has a Lipschitz constant
            net.resize_(ratio=ratio)
        found[ratio] = analysis.lipschitz(net, inputs, images=count)
    constants = _Constants(found)
    names = readable(trained.task.build_model(), found[0.5].names)
    return Shown(figures=_lipschitz_figures(constants, names, count), claims=_lipschitz_claims(constants))


def _lipschitz_figures(constants: _Constants, names: Sequence[str], images: int) -> list[Figure]:
    half = constants.found[0.5]
    places = list(range(1, len(names) + 1))
    # Ω of a layer is the product of those behind it.
    before = [place - 1 for place, is_known in zip(places, constants.known, strict=True) if is_known]
    layers = Axis(label="layer, from the first to the last")
    return [
        Figure(
            title="ω of each layer, Z = 0.5",
            x=layers,
            y=Axis(label="ω", is_log=True),
            series=[
                Series(name="theoretical", x=places, y=half.theoretical, is_dashed=True),
                Series(name="empirical", x=places, y=half.empirical),
            ],
            note=f"{images} training images. Layers: "
            + ", ".join(f"{place} {name}" for place, name in zip(places, names, strict=True))
            + ". Where a line has no point, no error arrives.",
        ),
        Figure(
            title="Ω, the product over all later layers, Z = 0.5",
            x=layers,
            y=Axis(label="Ω", is_log=True),
            series=[
                Series(name="theoretical", x=places[:-1], y=half.theoretical_products, is_dashed=True),
                Series(name="empirical", x=before, y=constants.products[0.5]),
            ],
        ),
        Figure(
            title="Empirical Ω at four rank ratios",
            x=layers,
            y=Axis(label="Ω", is_log=True),
            series=[Series(name=f"Z = {ratio:g}", x=before, y=each) for ratio, each in constants.products.items()],
        ),
    ]


def _lipschitz_claims(constants: _Constants) -> list[Claim]:
    found, products = constants.found, constants.products
    quotients = {ratio: each.empirical / each.theoretical for ratio, each in found.items()}
    growth = {ratio: float(each[-1] / each[0]) for ratio, each in products.items()}
    below_one = {ratio: int((each.empirical[constants.known] < 1).sum()) for ratio, each in found.items()}
    order = [float(np.mean(np.log(each))) for each in products.values()]
    return [
        judged(
            "The empirical constants are much smaller than the theoretical ones (half of them, or less).",
            [bool(np.nanmedian(each) <= 0.5 and np.nanmax(each) < 1) for each in quotients.values()],
            "empirical as a part of theoretical, the median and the largest of all layers: "
            + ", ".join(f"{np.nanmedian(q):.2f} and {np.nanmax(q):.2f} at Z = {z:g}" for z, q in quotients.items()),
        ),
        judged(
            "The theoretical constants are above 1 in all layers.",
            [bool((each.theoretical > 1).all()) for each in found.values()],
            f"the smallest at Z = 0.5 is {found[0.5].theoretical.min():.2f}",
        ),
        judged(
            "Some layers have empirical constants below 1, so that Ω̂ does not grow towards earlier layers.",
            [below_one[ratio] > 0 and growth[ratio] >= 1 for ratio in found],
            "; ".join(
                f"Z = {ratio:g}: below 1 in {below_one[ratio]} of {constants.known.sum()} layers that an error "
                f"reaches, Ω̂ {products[ratio][0]:.2g} at the first and {products[ratio][-1]:.2g} at the last"
                for ratio in found
            ),
        ),
        judged(
            "Networks with a smaller Z tend to have a smaller Ω̂.",
            [a <= b + 1e-9 for a, b in pairwise(order)],
            "mean of log Ω̂: " + ", ".join(f"{v:.2f} at Z = {z:g}" for z, v in zip(found, order, strict=True)),
        ),
    ]
