"""All exhibits of the paper by name, in the order in which it shows them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decomposable_edge.errors import InvalidArgumentError
from decomposable_lab.exhibits import ablations, appendices, beyond, comparisons, costs, theory
from decomposable_lab.exhibits.context import Context
from decomposable_lab.exhibits.scales import Group, Scale
from decomposable_lab.exhibits.shown import Shown, Table


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """Describe one figure, table or statement of the paper: what is trained for it, and what is measured then."""

    name: str
    where: str
    title: str
    groups: Callable[[Scale], Sequence[Group]]
    measure: Callable[[Context], Shown]
    printed: Sequence[Table] = ()  # what the paper itself prints
    is_ours: bool = False  # whether its claims are this project's own goals


def _ablated(*methods: str) -> Callable[[Scale], Sequence[Group]]:
    return lambda scale: (scale.ablated(*methods),)


def _compared(*methods: str) -> Callable[[Scale], Sequence[Group]]:
    return lambda scale: scale.compared(*methods)


_ALL = (
    Exhibit(
        name="2a",
        where="figure 2(a)",
        title="How much the low-rank network should count",
        groups=lambda scale: tuple(ablations.balance_groups(scale).values()),
        measure=ablations.figure_2a,
        printed=(ablations.PAPER_2A,),
    ),
    Exhibit(
        name="2b",
        where="figure 2(b)",
        title="Joint against normal learning",
        groups=lambda scale: (
            scale.ablated("plain", "decomposable"),
            scale.ablated("decomposable", label="channel", form="channel"),
        ),
        measure=ablations.figure_2b,
    ),
    Exhibit(
        name="2c",
        where="figure 2(c)",
        title="Criteria for the ranks: accuracy",
        groups=_ablated("decomposable"),
        measure=ablations.figure_2c,
    ),
    Exhibit(
        name="2d",
        where="figure 2(d)",
        title="Criteria for the ranks: the ranks",
        groups=_ablated("decomposable"),
        measure=ablations.figure_2d,
    ),
    Exhibit(
        name="2e",
        where="figure 2(e)",
        title="Singular values after each training",
        groups=_ablated("plain", "trp", "decomposable"),
        measure=ablations.figure_2e,
    ),
    Exhibit(
        name="2f",
        where="figure 2(f)",
        title="What a layer loses by rank and by width",
        groups=_ablated("decomposable", "us-net"),
        measure=ablations.figure_2f,
    ),
    Exhibit(
        name="3a",
        where="figure 3(a)",
        title="Against Trained Rank Pruning",
        groups=_compared("plain", "trp", "decomposable"),
        measure=comparisons.figure_3a,
    ),
    Exhibit(
        name="3b",
        where="figure 3(b)",
        title="Against decomposing and fine-tuning",
        groups=_compared("plain", "tucker", "decomposable"),
        measure=comparisons.figure_3b,
    ),
    Exhibit(
        name="3c",
        where="figure 3(c)",
        title="Against slimmable networks",
        groups=_compared("plain", "slimmable", "us-net", "width", "decomposable"),
        measure=comparisons.figure_3c,
        printed=(comparisons.PAPER_3C,),
    ),
    Exhibit(
        name="table-1",
        where="table 1",
        title="Accuracy at a quarter of the MACs",
        groups=_compared(*comparisons.TABLE_1),
        measure=comparisons.table_1,
        printed=(comparisons.PAPER_TABLE_1,),
    ),
    Exhibit(
        name="table-2",
        where="table 2",
        title="Inference time at a quarter of the MACs",
        groups=lambda scale: (scale.timed("plain", *costs.TABLE_2),),
        measure=costs.table_2,
        printed=(costs.PAPER_TABLE_2,),
    ),
    Exhibit(
        name="section-4.4",
        where="section 4.4",
        title="The same ranks from scratch, and what training costs",
        groups=_compared("decomposable", "scratch", "elastic"),
        measure=costs.section_4_4,
        printed=(costs.PAPER_4_4,),
    ),
    Exhibit(
        name="appendix-a",
        where="appendix A",
        title="Clipping the gradient of the SVD",
        groups=lambda scale: (scale.ablated("decomposable"), *appendices.gap_groups(scale).values()),
        measure=appendices.appendix_a,
    ),
    Exhibit(
        name="appendix-channel",
        where="appendix, additional results",
        title="Against Trained Rank Pruning in the channel form",
        groups=appendices.channel_groups,
        measure=appendices.appendix_channel,
    ),
    Exhibit(
        name="appendix-e",
        where="appendix E",
        title="How errors grow from layer to layer",
        groups=lambda scale: (scale.chained("decomposable"),),
        measure=theory.appendix_e,
    ),
    Exhibit(
        name="proposition-1",
        where="proposition 1",
        title="Whether a layer's error rises with its rank",
        groups=_ablated("decomposable"),
        measure=theory.proposition_1,
    ),
    Exhibit(
        name="proposition-2",
        where="proposition 2",
        title="How far a cut network's answers can be off",
        groups=lambda scale: (scale.connected.with_methods("decomposable"),),
        measure=theory.proposition_2,
    ),
    Exhibit(
        name="beyond",
        where="beyond the paper",
        title="Elastic training, cuts by data, tuned sizes",
        groups=_compared("plain", "trp", "slimmable", "us-net", "decomposable", "width", "scratch", "elastic"),
        measure=beyond.beyond,
        is_ours=True,
    ),
)
EXHIBITS = {exhibit.name: exhibit for exhibit in _ALL}


def find(name: str) -> Exhibit:
    """Return an exhibit by its name; an unknown one is refused with the nearest."""
    if name in EXHIBITS:
        return EXHIBITS[name]
    near = difflib.get_close_matches(name.lower(), EXHIBITS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InvalidArgumentError(f"exhibit {name}: unknown; {hint}allowed: all, or one of {', '.join(EXHIBITS)}")
