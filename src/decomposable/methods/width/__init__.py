"""The same network with fewer channels, trained normally: the simplest way to a smaller network.

One training gives one size, so that every size of a comparison is trained on its own.
"""

from decomposable.methods.width.method import METHOD

__all__ = ["METHOD"]
