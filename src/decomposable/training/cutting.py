"""From trained weights to a network of any size without training: bases by data, statistics, sizes measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from decomposable.core.criteria import CRITERIA
from decomposable.data.base import Data, TrainBatches
from decomposable.network.decompose import decompose
from decomposable.network.decomposed import DecomposedNet
from decomposable.network.goals import BY_DATA
from decomposable.progress import Progress, Report, Steps
from decomposable.recipes import Task
from decomposable.recipes.settings import Settings
from decomposable.training import records
from decomposable.training.evaluation import Judged, Row, answers, are_labelled, measure
from decomposable.training.experiment import first_pass
from decomposable.training.finishing import calibration_data_for, described
from decomposable.training.methods import decomposing
from decomposable.training.runs import plain_settings
from decomposable.training.weights import load_weights_, sha256

WAYS = (*BY_DATA, *CRITERIA)
"""Criteria of a cut: by data, the best one first, or by the weights alone."""

IMAGES = 2000
"""Training images that the bases are measured with by default."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CutResult:
    """A network that was cut, and the accuracy of its sizes, or their agreement with the full one."""

    net: DecomposedNet
    rows: list[Row]
    is_agreement: bool
    images: int
    info: dict[str, Any]


def cut(
    recipe: str,
    task: Task,
    settings: Settings,
    *,
    init: Path,
    criterion: str | None,
    asked: Sequence[float] = (),
    tune: bool,
    agreement: bool,
    device: str,
    progress: Report,
) -> CutResult:
    """Return the recipe's model with these weights, at every size.

    Bases, statistics and what is tuned come from the first images of a training epoch, without their labels; the
    accuracy from the test images. With `agreement`, or if their labels are not known, it is how often a size gives the
    full network's answer. A size that was `asked` for and is impossible is refused. Without a criterion, the network's
    outputs decide between those by data.
    """
    progress(Progress("", "reading the data"))
    data, model, digest = task.load_data(), task.build_model(), sha256(init)
    load_weights_(model, init)
    batches = TrainBatches(data, batch_size=settings.batch_size, epochs=1, seed=settings.seed)
    first_pass(model, batches, settings, device)
    is_by_data = criterion is None or criterion in BY_DATA
    is_calibrated = not tune or bool(settings.calibrated_sizes or settings.calibrated_alignments)  # tuning makes a grid
    steps = Steps(progress, count=is_by_data + is_calibrated + tune + 1)
    material = calibration_data_for(data, settings, task.loss, steps)
    net = decompose(
        model,
        material.example_input,
        form=settings.form,
        criterion=criterion,
        data=material.calibration if is_by_data else None,
        min_rank=settings.min_rank,
        progress=steps,
    )
    if is_by_data:
        steps.next()
    for size in asked:
        net.plan(macs=size)  # an impossible one is refused before the long work
    if is_calibrated:
        decomposing.calibrate_(net, material, settings)
        steps.next()
    if tune:
        net.tune_(material.calibration, passes=settings.calibration_passes, progress=steps)
        steps.next()
    agreement = agreement or not are_labelled(data)
    judge = _agreement_with(model, data, settings) if agreement else None
    rows = measure(net, data, settings, curve="", report=steps, judge=judge)
    images, report = material.calibration_images, net.cut_report
    judged = {} if report is None else {"criterion": report.criterion, "judged": report.as_dict()}
    info = {
        "recipe": recipe,
        "settings": plain_settings(settings),
        "seed": settings.seed,
        "init": {"file": init.name, "sha256": digest},
        "commit": records.commit(),
        "cut": {"criterion": criterion, "images": images, "tuned": tune} | judged,
        "agreement" if agreement else "sizes": [asdict(row) for row in rows],
        **described(data),
    }
    return CutResult(net=net, rows=rows, is_agreement=agreement, images=images, info=info)


def _agreement_with(full: nn.Module, data: Data, settings: Settings) -> Callable[[nn.Module], Judged]:
    """Return a judge of how often, in percent, a network gives the full one's answer for the test images."""
    how = {"batch_size": settings.batch_size, "workers": settings.workers}
    expected = answers(full, data, **how)
    return lambda net: Judged(100 * float((answers(net, data, **how) == expected).double().mean()))
