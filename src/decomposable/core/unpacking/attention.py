"""`nn.MultiheadAttention` with its projections as layers.

Shape suffixes: B samples, Q and K positions of query and key, E channels, H heads, D = E/H.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decomposable.core.unpacking.parts import WHOLE, Opened, PackedWeight, ParameterSlice


class OpenedAttention(Opened):
    """Compute softmax(q kᵀ/√D + mask) v of every head, between the layers q_proj, k_proj, v_proj and out_proj."""

    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool

    @classmethod
    def parts(cls, module: nn.Module) -> dict[str, PackedWeight]:
        """Return the projections; those of the input are one weight where query, key and value are equally wide."""
        assert isinstance(module, nn.MultiheadAttention)
        is_packed, width = module._qkv_same_embed_dim, module.embed_dim
        bias = None if module.in_proj_bias is None else "in_proj_bias"
        parts = {}
        for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
            rows = ParameterSlice(rows=(i * width, (i + 1) * width))
            weight, cut = ("in_proj_weight", rows) if is_packed else (f"{name}_weight", WHOLE)
            parts[name] = PackedWeight(owner=module, weight=weight, bias=bias, cut=cut, bias_cut=rows)
        out_bias = None if module.out_proj.bias is None else "bias"
        return {**parts, "out_proj": PackedWeight(owner=module.out_proj, weight="weight", bias=out_bias)}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute what `nn.MultiheadAttention` does."""
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        is_batched = query.dim() == 3
        if not is_batched:
            query, key, value = (each.unsqueeze(1) for each in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif self.batch_first:
            query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        q_BHQD, k_BHKD, v_BHKD = (
            self._modules[name](each).unflatten(-1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3)  # type: ignore[misc]
            for name, each in (("q_proj", query), ("k_proj", key), ("v_proj", value))
        )
        mask = self._mask(q_BHQD, key_padding_mask, attn_mask)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores_BHQK = (q_BHQD * self.head_dim**-0.5) @ k_BHKD.transpose(-2, -1)
            weights = (scores_BHQK if mask is None else scores_BHQK + mask).softmax(dim=-1)
            weights = F.dropout(weights, dropout) if dropout > 0 else weights
            found_BHQD = weights @ v_BHKD
            weights = weights.mean(dim=1) if average_attn_weights else weights
        else:
            found_BHQD = F.scaled_dot_product_attention(q_BHQD, k_BHKD, v_BHKD, mask, dropout)
        # Positions lie first in memory, as PyTorch has it: dropout after this draws in the order of the memory.
        output_QBE: Tensor = self._modules["out_proj"](found_BHQD.permute(2, 0, 1, 3).flatten(2))  # type: ignore[misc]
        if not is_batched:
            return output_QBE.squeeze(1), None if weights is None else weights.squeeze(0)
        return output_QBE.transpose(0, 1) if self.batch_first else output_QBE, weights

    def _mask(self, q_BHQD: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Return what is added to the scores: of a mask and of keys that are padding, minus infinity where True."""

        def added(mask: Tensor) -> Tensor:
            if mask.dtype == torch.bool:
                return torch.zeros_like(mask, dtype=q_BHQD.dtype).masked_fill_(mask, -torch.inf)
            return mask.to(q_BHQD.dtype)

        found = None if mask is None else added(mask)
        if found is not None and found.dim() == 3:  # one for every sample and head
            found = found.unflatten(0, (-1, self.num_heads)) if len(found) > 1 else found.unsqueeze(0)
        if padding is None:
            return found
        there = added(padding)[:, None, None, :].expand(-1, -1, q_BHQD.shape[-2], -1)
        return there if found is None else found + there
