"""The one exception family of the package. Every message names the layer or option, what came and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from decomposable_edge.text import printable

if TYPE_CHECKING:  # the device's package needs numpy alone
    from typing_extensions import Self


class DecomposableError(Exception):
    """Base of every error that this package raises on purpose.

    `option`, `came`, `allowed` and `layer` say for programs what the message says for people; None where not known.
    """

    option: str | None = None
    came: object = None
    allowed: str | None = None
    layer: str | None = None

    def __str__(self) -> str:
        """Return the message as one printable line: it may quote a file that somebody else wrote."""
        return printable(super().__str__())

    @classmethod
    def about(
        cls,
        option: str,
        came: object,
        allowed: str,
        text: str | None = None,
        *,
        why: str | None = None,
        layer: str | None = None,
    ) -> Self:
        """Return the error of an option, with these attributes.

        `why` says what is wrong where the value itself does not; `text` takes the place of the usual message.

        >>> InvalidArgumentError.about("macs", 2.5, "a fraction in (0, 1]")
        InvalidArgumentError('macs=2.5; allowed: a fraction in (0, 1]')
        >>> InvalidArgumentError.about("loader", 0, "at least one batch", why="it yielded none")
        InvalidArgumentError('loader: it yielded none; allowed: at least one batch')
        """
        usual = f"{option}={came!r:.80}" if why is None else f"{option}: {why}"
        where = "" if layer is None else f"layer '{layer}': "
        error = cls(f"{where}{usual}; allowed: {allowed}" if text is None else text)
        error.option, error.came, error.allowed, error.layer = option, came, allowed, layer
        return error


class InvalidArgumentError(DecomposableError, ValueError):
    """An option or argument has a value that is not allowed."""


class UnknownOptionError(InvalidArgumentError, TypeError):
    """A keyword was given that the function does not have: also a `TypeError`, as Python's own."""


class SettingError(InvalidArgumentError):
    """A setting has a value that is not allowed; a command may name the option that it was given by."""

    allowed: str

    def __init__(self, name: str, value: str, allowed: str) -> None:
        super().__init__(f"{name}={value}; allowed: {allowed}")
        self.name, self.value, self.allowed = name, value, allowed
        self.option, self.came = name, value

    def __reduce__(self) -> tuple[type[SettingError], tuple[str, str, str]]:
        return SettingError, (self.name, self.value, self.allowed)


class ModelNeededError(InvalidArgumentError):
    """A file holds weights but not the code that uses them, and no model was given."""


class ExampleNeededError(InvalidArgumentError):
    """It is not known what a network takes, and no example input was given."""


class BudgetError(InvalidArgumentError):
    """A size was asked for that the network cannot have.

    `smallest` is the smallest part that it can have, where known; `blocking` names what is left alone and costs most.
    """

    smallest: float | None = None
    blocking: str = ""


class NonFiniteError(DecomposableError, ValueError):
    """A weight holds NaN or infinity, so it has no singular value decomposition."""


class UnsupportedModelError(DecomposableError, TypeError):
    """The model is of a kind that cannot be decomposed at all."""


class FileError(DecomposableError):
    """A file or folder is not what it should be: `reason` says why without the name, which the asker may say itself."""

    path: object = None
    reason: str | None = None

    @classmethod
    def of(cls, path: object, reason: str) -> Self:
        """Return the error of a file."""
        error = cls(f"{path}: {reason}")
        error.path, error.reason = path, reason
        return error


class ArtifactError(FileError):
    """A file is not an artifact, or is damaged."""


class DataError(FileError):
    """A data set is not where it was said to be, or a file of it is broken."""


class MissingExtraError(DecomposableError, ImportError):
    """An optional package is needed and not installed."""

    @classmethod
    def of(cls, package: str, extra: str, folder: str = ".") -> MissingExtraError:
        """Return the error that says how to install the package."""
        return cls(f"{package} is not installed; run {how_to_install(extra, folder)}")


def how_to_install(extra: str, folder: str = ".") -> str:
    """Return the command that installs an extra. It is said here and in docs/index.md, for a release to change.

    >>> how_to_install("onnx")
    "in a checkout of decomposable: pip install -c constraints.txt -e '.[onnx]'"
    """
    return f"in a checkout of decomposable: pip install -c constraints.txt -e '{folder}[{extra}]'"


LABORATORY = "decomposable-lab (in a checkout of decomposable: pip install -c constraints.txt -e ./laboratory)"
"""What is no part of the library, and how to install it."""


@contextmanager
def needs_extra() -> Iterator[None]:
    """Turn the error of a runtime that is not installed into one line that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("numpy", "onnx", "onnxruntime"):
            raise
        raise MissingExtraError(
            f"{package} is not installed, which a device needs; run on a device: pip install {package}; or "
            f"{how_to_install('onnx')}"
        ) from error
