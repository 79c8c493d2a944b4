"""Figure 2 of the paper, and its appendices A and "channel": one network, one change at a time."""

from __future__ import annotations

from functools import partial

import numpy as np
from torch import Tensor, nn

from decomposable import analysis
from decomposable.comparison.exhibits.context import (
    SIZES,
    Context,
    Points,
    Trained,
    at_size,
    label_of,
    series_of,
    trp_label,
)
from decomposable.comparison.exhibits.scales import Group, Scale
from decomposable.comparison.exhibits.shown import Axis, Figure, Series, Shown, Table, judged
from decomposable.comparison.exhibits.verdicts import ALMOST_ALL, FLAT, better, tally
from decomposable.core.joint import JointObjective
from decomposable.data.base import Batch, TrainBatches
from decomposable.methods.decomposing import short_name
from decomposable.methods.us_net import UniversalSettings
from decomposable.network.decompose import decompose
from decomposable.sizing.chain import ranks_of

MACS = Axis(label="MACs, as a fraction of the original network's", is_log=True)
ACCURACY = Axis(label="test accuracy (%)")
RATIOS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
CRITERIA = {"uniform": "uniform", "energy": "energy", "singular_value": "singular value"}
GAPS = (1e-6, 1e-12)
VANISHED = 1e-3
"""Of a layer's largest singular value: what is below counts as zero."""


def balance_groups(scale: Scale) -> dict[float, Group]:
    """A training for every λ: 0 is normal learning, and 0.5 the one of all other ablations."""
    default = 0.5
    return {0.0: scale.ablated("plain")} | {
        balance: scale.ablated("decomposable")
        if balance == default
        else scale.ablated("decomposable", label=f"balance-{balance:g}", balance=balance)
        for balance in scale.balances
    }


def figure_2a(context: Context) -> Shown:
    """Accuracy against λ at the paper's rank ratios, each network cut without retraining."""
    groups = balance_groups(context.scale)
    found: dict[float, list[float]] = {ratio: [] for ratio in RATIOS}
    for balance, group in groups.items():
        trained = context.of(group)
        net = decompose(trained.model(group.methods[0]), trained.example)
        for ratio in RATIOS:
            module = net.extract(net.choose(ratio=ratio))
            found[ratio].append(trained.calibrated_accuracy(module, f"λ = {balance:g}, Z = {ratio:g}"))
    balances = list(groups)
    series = [Series(name=f"Z = {ratio:g}", x=balances, y=values) for ratio, values in found.items()]
    half = balances.index(0.5)
    small = [ratio for ratio in RATIOS if ratio <= 0.4]
    gains = {ratio: (found[ratio][half] - found[ratio][0], found[ratio][-1] - found[ratio][half]) for ratio in small}
    full = found[1.0]
    return Shown(
        figures=[
            Figure(
                title="Accuracy over the balance of the two losses, for networks cut to a part Z of their bases",
                x=Axis(label="λ, the weight of the low-rank network's loss (0: normal learning)"),
                y=ACCURACY,
                series=series,
            )
        ],
        claims=[
            judged(
                "The performance of compressed models improves as λ increases.",
                [first > FLAT and second > -FLAT for first, second in gains.values()],
                "from λ = 0 to 0.5, and from there to 1: "
                + ", ".join(f"{a:+.1f} and {b:+.1f} at Z = {ratio:g}" for ratio, (a, b) in gains.items()),
            ),
            judged(
                "That of the full model is almost flat (within a point, λ = 1 left aside).",
                [max(full[:-1]) - min(full[:-1]) <= 2 * FLAT],
                f"full size: {min(full[:-1]):.1f} to {max(full[:-1]):.1f}% for λ from 0 to {balances[-2]:g}; "
                f"{full[-1]:.1f}% at {balances[-1]:g}",
            ),
            judged(
                "With λ = 0.3 the full model is not worse than under normal learning.",
                [full[balances.index(0.3)] >= full[0] - FLAT] if 0.3 in balances else [],
                f"{full[balances.index(0.3)]:.2f} and {full[0]:.2f}%" if 0.3 in balances else "no such λ",
            ),
        ],
    )


PAPER_2A = Table(
    title="The paper's, ResNet-34 on CIFAR-100, full size",
    columns=["training", "accuracy (%)"],
    rows=[["normal learning", "77.49"], ["joint, λ = 0.3", "77.65"]],
)


