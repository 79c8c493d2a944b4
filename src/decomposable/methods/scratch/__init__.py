"""The factored network at given ranks, trained normally from scratch (section 4.4 of the paper).

It shows what the joint training is worth: the same layers and the same MACs as Decomposable-Net at one size, but the
two factors of a layer are ordinary weights from the first step on, and there is no other size.
"""

from decomposable.methods.scratch.method import METHOD

__all__ = ["METHOD"]
