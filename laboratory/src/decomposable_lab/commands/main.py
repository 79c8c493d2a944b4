"""The command line of the laboratory: one verb per intent, each a module in `commands`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from decomposable.commands.main import build_parser
from decomposable_edge.console import run_command
from decomposable_edge.machine import keep_freed_memory
from decomposable_lab.commands import compare, evaluate, exhibits, report, sizes, train

VERBS = tuple(module.VERB for module in (compare, exhibits, report, train, sizes, evaluate))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code comes back: 0 it worked, 1 it failed, 2 it was called wrong, 130 interrupted."""
    keep_freed_memory()
    description = "Compare ways to train networks of any size, and reproduce the paper."
    build = partial(build_parser, "decomposable-lab", description, VERBS, example=compare.VERB.example.splitlines()[0])
    return run_command("decomposable-lab", build, argv)
