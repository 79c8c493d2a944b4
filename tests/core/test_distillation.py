from types import SimpleNamespace

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from decomposable.core import distillation
from decomposable_edge.errors import InvalidArgumentError


@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4)])
def test_kl_is_that_of_torch_distributions(shape: tuple[int, ...]) -> None:
    low, full = torch.randn(shape), torch.randn(shape)
    wanted = kl_divergence(Categorical(logits=full), Categorical(logits=low)).mean()
    assert torch.allclose(distillation.kl_divergence(SimpleNamespace(logits=low), SimpleNamespace(logits=full)), wanted)
    assert torch.allclose(distillation.kl_divergence({"logits": low}, {"logits": full}), wanted)


def test_classes_that_the_teacher_excludes_add_nothing() -> None:
    """A logit of −∞, as a mask has it: the divergence is that of the other classes, and so is its gradient."""
    low, full = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    found = []
    for masked in (True, False):
        leaf = low.clone().requires_grad_(True)
        mask = torch.tensor([False, False, True, False])
        one, other = (t.masked_fill(mask, -torch.inf) if masked else t[:, ~mask] for t in (leaf, full))
        divergence = distillation.kl_divergence(one, other)
        divergence.backward()
        found.append((divergence.detach(), leaf.grad))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other)


@pytest.mark.parametrize(
    "outputs",
    [torch.zeros(2, 3, 4), torch.zeros(3), torch.zeros(4, 1), [torch.zeros(2, 3)], {"boxes": torch.zeros(2, 3)}],
)
def test_outputs_without_logits_are_refused_with_what_to_do(outputs: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"allowed: .* or distance=fn\(low, full\)"):
        distillation.kl_divergence(outputs, outputs)
