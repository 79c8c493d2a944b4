"""Figure 2 of the paper, and its appendices A and "channel": one network, one change at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from torch import nn

from decomposable.network.decompose import decompose
from decomposable_edge.sizing.chain import ranks_of
from decomposable_lab import analysis
from decomposable_lab.comparison.explorer import readable
from decomposable_lab.exhibits.context import (
    SIZES,
    Context,
    Points,
    Trained,
    label_of,
    series_of,
    trp_label,
)
from decomposable_lab.exhibits.scales import Group, Scale
from decomposable_lab.exhibits.shown import (
    ACCURACY,
    MACS,
    Axis,
    Claim,
    Figure,
    Series,
    Shown,
    Table,
    judged,
    over_seeds,
)
from decomposable_lab.exhibits.verdicts import better, tally, told_apart
from decomposable_lab.methods.ours import short_name, trainings_of
from decomposable_lab.methods.us_net import UniversalSettings

RATIOS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
CRITERIA = {"uniform": "uniform", "energy": "energy", "singular_value": "singular value"}
NEAR_UNIFORM = 0.1
"""The standard deviation over the layers of the part of its bases that each keeps."""

VANISHED = 1e-3
"""Of a layer's largest singular value: what is below counts as zero."""


def balance_groups(scale: Scale) -> dict[float, Group]:
    """Return a training for every λ: 0 is normal learning, and 0.5 the one of all other ablations."""
    default = 0.5
    return {0.0: scale.ablated("plain")} | {
        balance: scale.ablated("decomposable")
        if balance == default
        else scale.ablated("decomposable", label=f"balance-{balance:g}", balance=balance)
        for balance in scale.balances
    }


def figure_2a(context: Context) -> Shown:
    """Show accuracy against λ at the paper's rank ratios, each network cut without retraining."""
    groups = balance_groups(context.scale)
    by_balance = {balance: _by_ratio(context.of(group)) for balance, group in groups.items()}
    balances = list(groups)
    series = {z: over_seeds(f"Z = {z:g}", balances, [seen[z] for seen in by_balance.values()]) for z in RATIOS}
    found = {ratio: [fmean(seen[ratio]) for seen in by_balance.values()] for ratio in RATIOS}
    return Shown(
        figures=[
            Figure(
                title="Accuracy over the balance of the two losses, for networks cut to a part Z of their bases",
                x=(over_balance := Axis(label="λ, the weight of the low-rank loss (0: normal learning)")),
                y=ACCURACY,
                series=list(series.values()),
            ),
            Figure(
                title="The same, the largest networks alone",
                x=over_balance,
                y=ACCURACY,
                series=[series[ratio] for ratio in RATIOS if ratio >= 0.5],
            ),
        ],
        claims=_claims_of_2a(balances, found),
    )


def _by_ratio(trained: Trained) -> dict[float, list[float]]:
    """For every rank ratio the accuracy of each seed's network, cut to it without retraining."""
    (method,), seeds = trained.group.methods, trained.group.seeds

    def measure() -> dict[str, list[float]]:
        nets = [decompose(trained.model(method, seed), trained.example) for seed in seeds]
        return {
            f"{z:g}": [
                trained.calibrated_accuracy(net.extract(net.plan(ratio=z)), f"{trained.group.folder}, Z = {z:g}")
                for net in nets
            ]
            for z in RATIOS
        }

    return {
        float(ratio): values for ratio, values in trained.kept(f"by-ratio-{method}", [method], measure, seeds).items()
    }


