"""What a form is: how a weight becomes a chain of plain layers, best bases first, and what it is cut to in training.

A new form is one file beside this one, with a class of this kind, and its place in `__init__.py`. Costs, plans, slices,
storage, exports and the device know its chain, and nothing of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from decomposable_edge.sizing.chain import Axes, Chain


class Decomposition(Protocol):
    """What one weight was decomposed into: a named tuple of tensors."""

    @property
    def spectra(self) -> tuple[Tensor, ...]:
        """The singular values of every cut, the largest first, as many as the cut has bases at full rank."""

    def _asdict(self) -> dict[str, Any]:
        """The tensors by name."""


class Form(ABC):
    """One way to make a chain of a weight (O × I × kernel)."""

    name: ClassVar[str]
    short: ClassVar[str]  # in the names of curves

    @abstractmethod
    def takes(self, shape: Sequence[int]) -> bool:
        """Whether a weight of this shape has something to split in this way; others take the channel form."""

    @abstractmethod
    def stages(self, axes: int) -> tuple[Axes, ...]:
        """Which of so many axes of the kernel each stage has."""

    def chain(self, shape: Sequence[int], *, transposed: bool = False) -> Chain:
        """The chain that a weight of this shape becomes, or that of a transposed convolution."""
        return Chain(tuple(shape), self.stages(len(shape) - 2), transposed)

    @abstractmethod
    def decompose(self, weights: Mapping[str, Tensor]) -> dict[str, Decomposition]:
        """Every weight's bases, all of them in few calls; NaN and infinity raise `NonFiniteError` with the name."""

    @abstractmethod
    def project(self, weight: Tensor, kept: Any) -> Decomposition:
        """The weight along bases that were kept from an earlier one, sorted by their singular values again."""

    @abstractmethod
    def tensors(self, chain: Chain) -> dict[str, tuple[int, ...]]:
        """The shapes of a decomposition's tensors, by name."""

    @abstractmethod
    def restored(self, chain: Chain, tensors: Mapping[str, Any]) -> Decomposition | None:
        """A decomposition from its tensors by name; None where these are not those of such a weight."""

    @abstractmethod
    def matrices(self, chain: Chain) -> tuple[tuple[int, int], ...]:
        """The shapes of the matrices whose singular values are found: what a decomposition costs follows from them."""

    @abstractmethod
    def influences(self, gradient: Tensor, weight: Tensor, decomposition: Any) -> tuple[Tensor, ...]:
        """|σ_i · ∂L/∂σ_i| of every cut's bases: to first order what the loss changes by where a basis goes."""

    @abstractmethod
    def weights(self, weight: Tensor, decomposition: Any, orders: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The weights of all stages at full rank, every cut's bases in the order given."""

    @abstractmethod
    def truncate(
        self, weight: Tensor, decomposition: Any, ranks: Sequence[int], added_gap: float = 0.0
    ) -> tuple[Tensor, ...]:
        """The weights of all stages at these ranks, differentiable in the weight that was decomposed."""
