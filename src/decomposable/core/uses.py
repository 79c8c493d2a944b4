"""What the outputs of layers go into: nothing but batch normalisation, or something else as well.

Batch normalisation takes the mean of its input away. So a cut before it need not keep that mean, but only where nobody
else uses it: a shortcut past the normalisation, a second call of the layer, or whoever gets the network's outputs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Uses(TorchDispatchMode):
    """In a pass inside: who uses the outputs of layers.

    Whoever runs the pass tells what a layer gave, by `made`, and when batch normalisation runs, by `enter` and `leave`.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `products.py`

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[nn.Module, Tensor]] = {}  # held, so that no two of them can share an address
        self._normalised: set[int] = set()
        self._besides: set[int] = set()
        self._norms = 0

    def made(self, module: nn.Module, output: Any) -> None:
        """A layer gave this."""
        if isinstance(output, Tensor):
            self._made.setdefault(id(output), (module, output))

    def enter(self) -> None:
        """From now on batch normalisation runs."""
        self._norms += 1

    def leave(self) -> None:
        """It is done."""
        self._norms -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        used = {id(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)} & self._made.keys()
        (self._normalised if self._norms else self._besides).update(used)
        return found

    def only_normalised(self, returned: Any) -> set[nn.Module]:
        """Return the layers whose outputs, all of them, went into batch normalisation and nowhere else; `returned` is
        what the network gave.
        """
        besides = self._besides | {id(each) for each in tree_leaves(returned)}
        spoiled = {module for key, (module, _) in self._made.items() if key in besides or key not in self._normalised}
        return {module for module, _ in self._made.values()} - spoiled
