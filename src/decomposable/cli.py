"""The command line: one verb per intent, each a `Verb` below. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from decomposable import __version__
from decomposable.errors import DecomposableError, InvalidArgumentError

OK, FAILED, CALLED_WRONG = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A command: what `--help` says, its options, and the function that does it. `--json` is added to every one."""

    name: str
    summary: str
    description: str
    example: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code comes back: 0 it worked, 1 it failed, 2 it was called wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = build_parser().parse_args(arguments)
    except SystemExit as done:  # --help and --version end here too
        return int(done.code or OK)
    options.command = shlex.join(["decomposable", *arguments])
    try:
        options.verb.run(options)
    except InvalidArgumentError as error:
        return _fail(options.verb.name, error, CALLED_WRONG)
    except (DecomposableError, OSError) as error:
        return _fail(options.verb.name, error, FAILED)
    except KeyboardInterrupt:
        return _fail(options.verb.name, "interrupted", FAILED)
    return OK


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = OneLineParser(
        prog="decomposable",
        description="Train a neural network once, then run it at any size.",
        epilog="example:\n  decomposable demo\n\nexit codes: 0 it worked, 1 it failed, 2 it was called wrong",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"decomposable {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb_name", required=True)
    for verb in VERBS:
        one = verbs.add_parser(
            verb.name,
            help=verb.summary,
            description=verb.description,
            epilog=f"example:\n  {verb.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        verb.add_options(one)
        one.add_argument("--json", action="store_true", help="print the result as JSON, for machines")
        one.set_defaults(verb=verb)
    return parser


class OneLineParser(argparse.ArgumentParser):
    """Errors in one line: argparse would print the usage first, which hides what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and leave with code 2."""
        self.exit(CALLED_WRONG, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _fail(verb: str, error: object, code: int) -> int:
    line = " ".join(str(error).split())
    print(f"decomposable {verb}: error: {line}", file=sys.stderr)
    return code


class ProgressLine:
    """One line on stderr that is written over; where stderr is no terminal, a line only when the task changes."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._task = ""

    def __call__(self, text: str) -> None:
        """Show `text`, "task: detail"."""
        task = text.partition(":")[0]
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{text[:width]:<{width}}", end="", file=sys.stderr, flush=True)
        elif task != self._task:
            print(task, file=sys.stderr, flush=True)
        self._task = task

    def close(self) -> None:
        """Wipe the line."""
        if self._is_terminal and self._task:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("demo-out"), help="where to (default: demo-out)"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the first run (default: 0)")
    parser.add_argument("--runs", metavar="N", type=int, default=2, help="whose mean is shown (default: 2)")


def _run_demo(options: argparse.Namespace) -> None:
    from decomposable import demo

    settings = demo.Settings(seed=options.seed, runs=options.runs)
    demo.require_extra()
    options.out.mkdir(parents=True, exist_ok=True)  # where it cannot be written, say so before a minute's work
    progress = ProgressLine()
    try:
        record = {"command": options.command, **demo.run(settings, progress)}
    finally:
        progress.close()
    figure, data = demo.save(record, options.out)
    if options.json:
        print(json.dumps(record))
        return
    print(demo.as_text(record))
    print(f"\n{figure} shows the curve, {data} has all figures ({record['seconds']:.0f} s).")


VERBS = (
    Verb(
        name="demo",
        summary="train a small network jointly and plainly, and compare them at every size (about a minute)",
        description=(
            "Train a small CNN on the handwritten digits of scikit-learn, once with the joint objective and once\n"
            "plainly, cut both to the same sizes and print their accuracy. Writes curve.png and record.json.\n"
            "Needs scikit-learn and matplotlib: pip install 'decomposable[demo]'"
        ),
        example="decomposable demo --out demo-out",
        add_options=_demo_options,
        run=_run_demo,
    ),
)


if __name__ == "__main__":
    sys.exit(main())
