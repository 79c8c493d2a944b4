"""The laboratory of decomposable: rival methods, comparisons, the paper's exhibits, and analysis.

Importing it registers the rival methods, so that ``decomposable.train(..., method="us-net")`` knows them.
"""

from decomposable_lab import analysis
from decomposable_lab.comparison.running import compare
from decomposable_lab.methods.loading import load
from decomposable_lab.methods.sized import SizedNet

__all__ = ["SizedNet", "analysis", "compare", "load"]