def _curve_pair(context: Context) -> dict[str, tuple[str, Points]]:
    """By name, whose line it is, and the curve: both trainings in both forms."""
    spatial = context.of(context.scale.ablated("plain", "decomposable"))
    channel = context.of(context.scale.ablated("decomposable", label="channel", form="channel"))
    plain = spatial.curves("plain")
    return {
        "joint, spatial": ("decomposable", spatial.shown("decomposable")),
        "joint, channel": ("elastic", channel.shown("decomposable")),
        "normal learning, spatial": ("plain", plain[short_name("base", "spatial", "singular_value")]),
        "normal learning, channel": ("us-net", plain[short_name("base", "channel", "singular_value")]),
    }


def figure_2b(context: Context) -> Shown:
    """Joint against normal learning, in both forms."""
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
    """Criteria for the ranks, on one jointly trained network."""
    trained = context.of(context.scale.ablated("decomposable"))
    model = trained.model("decomposable")
    found: dict[str, list[float]] = {}
    macs: dict[str, list[float]] = {}
    for criterion in CRITERIA:
        net = decompose(model, trained.example, criterion=criterion)
        sizes = [size for size in SIZES if size >= net.selector.smallest_size]
        plans = [net.choose(macs=size) for size in sizes]
        macs[criterion] = [plan.macs_fraction or 0.0 for plan in plans]
        found[criterion] = [
            trained.calibrated_accuracy(net.extract(plan), f"{criterion} at {size:g}×")
            for size, plan in zip(sizes, plans, strict=True)
        ]
    series = [Series(name=name, x=macs[key], y=found[key]) for key, name in CRITERIA.items()]
    pairs = list(zip(SIZES[1:], *(found[key][1:] for key in CRITERIA), strict=False))
    seen = ", ".join(f"{size:g}×: {u:.1f}, {e:.1f}, {s:.1f}" for size, u, e, s in pairs)
    return Shown(
        figures=[
            Figure(title="Which bases to drop: three criteria, one trained network", x=MACS, y=ACCURACY, series=series)
        ],
        claims=[
            judged(
                "The singular value is the best criterion, or as good as the best.",
                [s > max(u, e) - FLAT for _, u, e, s in pairs],
                f"uniform, energy and singular value at {seen}",
            ),
            judged("Energy is better than uniform.", [e > u + FLAT for _, u, e, _ in pairs], "the same figures"),
        ],
    )


def figure_2d(context: Context) -> Shown:
    """The ranks that each criterion selects."""
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
                categories=names,
            )
        ],
        claims=[
            judged(
                "Ranks by singular values are distributed more sharply than those by energy, which are near uniform.",
                [spread["singular_value"] > spread["energy"]],
                "standard deviation of the parts over the layers: "
                + ", ".join(f"{CRITERIA[key]} {value:.2f}" for key, value in spread.items()),
            )
        ],
    )


def figure_2e(context: Context) -> Shown:
    """Singular values after normal learning, TRP and joint learning."""
    trained = context.of(context.scale.ablated("plain", "trp", "decomposable"))
    spatial = next(name for name in trained.trainings("trp") if name.startswith("sp"))
    models = {
        "plain": trained.model("plain"),
        "trp": trained.model("trp", training=spatial),
        "decomposable": trained.model("decomposable"),
    }
    sigmas = {key: analysis.singular_values(model) for key, model in models.items()}
    layer = _widest(models["plain"])
    gone = {
        key: float(np.mean(np.concatenate([each / each[0] for each in values.values()]) < VANISHED))
        for key, values in sigmas.items()
    }
    mass = {key: {name: float(each.sum()) for name, each in values.items()} for key, values in sigmas.items()}
    parts = {name: mass["decomposable"][name] / mass["plain"][name] for name in mass["plain"]}
    figures = [
        Figure(
            title=f"Singular values of layer '{layer}'{what}",
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
            note=f"TRP: {spatial}. What is below 10⁻⁶ is drawn there.",
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
                + ", ".join(f"{name} {part:.2f}" for name, part in parts.items()),
            ),
        ],
    )


def _widest(model: nn.Module) -> str:
    """The convolution with the most bases, the last of equals: an example as in the paper."""
    values = analysis.singular_values(model)
    modules = dict(model.named_modules())
    convolutions = [name for name in values if isinstance(modules[name], nn.Conv2d)]
    return max(reversed(convolutions), key=lambda name: len(values[name]))


