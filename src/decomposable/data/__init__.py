"""Data sets, each a module with a `load` function."""
