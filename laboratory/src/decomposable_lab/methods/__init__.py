"""The methods that the library's are compared with. Importing this registers them, beside those of the library.

base.py       what a method says for a comparison       ours.py   the same for the library's own methods
width.py      fewer channels                            scratch.py   the factored network from scratch
slimmable.py  a few widths                              us_net.py    any width
trp.py        trained rank pruning                      tucker/      Tucker-2 at VBMF's ranks
widths.py, cutting.py   a network with a part of its channels
sized.py, loading.py    a network with a list of sizes, its file, and `load`
sweeps.py     what the recipes of the library compare of these methods
"""

from decomposable.training.methods import METHODS, register
from decomposable_lab.methods import scratch, slimmable, trp, tucker, us_net, width

__all__ = ["BUILT_IN"]

for _module in (width, scratch, trp, tucker, slimmable, us_net):
    register(_module.METHOD)
BUILT_IN = frozenset(METHODS)
"""The names of the methods that come with the library and with the laboratory."""
