"""`decomposable-lab train`: as `decomposable train`, also by the laboratory's methods."""

from __future__ import annotations

import argparse
from dataclasses import replace

from decomposable.commands import train
from decomposable_lab.methods.sweeps import default_settings


def _options(parser: argparse.ArgumentParser) -> None:
    train.VERB.add_options(parser)
    parser.set_defaults(default_settings=default_settings)


VERB = replace(
    train.VERB,
    summary="train a network by any method: those of the library, and those it is compared with",
    example=(
        "decomposable-lab train digits --set method=us-net --out runs/us-net\n"
        "  decomposable-lab train digits --set method=trp trp_energy=0.99 --out runs/trp"
    ),
    add_options=_options,
)
