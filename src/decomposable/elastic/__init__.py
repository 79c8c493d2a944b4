"""Elastic training: the one place that says what it is.

options.py  its numbers, and its learning rate
training.py `Elastic`: the steps of a training, and the network that comes out
order.py    by what a basis is worth, as images of the training say it
"""

from __future__ import annotations

from decomposable.elastic.options import ElasticOptions
from decomposable.elastic.training import Elastic

__all__ = ["Elastic", "ElasticOptions"]