def _claims_of_2a(balances: Sequence[float], found: Mapping[float, Sequence[float]]) -> list[Claim]:
    half, full = balances.index(0.5), found[1.0]
    small = [ratio for ratio in RATIOS if ratio < 1]
    improved = [
        told_apart(found[z][half], found[z][0]) == "ahead" and told_apart(found[z][-1], found[z][half]) != "behind"
        for z in small
    ]
    gains = [
        f"{found[z][half] - found[z][0]:+.1f} and {found[z][-1] - found[z][half]:+.1f} at Z = {z:g}" for z in small
    ]
    early = balances.index(0.3) if 0.3 in balances else None
    return [
        judged(
            "The performance of compressed models improves as λ increases.",
            improved,
            "from λ = 0 to 0.5, and from there to 1: " + ", ".join(gains),
        ),
        judged(
            "That of the full model is almost flat (within a point, λ = 1 left aside).",
            [max(full[:-1]) - min(full[:-1]) <= 1],
            f"full size: {min(full[:-1]):.1f} to {max(full[:-1]):.1f}% for λ from 0 to {balances[-2]:g}; "
            f"{full[-1]:.1f}% at {balances[-1]:g}",
        ),
        judged(
            "With λ = 0.3 the full model is better than under normal learning.",
            [] if early is None else [full[early] > full[0]],
            "no such λ" if early is None else f"{full[early]:.2f} and {full[0]:.2f}%",
        ),
    ]


PAPER_2A = Table(
    title="The paper's, ResNet-34 on CIFAR-100, full size",
    columns=["training", "accuracy (%)"],
    rows=[["normal learning", "77.49"], ["joint, λ = 0.3", "77.65"]],
)


def _curve_pair(context: Context) -> dict[str, tuple[str, Points]]:
    """By name, whose line it is, and the curve: both trainings in both forms; the channel form is of no method."""
    spatial = context.of(context.scale.ablated("plain", "decomposable"))
    channel = context.of(context.scale.ablated("decomposable", label="channel", form="channel"))
    plain = spatial.curves("plain")
    return {
        "joint, spatial": ("decomposable", spatial.shown("decomposable")),
        "joint, channel": ("", channel.shown("decomposable")),
        "normal learning, spatial": ("plain", plain[short_name("base", "spatial", "singular_value")]),
        "normal learning, channel": ("", plain[short_name("base", "channel", "singular_value")]),
    }


def figure_2b(context: Context) -> Shown:
    """Compare joint with normal learning, in both forms."""
    curves = _curve_pair(context)
    series = [series_of(points, name, whose, is_dashed="channel" in name) for name, (whose, points) in curves.items()]
    claims = []
    for form in ("spatial", "channel"):
        smaller = [p for p in curves[f"normal learning, {form}"][1] if p["size"] < 1]
        text = f"Joint learning is consistently better than normal learning ({form} form)."
        claims.append(better(text, tally(curves[f"joint, {form}"][1], [smaller])))
    return Shown(
        figures=[Figure(title="Joint and normal learning, cut in both forms", x=MACS, y=ACCURACY, series=series)],
        claims=claims,
    )


def figure_2c(context: Context) -> Shown:
    """Compare criteria for the ranks, on one jointly trained network."""
    trained = context.of(context.scale.ablated("decomposable"))
    found = trained.kept("criteria", ["decomposable"], lambda: _by_criterion(trained), trained.group.seeds)
    series = [
        over_seeds(name, [fmean(macs) for macs, _ in found[key].values()], [seen for _, seen in found[key].values()])
        for key, name in CRITERIA.items()
    ]
    means = {key: {size: fmean(seen) for size, (_, seen) in found[key].items()} for key in CRITERIA}
    rows = [(size, *(means[key][size] for key in CRITERIA)) for size in means["singular_value"] if size != "1"]
    seen = ", ".join(f"{size}×: {u:.1f}, {e:.1f}, {s:.1f}" for size, u, e, s in rows)
    return Shown(
        figures=[
            Figure(title="Which bases to drop: three criteria, one trained network", x=MACS, y=ACCURACY, series=series)
        ],
        claims=[
            judged(
                "The singular value is the best criterion, or as good as the best.",
                [told_apart(s, max(u, e)) != "behind" for _, u, e, s in rows],
                f"uniform, energy and singular value at {seen}",
            ),
            judged(
                "Energy is better than uniform.",
                [told_apart(e, u) == "ahead" for _, u, e, _ in rows],
                "the same figures",
            ),
        ],
    )


