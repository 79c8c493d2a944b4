"""What goes into the layers of a network and comes out of them, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.core.forms import check_matrix_form
from decomposable.core.layers import FilterFn, Layer, find_layers, require_layers, without_transposed
from decomposable.core.tracing import Forward, call_with_first, first_entry, on_device_of
from decomposable.core.tree import evaluating, undisturbed, unwrap
from decomposable_edge.errors import InvalidArgumentError

See = Callable[[nn.Module, Tensor, Tensor], None]
"""``see(module, inputs, outputs)``, once for every call of a layer."""


def layers_of(model: nn.Module, form: str, filter_fn: FilterFn | None) -> tuple[Layer, ...]:
    """Return the layers that `decompose` would take, but for transposed convolutions."""
    taken = without_transposed(filter_fn)
    layers, skipped = find_layers(unwrap(model), check_matrix_form(form, "analysis"), taken)
    require_layers(layers, skipped)
    return layers


@torch.no_grad()
def watch(
    model: nn.Module, watched: Mapping[nn.Module, See], loader: Iterable[Any], forward: Forward | None, images: int
) -> int:
    """Run the first so many images of a loader, in eval mode, and show every call of the watched layers.

    The model is as before afterwards. How many images there were comes back.
    """
    base, run = unwrap(model), forward or call_with_first
    seen = 0
    with evaluating(base), undisturbed(base), ExitStack() as hooks:
        for module, see in watched.items():
            handle = module.register_forward_hook(_hook(see), with_kwargs=True)
            hooks.callback(handle.remove)
        for batch in first_images(loader, images, whole=forward is not None):
            run(base, on_device_of(base, batch))
            inputs = first_entry(batch)
            seen += len(inputs) if isinstance(inputs, Tensor) else 1
    return seen


def _hook(see: See) -> Callable[[nn.Module, Any, Any, Any], None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        see(module, args[0] if args else kwargs["input"], output)

    return hook


def first_images(loader: Iterable[Any], images: int, *, whole: bool) -> Iterator[Any]:
    """Yield batches until there are `count` images, the last one cut to size; `whole` batches if it cannot be cut."""
    left = images
    for batch in loader:
        if left <= 0:
            return
        inputs = first_entry(batch)
        if not isinstance(inputs, Tensor):
            raise InvalidArgumentError(f"loader: its batches hold {type(inputs).__name__}; allowed: tensors first")
        yield batch if whole or len(inputs) <= left else inputs[:left]
        left -= len(inputs)
    if left == images:
        raise InvalidArgumentError("loader: it yielded no batch; allowed: at least one")


@contextmanager
def recorded(network: nn.Module, names: Iterable[str]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Record the inputs and outputs of the last call of each of these submodules, by name, in the order of calls."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def see(name: str) -> See:
        def keep(module: nn.Module, inputs: Tensor, outputs: Tensor) -> None:
            if name in found:
                raise InvalidArgumentError(
                    f"layer '{name}': it runs twice in one pass; allowed: networks whose layers run once"
                )
            found[name] = inputs, outputs

        return keep

    with ExitStack() as hooks:
        for name in names:
            handle = network.get_submodule(name).register_forward_hook(_hook(see(name)), with_kwargs=True)
            hooks.callback(handle.remove)
        yield found