def figure_2f(context: Context) -> Shown:
    """How far a layer's output moves as its parameters are cut: by rank, and by width."""
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
        for form, method, dash in (("spatial", "decomposable", False), ("channel", "elastic", True))
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
                title=f"Error of layer '{layer}' as its parameters are cut",
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


def gap_groups(scale: Scale) -> dict[float, Group]:
    """A training for every added constant."""
    return {gap: scale.ablated("decomposable", label=f"gap-{gap:g}", added_gap=gap) for gap in GAPS}


def appendix_a(context: Context) -> Shown:
    """Clipping against added constants, and the norms of both networks' gradients."""
    clipped = context.of(context.scale.ablated("decomposable"))
    points: dict[str, Points] = {"clipped (the paper's)": clipped.shown("decomposable")}
    points |= {f"+{gap:g}": context.of(g).shown("decomposable") for gap, g in gap_groups(context.scale).items()}
    methods = ("decomposable", "trp", "us-net")
    series = [series_of(curve, name, m) for (name, curve), m in zip(points.items(), methods, strict=True)]
    ours = points["clipped (the paper's)"]
    worse = {
        name: [p["accuracy"] - at_size(curve, p["macs_fraction"]) for p in ours]
        for name, curve in points.items()
        if name.startswith("+")
    }
    full, low, names = _gradient_norms(clipped)
    larger = [b / a for a, b in zip(full, low, strict=True)]
    places = list(range(len(names)))
    return Shown(
        figures=[
            Figure(title="Clipping ρ, or adding a constant to σ_i² − σ_k²", x=MACS, y=ACCURACY, series=series),
            Figure(
                title="Norms of the two networks' gradients, by layer",
                x=Axis(label="layer"),
                y=Axis(label="norm, mean of 20 batches"),
                series=[Series(name="full rank", x=places, y=full), Series(name="low rank", x=places, y=low)],
                kind="bars",
                categories=names,
                note="Of the trained network, before the low-rank gradient is brought to the other's norm.",
            ),
        ],
        claims=[
            judged(
                "Clipping is at least as good as adding a constant.",
                [bool(np.nanmean(gains) >= -0.1) for gains in worse.values()],
                ", ".join(
                    f"against {name}: {np.nanmean(gains):+.2f} points in the mean" for name, gains in worse.items()
                ),
            ),
            judged(
                "The low-rank network's gradient dominates (it is twice as large, or more), so that the two have to be "
                "balanced.",
                [float(np.mean(larger)) >= 2],
                f"{np.mean(larger):.2f} times as large in the mean over layers, up to {max(larger):.2f} times",
            ),
        ],
    )


def _gradient_norms(trained: Trained, batches: int = 20) -> tuple[list[float], list[float], list[str]]:
    model = trained.model("decomposable").train()
    joint = JointObjective(model, form=trained.settings.form, ratio=trained.settings.ratio, seed=0)
    images = TrainBatches(trained.data, batch_size=trained.settings.batch_size, epochs=1, seed=1)
    seen = []
    for number in range(batches):
        seen.append(analysis.gradient_norms(joint, partial(_loss_of, trained, images[number % len(images)])))
    names = list(seen[0])
    full, low = ([float(np.mean([each[name][i] for each in seen])) for name in names] for i in (0, 1))
    return full, low, names


def _loss_of(trained: Trained, batch: Batch, net: nn.Module) -> Tensor:
    return trained.task.loss(net, batch)


def channel_groups(scale: Scale) -> tuple[Group, ...]:
    """TRP, which is trained in both forms, and joint training in the channel form."""
    return scale.ablated("plain", "trp"), scale.ablated("decomposable", label="channel", form="channel")


def appendix_channel(context: Context) -> Shown:
    """Against TRP in the channel form."""
    rivals, ours = (context.of(group) for group in channel_groups(context.scale))
    curve = ours.shown("decomposable")
    trp = {name: points for name, points in rivals.curves("trp").items() if "ch" in name}
    base = rivals.curves("plain")[short_name("base", "channel", "energy")]
    series = [series_of(curve, "Decomposable-Net, channel form", "decomposable")]
    series += [series_of(points, trp_label(name), "trp", is_dashed=True) for name, points in trp.items()]
    series.append(series_of(base, "normal learning, by energy", "plain"))
    return Shown(
        figures=[Figure(title="Against TRP in the channel form", x=MACS, y=ACCURACY, series=series)],
        claims=[
            better(
                "Decomposable-Net is better than TRP at almost all sizes (channel form).",
                tally(curve, trp.values()),
                ALMOST_ALL,
            )
        ],
    )
