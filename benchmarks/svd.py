"""Decomposing CIFAR ResNet-34 in channel form: `svd` against `torch.linalg.svd` layer by layer."""

from __future__ import annotations

import torch
from _common import interleave, ratio_of_medians, record, summary, verdict

from decomposable import models
from decomposable.core.forms import to_matrix
from decomposable.core.layers import find_layers
from decomposable.core.svd import svd


def main() -> None:
    torch.manual_seed(0)
    layers, _ = find_layers(models.resnet34(num_classes=100), "channel")
    matrices = {layer.name: to_matrix(layer.weight.detach(), layer.form).contiguous() for layer in layers}

    def layer_by_layer() -> None:
        for matrix in matrices.values():
            torch.linalg.svd(matrix, full_matrices=False)

    seconds = interleave({"torch.linalg.svd": layer_by_layer, "decomposable": lambda: svd(matrices)}, repeats=7)
    speedup = ratio_of_medians(seconds["torch.linalg.svd"], seconds["decomposable"])
    for name, values in seconds.items():
        print(f"{name:>18}: {summary(values)['median_ms']:8.1f} ms")
    verdict("speed-up", speedup, "at least 4", speedup >= 4)
    record("svd", {"speedup": speedup, **{name: summary(values) for name, values in seconds.items()}})


if __name__ == "__main__":
    main()
