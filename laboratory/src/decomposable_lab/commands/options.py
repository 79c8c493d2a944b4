"""Options that `compare` and `exhibits` share: who trains, where, and with which settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from decomposable.commands import arguments
from decomposable_edge.errors import InvalidArgumentError


def add(parser: argparse.ArgumentParser, *, seeds: str, folder: str) -> None:
    """Add them; `seeds` is the default of --seeds in words, `folder` what --out is."""
    arguments.add(parser, "--data")
    lists = "settings to replace, such as epochs=10 (decomposable-lab train RECIPE --dry-run lists them all)"
    arguments.add(parser, "--set", help=lists)
    parser.add_argument("--out", metavar="DIR", type=Path, help=f"{folder}; the same one goes on")
    parser.add_argument("--seeds", metavar="LIST", help=f"train each with these, as in 0,1 (default: {seeds})")
    jobs = "trainings side by side (default: 1 on a GPU; on a CPU one for each core, up to 4)"
    parser.add_argument("--jobs", metavar="N", type=int, help=jobs)
    shard = "train only the K-th of N shares, while others train theirs into the same DIR"
    parser.add_argument("--shard", metavar="K/N", help=shard)
    engine = "who trains: local (processes here), or ray (a Ray cluster; --jobs is then the most at a time)"
    parser.add_argument("--engine", metavar="NAME", default="local", help=engine)
    parser.add_argument("--address", metavar="HOST:PORT", help="of the Ray cluster (default: one is started here)")
    arguments.add(parser, "--device", "--checkpoint-seconds")
    dry = "tell what would run and about how long, and train nothing"
    parser.add_argument("--dry-run", action="store_true", help=dry)


def how_of(options: argparse.Namespace) -> Any:
    """Return who trains, as the options say; paths become those that other machines understand."""
    from decomposable_lab.comparison.running import How
    from decomposable_lab.comparison.sharding import Shard

    shard = None if options.shard is None else Shard.parse(options.shard)
    how = How(shard=shard, **arguments.taken(options, "jobs", "engine", "address"))
    for name in ("out", "data"):
        path = getattr(options, name)
        setattr(options, name, None if path is None else how.found_everywhere(path))
    return how


def seeds(text: str) -> list[int]:
    """Return the ints of --seeds."""
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [-1]
    if any(not 0 <= seed < 2**31 for seed in found):
        raise InvalidArgumentError(f"--seeds {text}; allowed: ints from 0 to {2**31 - 1}, as in 0,1")
    return found
