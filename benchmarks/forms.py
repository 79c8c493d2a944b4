"""Decomposing CIFAR ResNet-34 in tucker form against spatial form, side by side: the bases alone, and all of it."""

from __future__ import annotations

import argparse

import torch
from _common import interleave, ratio_of_medians, record, summary, verdict

from decomposable import decompose, models
from decomposable.core.layers import decomposed, find_layers

FORMS = ("spatial", "tucker")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.manual_seed(0)
    model, x = models.resnet34(num_classes=100).eval(), torch.zeros(1, 3, 32, 32)
    layers = {form: find_layers(model, form)[0] for form in FORMS}
    tasks = {
        "the bases": {form: (lambda form=form: decomposed(layers[form])) for form in FORMS},
        "decompose": {form: (lambda form=form: decompose(model, example_input=x, form=form)) for form in FORMS},
    }
    figures: dict[str, object] = {"threads": torch.get_num_threads()}
    for what, functions in tasks.items():
        seconds = interleave(functions, repeats=repeats, warmup=0)
        speedup = ratio_of_medians(seconds["spatial"], seconds["tucker"])
        for form, values in seconds.items():
            print(f"{what}, {form:>8}: {summary(values)['median_ms']:8.1f} ms")
        verdict(f"{what}: spatial / tucker", speedup, "at least 3", speedup >= 3)
        figures[what] = {"speedup": speedup, **{form: summary(values) for form, values in seconds.items()}}
    record("forms", figures)


if __name__ == "__main__":
    main()
