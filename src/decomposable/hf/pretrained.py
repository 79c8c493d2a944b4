"""One size of a network as a folder, as Hugging Face's models are kept: configuration, weights and a model card.

    net ── save_pretrained ──▶ folder ── from_pretrained ──▶ a plain model of that size

The weights are a file of this package (`network/artifact.py`, safetensors), because a model of fewer bases has other
tensors than its class makes; the class is named in config.json and has to be one of transformers itself. Nothing is
unpickled, and no code comes from the folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from decomposable.network.artifact import save_size
from decomposable.network.decomposed import DecomposedNet
from decomposable.network.loading import load
from decomposable_edge.errors import ArtifactError, InvalidArgumentError
from decomposable_edge.files import replacing
from decomposable_edge.sizing.plans import RankPlan

WEIGHTS = "model.decomposable.safetensors"
"""The file of the weights in such a folder."""


def save_pretrained(net: DecomposedNet, folder: str | os.PathLike[str], plan: RankPlan | None = None) -> Path:
    """Write the network at the current size, or at that of a plan, with its configuration and a model card.

    The weights come last, and each file as a whole: a folder that has them is complete.
    """
    model = net.module if isinstance(net, DecomposedNet) else None
    if not isinstance(model, transformers.PreTrainedModel):
        came = type(net if model is None else model).__name__
        raise InvalidArgumentError(
            f"save_pretrained: got a {came}; allowed: a network that decompose() made of a model of transformers (not "
            "what its extract() returns), at the current size or with plan="
        )
    taken = net.plan() if plan is None else plan
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / WEIGHTS).unlink(missing_ok=True)
    kind = _class_name(type(model))
    config = model.config.to_dict() | {"architectures": [kind]}
    type(model.config).from_dict(config).save_pretrained(target)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(target)
    with replacing(target / "README.md") as path:
        path.write_text(model_card(net, kind, taken), encoding="utf-8")
    save_size(net, taken, target / WEIGHTS)
    return target


def from_pretrained(folder: str | os.PathLike[str]) -> Any:
    """The model of a folder that `save_pretrained` wrote, of plain layers and in eval mode."""
    source = Path(folder)
    if not (source / WEIGHTS).is_file():
        raise ArtifactError(f"{source}: it has no {WEIGHTS}; allowed: a folder that save_pretrained wrote")
    config = transformers.AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    names = config.architectures or [None]
    kind = getattr(transformers, str(names[0]), None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ArtifactError(f"{source}: its architecture is {names[0]!r:.60}; allowed: a model class of transformers")
    model = load(source / WEIGHTS, model=kind(config))
    if (source / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(source, local_files_only=True)
    return model.eval()


def _class_name(kind: type[nn.Module]) -> str:
    """The name under which transformers has the class."""
    if getattr(transformers, kind.__name__, None) is not kind:
        raise InvalidArgumentError(
            f"save_pretrained: {kind.__module__}.{kind.__name__} is not a class of transformers itself; allowed: its "
            "models; for others: net.save(path)"
        )
    return kind.__name__


def model_card(net: DecomposedNet, kind: str, plan: RankPlan) -> str:
    """What the folder holds, how it is loaded, and what every layer has become."""
    size = f"{plan.params:,} parameters ({plan.params_fraction:.3f}x)"
    if plan.macs is not None and plan.macs_fraction is not None:
        size += f", {plan.macs:,} multiply-accumulates for one sample ({plan.macs_fraction:.3f}x)"
    inputs = ", ".join(f"{name} {tuple(spec.shape)}" for name, spec in net.inputs.items()) or "not noted"
    rows = [
        f"| {layer.name} | {' × '.join(map(str, layer.shape))} | "
        f"{plan.ranks[layer.name] if plan.runs_as(layer.name) == 'factors' else 'dense'} |"
        for layer in net.layers
    ]
    left = [f"- {name}: {reason}" for name, reason in net.skipped.items()]
    return "\n".join(
        [
            "---",
            "library_name: decomposable",
            "tags: [low-rank, svd, compression]",
            "---",
            "",
            f"# {kind}, {plan.params_fraction:.2f}x",
            "",
            f"One size of a `{kind}` that was decomposed: {size}.",
            f"Multiply-accumulates are those of inputs of this shape, without the batch: {inputs}; the products inside",
            "attention count. Accuracy is not stated here: measure it on your data.",
            "",
            "```python",
            "from decomposable.hf import from_pretrained",
            "",
            'model = from_pretrained("path/to/this/folder")  # a plain PyTorch module, in eval mode',
            "```",
            "",
            "| layer | weight | rank |",
            "| --- | --- | --- |",
            *rows,
            "",
            *(["Left alone:", "", *left, ""] if left else []),
        ]
    )