def _by_criterion(trained: Trained) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """For every criterion and size the MACs and the accuracy of each seed's network."""
    models = [trained.model("decomposable", seed) for seed in trained.group.seeds]
    found: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for criterion in CRITERIA:
        nets = [decompose(model, trained.example, criterion=criterion) for model in models]
        smallest = max(net.selector.smallest_size for net in nets)
        found[criterion] = {}
        for size in (size for size in SIZES if size >= smallest):
            plans = [net.plan(macs=size) for net in nets]
            modules = [net.extract(plan) for net, plan in zip(nets, plans, strict=True)]
            what = f"{criterion} at {size:g}×"
            accuracies = [trained.calibrated_accuracy(module, what) for module in modules]
            found[criterion][f"{size:g}"] = [plan.macs_fraction or 0.0 for plan in plans], accuracies
    return found


def figure_2d(context: Context) -> Shown:
    """Return the ranks that each criterion selects."""
    trained = context.of(context.scale.ablated("decomposable"))
    plans = analysis.selected_ranks(trained.model("decomposable"), trained.example, macs=0.25)
    names = list(next(iter(plans.values())).ranks)
    parts = {
        key: [sum(ranks_of(plan.ranks[name])) / sum(ranks_of(plan.full_ranks[name])) for name in names]
        for key, plan in plans.items()
    }
    spread = {key: float(np.std(values)) for key, values in parts.items()}
    places = list(range(len(names)))
    return Shown(
        figures=[
            Figure(
                title="Ranks by layer at a quarter of the MACs, as a part of the full rank",
                x=Axis(label="layer"),
                y=Axis(label="part of the full rank"),
                series=[Series(name=CRITERIA[key], x=places, y=values) for key, values in parts.items()],
                kind="bars",
                categories=readable(trained.model("decomposable"), names),
            )
        ],
        claims=[
            judged(
                "Ranks by singular values are distributed more sharply than those by energy, which are near uniform.",
                [spread["singular_value"] > spread["energy"], spread["energy"] <= NEAR_UNIFORM],
                f"standard deviation of the parts over the layers (near uniform: {NEAR_UNIFORM:g} or less): "
                + ", ".join(f"{CRITERIA[key]} {value:.2f}" for key, value in spread.items()),
            )
        ],
    )


def figure_2e(context: Context) -> Shown:
    """Show singular values after normal learning, TRP and joint learning."""
    trained = context.of(context.scale.ablated("plain", "trp", "decomposable"))
    spatial = next(name for name in trained.trainings("trp") if name.startswith("sp"))
    models = {
        "plain": trained.model("plain"),
        "trp": trained.model("trp", training=spatial),
        "decomposable": trained.model("decomposable"),
    }
    sigmas = {key: analysis.singular_values(model) for key, model in models.items()}
    layer = _widest(models["plain"])
    curve = next(each.curve for each in trainings_of("trp", trained.settings) if each.folder == spatial)
    names = dict(zip(sigmas["plain"], readable(models["plain"], sigmas["plain"]), strict=True))
    gone = {
        key: float(np.mean(np.concatenate([each / each[0] for each in values.values()]) < VANISHED))
        for key, values in sigmas.items()
    }
    mass = {key: {name: float(each.sum()) for name, each in values.items()} for key, values in sigmas.items()}
    parts = {name: mass["decomposable"][name] / mass["plain"][name] for name in mass["plain"]}
    figures = [
        Figure(
            title=f"Singular values of {names[layer]}{what}",
            x=Axis(label="basis"),
            y=Axis(label=label, is_log=True),
            series=[
                Series(
                    name=label_of(key),
                    x=np.arange(1, len(values[layer]) + 1).tolist(),
                    y=[max(float(v), 1e-6) for v in values[layer] / (values[layer][0] if is_relative else 1.0)],
                    method=key,
                )
                for key, values in sigmas.items()
            ],
            note=f"{trp_label(curve)}. What is below 10⁻⁶ is drawn there.",
        )
        for what, label, is_relative in (("", "σ", False), (", as parts of its largest", "σ / σ₁", True))
    ]
    return Shown(
        figures=figures,
        claims=[
            judged(
                "TRP's singular values fall rapidly to zero; joint learning's do not.",
                [gone["trp"] > 0.1, gone["decomposable"] < 0.05],
                ", ".join(f"{label_of(key)}: {part:.0%} of all bases below 0.001 σ₁" for key, part in gone.items()),
            ),
            judged(
                "Joint learning reduces singular values in comparison with normal learning.",
                [part < 1 for part in parts.values()],
                "Σσ of a layer, of what it is after normal learning: "
                + ", ".join(f"{names[name]} {part:.2f}" for name, part in parts.items()),
            ),
        ],
    )


