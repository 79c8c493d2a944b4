"""The paper's propositions, bounds and spectra, measured on a network of one's own.

layer_errors.py   how far a layer's output moves when it is cut, by rank and by width (proposition 1, figure 2f)
spectra.py        singular values, and the ranks that criteria select (figures 2d and 2e)
divergence.py     the divergence of a cut network's softmax, and its bound (proposition 2)
lipschitz.py      how errors grow from layer to layer, in theory and measured (appendix E)
gradients.py      norms of the full and the low-rank network's gradients (appendix A)
"""

from decomposable_lab.analysis.divergence import Divergence, divergence
from decomposable_lab.analysis.gradients import gradient_norms
from decomposable_lab.analysis.layer_errors import RankErrors, WidthErrors, errors_by_rank, errors_by_width
from decomposable_lab.analysis.lipschitz import Lipschitz, lipschitz
from decomposable_lab.analysis.spectra import selected_ranks, singular_values

__all__ = [
    "Divergence",
    "Lipschitz",
    "RankErrors",
    "WidthErrors",
    "divergence",
    "errors_by_rank",
    "errors_by_width",
    "gradient_norms",
    "lipschitz",
    "selected_ranks",
    "singular_values",
]
