"""What the command lines share, that of a device included: one way to run a verb, options, tables, warnings."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from decomposable_edge.errors import DecomposableError, InvalidArgumentError
from decomposable_edge.interrupts import Interrupted
from decomposable_edge.machine import most_threads
from decomposable_edge.text import printable

OK, FAILED, CALLED_WRONG, INTERRUPTED = 0, 1, 2, 130


class SaidElsewhere(DecomposableError):
    """A failure that another process tells: there is nothing to add."""


def is_first_process() -> bool:
    """Return whether it is this one that speaks, of those that a launcher such as `torchrun` may have started."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def run_command(
    program: str, build_parser: Callable[[], argparse.ArgumentParser], argv: Sequence[str] | None = None
) -> int:
    """Run the verb that the arguments name; return the exit code. An error is one line.

    The parser sets `verb_name`, `run`, and where it can be gone on with, `if_interrupted`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = build_parser().parse_args(arguments)
    except SystemExit as done:  # --help and --version end here too
        return int(done.code or OK)
    options.command = shlex.join([program, *arguments])
    try:
        options.run(options)
        sys.stdout.flush()  # what cannot be written is an error now, and not when the interpreter ends
        return OK
    except SaidElsewhere:
        return FAILED
    except BrokenPipeError:  # who reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Interrupted as stopped:
        text, code = str(stopped), INTERRUPTED
    except KeyboardInterrupt:
        text, code = "; ".join(filter(None, ("interrupted", options.if_interrupted))), INTERRUPTED
    except DecomposableError as error:
        text, code = f"error: {error}", CALLED_WRONG if isinstance(error, InvalidArgumentError) else FAILED
    except OSError as error:
        text, code = f"error: {error if error.filename is None else f'{error.filename}: {error.strerror}'}", FAILED
    print(f"{program} {options.verb_name}: {printable(' '.join(text.split()))}", file=sys.stderr)
    return code


class OneLineParser(argparse.ArgumentParser):
    """Says errors in one line: argparse would print the usage first, which hides what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and leave with code 2."""
        text = f"{self.prog}: error: {message} (see {self.prog} --help)\n"
        self.exit(CALLED_WRONG, text if is_first_process() else None)


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A command: what `--help` says, its options, and the function that does it. All take `--json`, `-q` and `-v`."""

    name: str
    summary: str
    description: str
    example: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]
    if_interrupted: str = ""  # how to go on


def answer(options: argparse.Namespace, content: object, *lines: str | None) -> None:
    """Print what a verb found: as JSON where `--json` asks for it, else as lines of text; None is no line."""
    print(json.dumps(content) if options.json else "\n".join(line for line in lines if line is not None))


_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9}


def parse_size(option: str, text: str) -> float:
    """Return a budget as it is typed: a part (0.25, 25%) or a count (45M, 45000000).

    >>> [parse_size("--macs", text) for text in ("25%", "0.25", "45M", "1")]
    [0.25, 0.25, 45000000, 1]
    """
    stripped = text.strip()
    try:
        if stripped.endswith("%"):
            return float(stripped[:-1]) / 100
        if stripped[-1:].upper() in _UNITS:
            return round(float(stripped[:-1]) * _UNITS[stripped[-1].upper()])
        return int(stripped) if stripped.isdigit() else float(stripped)
    except (ValueError, OverflowError):  # of infM
        raise InvalidArgumentError(
            f"{option} {text}: not a size; allowed: a part of the original (0.25, 25%) or a count (45M, 45000000)"
        ) from None


def parse_sizes(option: str, text: str) -> list[tuple[str, float]]:
    """Return several of them, separated by commas; each as it was typed, and what that is."""
    sizes = [(part.strip(), parse_size(option, part)) for part in text.split(",") if part.strip()]
    if not sizes:
        raise InvalidArgumentError(f"{option} {text!r}: no size; allowed: sizes separated by commas, as in 1,0.5,25%")
    for typed, size in sizes:
        if not (0 < size <= 1 or (isinstance(size, int) and size > 1)):
            raise InvalidArgumentError(
                f"{option} {text}: {typed} is no size; allowed: a part of the original in (0, 1], or a count as in 45M"
            )
    return sizes


def _whole(most: int, allowed: str, *words: str) -> Callable[[str], int | str]:
    """Return what makes a whole number from 1 of the text after an option, or leaves one of these words."""

    def parse(text: str) -> int | str:
        if text in words:
            return text
        # A superscript two is a digit too, and of very long numbers int() refuses to read the digits.
        if text.isascii() and text.isdigit() and len(text) <= len(str(most)) and 1 <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text:.40}; allowed: {allowed}")

    return parse


MOST_ALIGN, MOST_BATCH, MOST_SECONDS = 1 << 16, 1 << 20, 86_400
_MULTIPLES = f"an int of at least 1, such as 8, and at most {MOST_ALIGN}"
batch_size = _whole(MOST_BATCH, f"a whole number from 1 to {MOST_BATCH:,}")
threads = _whole(most_threads(), f"a whole number from 1 to {most_threads()}, 4 for each core")
rounding = _whole(MOST_ALIGN, f"{_MULTIPLES}; or auto", "auto")  # what ranks are rounded to
alignment = _whole(MOST_ALIGN, f"{_MULTIPLES}; or auto or measured", "auto", "measured")


def seconds(text: str) -> float:
    """Return how long, as it is typed after an option."""
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not 0 <= number <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text}; allowed: seconds from 0 to {MOST_SECONDS}")
    return number


@contextmanager
def showing_warnings(program: str) -> Iterator[None]:
    """Say at the end, each in one line, what was warned of; Python would name the line of code."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(" ".join(str(warning.message).split()) for warning in caught):
        print(f"{program}: warning: {printable(text)}", file=sys.stderr)


def as_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns aligned to the right under their names."""
    header, *rows = ([printable(cell) for cell in row] for row in (header, *rows))  # names may come out of a file
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    )