def _widest(model: nn.Module) -> str:
    """Return the convolution with the most bases, the last of equals: an example as in the paper."""
    values = analysis.singular_values(model)
    modules = dict(model.named_modules())
    convolutions = [name for name in values if isinstance(modules[name], nn.Conv2d)]
    return max(reversed(convolutions), key=lambda name: len(values[name]))


def figure_2f(context: Context) -> Shown:
    """Return how far a layer's output moves as its parameters are cut: by rank, and by width."""
    trained = context.of(context.scale.ablated("decomposable", "us-net"))
    model, slim = trained.model("decomposable"), trained.network("us-net")
    slim.resize_(macs=1.0)
    inputs = trained.test_inputs(64)
    by_rank = {form: analysis.errors_by_rank(model, inputs, form=form) for form in ("spatial", "channel")}
    by_width = analysis.errors_by_width(slim.extract(), inputs)
    layer = _widest(model)
    cut = by_width[layer]
    full = cut.params[-1]
    series = [
        Series(
            name=f"Decomposable-Net, {form} form", x=each.params / full, y=each.relative, method=method, is_dashed=dash
        )
        for form, method, dash in (("spatial", "decomposable", False), ("channel", "", True))
        if (each := by_rank[form][layer])
    ]
    series.append(Series(name="US-Net, first channels", x=cut.params / full, y=cut.relative, method="us-net"))
    channel = by_rank["channel"][layer]
    at = [
        float(np.interp(0.25 * full, each.params, each.relative)) for each in (by_rank["spatial"][layer], channel, cut)
    ]
    spatial, images = by_rank["spatial"][layer], len(channel.energy)
    smallest = min(trained.settings.of(UniversalSettings).width_range)
    width_rises = cut.rises(smallest)
    return Shown(
        figures=[
            Figure(
                title=f"Error of {readable(model, [layer])[0]} as its parameters are cut",
                x=Axis(label="parameters, as a fraction of the dense layer's"),
                y=Axis(label="‖y − ŷ‖² / ‖y‖², mean of 64 images"),
                series=series,
                note="The factors of full rank have more parameters than the dense layer. Of a US-Net, output channels "
                "that are gone count as an error, as zeros.",
            )
        ],
        claims=[
            judged(
                "The error of US-Nets increases more rapidly as parameters go.",
                [at[0] < at[2], at[1] < at[2]],
                f"at a quarter of the parameters: spatial {at[0]:.3f}, channel {at[1]:.3f}, first channels {at[2]:.3f}",
            ),
            judged(
                "That of Decomposable-Net is monotonic.",
                [channel.rises == 0, spatial.rises == 0],
                f"it rises somewhere in {channel.rises} of {images} images in the channel form, in {spatial.rises} in "
                f"the spatial form, and in {spatial.rises_before_taps} before its vertical taps are summed (see "
                "proposition 1)",
            ),
            judged(
                "That of US-Nets is not.",
                [width_rises > 0],
                f"from {smallest:g}× of the channels up, it rises somewhere in {width_rises} of {images} images",
            ),
        ],
    )
