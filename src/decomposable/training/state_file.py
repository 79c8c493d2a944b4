"""The state of an objective as a file of its own, for trainers of other libraries: safetensors and JSON, no pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from decomposable.network.file.container import open_container, write_container
from decomposable.network.file.parsing import naming
from decomposable.training.checkpoint import pack, unpack
from decomposable_edge.errors import ArtifactError

_KIND = "objective"


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state dict, at once or not at all."""
    tensors: dict[str, Tensor] = {}
    content = pack(dict(state), tensors, "state")
    write_container(path, {"kind": _KIND, "content": content}, tensors)


def read_state(path: Path) -> dict[str, Any]:
    """What `write_state` wrote."""
    if not path.is_file():
        raise ArtifactError(f"{path}: it is not there; allowed: a checkpoint of a joint training")
    with open_container(path) as container, naming(path):
        if container.description.get("kind") != _KIND:
            raise ArtifactError(f"{path}: holds {container.description.get('kind')!r:.40}; allowed: an objective")
        found = unpack(container.description.get("content"), container.read_all())
    if not isinstance(found, dict):
        raise ArtifactError(f"{path}: its description is damaged: the state is a {type(found).__name__}")
    return found
