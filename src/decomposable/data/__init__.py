"""Data sets and their augmentation. Every set has a function that loads it from files which are there already.

`base` has what training needs from any of them; a set of your own needs only that.
"""
