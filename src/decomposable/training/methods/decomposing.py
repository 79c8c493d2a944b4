"""Sizes by the core's decomposition: for every method whose trained network has the layers of the model."""

from __future__ import annotations

from torch import nn

from decomposable.core.factors import Taylor
from decomposable.core.layers import FilterFn
from decomposable.core.tracing import on_device_of
from decomposable.network.decompose import decompose
from decomposable.network.decomposed import DecomposedNet
from decomposable.progress import Progress
from decomposable.recipes.settings import Settings
from decomposable.training.methods.base import CalibrationData
from decomposable_edge.sizing.rounding import DEFAULT_ALIGN, Align


def decomposed(
    network: nn.Module,
    material: CalibrationData,
    settings: Settings,
    *,
    filter_fn: FilterFn | None = None,
) -> DecomposedNet:
    """Return the network by the form and the criterion of the settings, with statistics for a grid of sizes."""
    material.progress(Progress("decomposing"))
    criterion = _taylor(material) if settings.criterion == "taylor" else settings.criterion
    net = decompose(
        network.eval(),
        example_input=material.example_input,
        form=settings.form,
        criterion=criterion,
        filter_fn=filter_fn,
        min_rank=settings.min_rank,
    )
    calibrate_(net, material, settings)
    return net


def calibrate_(net: DecomposedNet, material: CalibrationData, settings: Settings) -> None:
    """Statistics for the sizes and the alignments of the settings."""
    aligns: tuple[Align, ...] = (DEFAULT_ALIGN, *settings.calibrated_alignments)
    for align in aligns:
        smallest = net.selector.smallest_cost(net.selector.measure, align)
        least = smallest / net.selector.full_cost(net.selector.measure)
        sizes = [size for size in settings.calibrated_sizes if size >= least] or None
        net.calibrate_(
            material.calibration,
            sizes=sizes,
            align=align,
            passes=settings.calibration_passes,
            progress=material.progress,
        )


def calibrate_anew_(net: DecomposedNet, material: CalibrationData, settings: Settings, before: Settings) -> None:
    """Do the same for a network that was calibrated with other settings; its old statistics go.

    Where the method itself had calibrated the full size, that is done again.
    """
    statistics = net.artifact().statistics
    by_method = statistics is not None and statistics.has_explicit_full and 1.0 not in before.calibrated_sizes
    net.forget_statistics_()
    calibrate_(net, material, settings)
    if by_method:
        net.calibrate_(material.calibration, sizes=[1.0], progress=material.progress)


def _taylor(material: CalibrationData) -> Taylor:
    return Taylor(material.calibration, lambda net, batch: material.loss(net, on_device_of(net, batch)))
