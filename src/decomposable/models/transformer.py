"""Two small transformers: one for images, and one that writes text.

Blocks are x + attention(norm(x)), then x + mlp(norm(x)), as in GPT-2 and most of what came since; the projections of
query, key and value are one `Linear`, as in both.

Shape suffixes: B samples, T positions, E channels, H heads, D = E/H, V tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decomposable.models.origin import builder
from decomposable_edge.checks import is_integer
from decomposable_edge.errors import InvalidArgumentError


class Attention(nn.Module):
    """Compute softmax(q kᵀ/√D) v of every head; a causal one sees each position and those before it."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x_BTE: Tensor) -> Tensor:
        """Return for every position the mean of the values, weighted by how its query fits their keys."""
        parts = self.qkv(x_BTE).unflatten(-1, (3, self.heads, -1))
        q_BHTD, k_BHTD, v_BHTD = parts.permute(2, 0, 3, 1, 4).unbind(0)
        found_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=self.causal)
        mixed: Tensor = self.out(found_BHTD.transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """Add attention to the input, then two layers for every position."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal=causal)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTE: Tensor) -> Tensor:
        """Return the sum."""
        x_BTE = x_BTE + self.attention(self.norm_1(x_BTE))
        return x_BTE + self.mlp(self.norm_2(x_BTE))


class _Transformer(nn.Module):
    """Run blocks over embedded positions, then one layer for the classes."""

    def _complete_(self, num_classes: int, width: int, depth: int, heads: int, places: int, *, causal: bool) -> None:
        """Add all but the embedding; start as GPT-2: deviations of 0.02, less for layers whose outputs are added up."""
        self.places = nn.Parameter(torch.zeros(1, places, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=causal) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                is_added = name.endswith(("attention.out", "mlp.2"))
                nn.init.normal_(module.weight, std=0.02 / (2 * depth) ** 0.5 if is_added else 0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.places, std=0.02)


class VisionTransformer(_Transformer):
    """Classify images: patches → blocks → the mean of all positions → classes."""

    def __init__(self, num_classes: int, width: int, depth: int, heads: int, patch: int, image: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self._complete_(num_classes, width, depth, heads, (image // patch) ** 2, causal=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the logits of the classes."""
        x_BTE = self.patches(x_BCHW).flatten(2).transpose(1, 2) + self.places
        logits: Tensor = self.head(self.norm(self.blocks(x_BTE)).mean(dim=1))
        return logits


class LanguageModel(_Transformer):
    """Predict the next token at every position: tokens → causal blocks → logits."""

    def __init__(self, num_classes: int, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_classes, width)
        self._complete_(num_classes, width, depth, heads, context, causal=True)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits as a matrix, (B · T) × V."""
        x_BTE = self.tokens(tokens_BT) + self.places[:, : tokens_BT.shape[1]]
        logits_BTV: Tensor = self.head(self.norm(self.blocks(x_BTE)))
        return logits_BTV.flatten(0, 1)


@builder
def small_vit(
    num_classes: int = 10, width: int = 96, depth: int = 4, heads: int = 3, patch: int = 4, image: int = 32
) -> VisionTransformer:
    """Build a small vision transformer for square images of three channels.

    >>> small_vit()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    _check("heads", width, heads)
    _check("patch", image, patch)
    return VisionTransformer(num_classes, width, depth, heads, patch, image)


@builder
def small_lm(
    num_classes: int = 256, width: int = 128, depth: int = 4, heads: int = 4, context: int = 128
) -> LanguageModel:
    """Build a small causal language model; its classes are the tokens, by default bytes.

    >>> small_lm()(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([10, 256])
    """
    _check("heads", width, heads)
    return LanguageModel(num_classes, width, depth, heads, context)


def _check(option: str, whole: int, part: int) -> None:
    if not is_integer(part) or part < 1 or whole % part:
        raise InvalidArgumentError.about(option, part, f"an int that {whole} can be divided by")
