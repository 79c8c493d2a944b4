"""Ways to train a network that has several sizes afterwards; `base.py` says what all of them offer."""

from __future__ import annotations

from decomposable.training.methods import decomposable, elastic, plain
from decomposable.training.methods.base import CalibrationData, Method, Sized, Step
from decomposable.training.methods.registry import METHODS, find, register

__all__ = ["METHODS", "CalibrationData", "Method", "Sized", "Step", "find", "register"]

for _module in (plain, decomposable, elastic):
    register(_module.METHOD)
