"""One size of a network as a folder, as Hugging Face's models are kept: configuration, weights and a model card.

    net ── save_pretrained ──▶ folder ── from_pretrained ──▶ a plain model of that size

The weights are a file of this package (`network/artifact.py`, safetensors), because a smaller model has other tensors
than its class makes. The class is named in config.json and must be one of transformers itself. Nothing is unpickled,
and no code comes from the folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import transformers

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
    model = net.module if isinstance(net, DecomposedNet) else net
    kind = type(model).__name__
    if model is net or not isinstance(model, transformers.PreTrainedModel):
        allowed = "a network that decompose() made of a model of transformers, not what its extract() returns"
        raise InvalidArgumentError.about("net", kind, allowed, f"save_pretrained: got a {kind}; allowed: {allowed}")
    if getattr(transformers, kind, None) is not type(model):
        came, allowed = f"{type(model).__module__}.{kind}", "a class of transformers itself; for others: net.save(path)"
        raise InvalidArgumentError.about("net", came, allowed, f"save_pretrained: got a {came}; allowed: {allowed}")
    taken = net.plan() if plan is None else plan
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / WEIGHTS).unlink(missing_ok=True)
    config = model.config.to_dict() | {"architectures": [kind]}
    type(model.config).from_dict(config).save_pretrained(target)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(target)
    with replacing(target / "README.md") as path:
        path.write_text(model_card(net, kind, taken), encoding="utf-8")
    save_size(net, taken, target / WEIGHTS)
    return target


def from_pretrained(folder: str | os.PathLike[str]) -> Any:
    """Load the model of a folder that `save_pretrained` wrote, of plain layers and in eval mode."""
    source = Path(folder)
    if not (source / WEIGHTS).is_file():
        raise ArtifactError.of(source, f"it has no {WEIGHTS}; allowed: a folder that save_pretrained wrote")
    config = transformers.AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    names = config.architectures or [None]
    kind = getattr(transformers, str(names[0]), None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ArtifactError.of(source, f"its architecture is {names[0]!r:.60}; allowed: a model class of transformers")
    model = load(source / WEIGHTS, model=kind(config))
    if (source / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(source, local_files_only=True)
    return model.eval()


def model_card(net: DecomposedNet, kind: str, plan: RankPlan) -> str:
    """Write what the folder holds, how to load it, and the rank of every layer."""
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
    lines = [*rows, "", *(["Left alone:", "", *left, ""] if left else [])]
    return f"""---
library_name: decomposable
tags: [low-rank, svd, compression]
---

# {kind}, {plan.params_fraction:.2f}x

One size of a `{kind}` that was decomposed: {size}.
Multiply-accumulates are those of inputs of this shape, without the batch: {inputs}; the products inside
attention count. Accuracy is not stated here: measure it on your data.

```python
from decomposable.hf import from_pretrained

model = from_pretrained("path/to/this/folder")  # a plain PyTorch module, in eval mode
```

| layer | weight | rank |
| --- | --- | --- |
""" + "\n".join(lines)
