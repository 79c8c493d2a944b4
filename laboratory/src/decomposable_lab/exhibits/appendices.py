"""Appendix A of the paper, and its additional results: how the gradient is kept in bounds, and TRP by channel form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean

import numpy as np
from torch import Tensor, nn

from decomposable.core.joint import JointObjective
from decomposable.data.base import Batch, TrainBatches
from decomposable.training.loop import moved
from decomposable_lab import analysis
from decomposable_lab.comparison.explorer import readable
from decomposable_lab.comparison.stepping import fresh_model
from decomposable_lab.exhibits.context import (
    Context,
    Trained,
    series_of,
    trp_label,
)
from decomposable_lab.exhibits.scales import Group, Scale, labelled
from decomposable_lab.exhibits.shown import (
    ACCURACY,
    MACS,
    Axis,
    Figure,
    Series,
    Shown,
    judged,
    seen_on,
)
from decomposable_lab.exhibits.verdicts import ALMOST_ALL, better, distinct, tally
from decomposable_lab.methods.ours import short_name

GAPS = (1e-6, 1e-12)
MOMENTS = {"fresh": "before the first step", "trained": "after training"}
NORM_BATCHES = 20


def gap_groups(scale: Scale) -> dict[float, Group]:
    """Return a training for every added constant."""
    return {gap: scale.ablated("decomposable", label=f"gap-{gap:g}", added_gap=gap) for gap in GAPS}


def appendix_a(context: Context) -> Shown:
    """Compare clipping with added constants, and show the norms of both networks' gradients."""
    clipped = context.of(context.scale.ablated("decomposable"))
    ours = clipped.shown("decomposable")
    others = {f"+{gap:g}": context.of(g).shown("decomposable") for gap, g in gap_groups(context.scale).items()}
    series = [series_of(ours, "clipped (the paper's)", "decomposable")]
    series += [series_of(curve, name, "") for name, curve in others.items()]
    norms = clipped.kept("gradient-norms", ["decomposable"], lambda: _gradient_norms(clipped))
    names = readable(clipped.task.build_model(), list(norms["fresh"]))
    larger = {when: [low / full for full, low in found.values()] for when, found in norms.items()}
    return Shown(
        figures=[
            Figure(title="Clipping ρ, or adding a constant to σᵢ² − σₖ²", x=MACS, y=ACCURACY, series=series),
            *(_norm_figure(MOMENTS[when], names, list(found.values())) for when, found in norms.items()),
        ],
        claims=[
            *(better(f"Clipping is better than adding {name[1:]}.", tally(ours, [c])) for name, c in others.items()),
            judged(
                "The low-rank network's gradient dominates (it is twice as large, or more), so that the two have to be "
                "balanced.",
                [float(np.mean(each)) >= 2 for each in larger.values()],
                "; ".join(
                    f"{MOMENTS[when]}: {np.mean(each):.2f} times as large in the mean over layers, up to "
                    f"{max(each):.2f} times"
                    for when, each in larger.items()
                ),
            ),
        ],
    )


def _norm_figure(when: str, names: Sequence[str], norms: Sequence[tuple[float, float]]) -> Figure:
    places, (full, low) = list(range(len(names))), zip(*norms, strict=True)
    return Figure(
        title=f"Norms of the two networks' gradients by layer, {when}",
        x=Axis(label="layer"),
        y=Axis(label=f"norm, mean of {NORM_BATCHES} batches"),
        series=[Series(name="full rank", x=places, y=full), Series(name="low rank", x=places, y=low)],
        kind="bars",
        categories=names,
        note="Before the low-rank gradient is brought to the other's norm.",
    )


def _gradient_norms(trained: Trained) -> dict[str, dict[str, tuple[float, float]]]:
    """Return (‖∇_f‖, ‖∇‖) of every layer, before the first step and after the last, each the mean of some batches."""
    models = {"fresh": fresh_model(trained.task, trained.settings, trained.device)}
    models["trained"] = trained.model("decomposable")
    images = TrainBatches(trained.data, batch_size=trained.settings.batch_size, epochs=1, seed=1)
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for when, model in models.items():
        joint = JointObjective(model.train(), form=trained.settings.form, ratio=trained.settings.ratio, seed=0)
        batches = [images[number % len(images)] for number in range(NORM_BATCHES)]
        seen = [analysis.gradient_norms(joint, partial(_loss_of, trained, batch)) for batch in batches]
        found[when] = {
            name: (fmean(each[name][0] for each in seen), fmean(each[name][1] for each in seen)) for name in seen[0]
        }
    return found


def _loss_of(trained: Trained, batch: Batch, net: nn.Module) -> Tensor:
    return trained.task.loss(net, moved(batch, trained.device, trained.settings))


def channel_groups(scale: Scale) -> tuple[Group, ...]:
    """Return the groups: TRP, which is trained in both forms, and joint training in the channel form."""
    return tuple(group for pair in _channel_pairs(scale) for group in pair)


def _channel_pairs(scale: Scale) -> list[tuple[Group, Group]]:
    return [
        (base.with_methods("plain", "trp"), labelled(base.with_methods("decomposable"), "channel", form="channel"))
        for base in scale.in_both_forms
    ]


def appendix_channel(context: Context) -> Shown:
    """Compare with TRP in the channel form."""
    figures, claims = [], []
    for pair in _channel_pairs(context.scale):
        rivals, ours = (context.of(group) for group in pair)
        curve = ours.shown("decomposable")
        trp = {name: points for name, points in rivals.curves("trp").items() if "ch" in name}
        base = rivals.curves("plain")[short_name("base", "channel", "energy")]
        series = [series_of(curve, "Decomposable-Net, channel form", "decomposable")]
        series += [series_of(points, trp_label(name), "trp", is_dashed=True) for name, points in trp.items()]
        series.append(series_of(base, "normal learning, by energy", "plain"))
        title = f"Against TRP in the channel form: {rivals.group.title}"
        figures.append(Figure(title=title, x=MACS, y=ACCURACY, series=series))
        text = "Decomposable-Net is better than TRP at almost all sizes (channel form)."
        found = tally(curve, map(distinct, trp.values()))
        claims += seen_on(rivals.group.title, [better(text, found, ALMOST_ALL)])
    return Shown(figures=figures, claims=claims)
