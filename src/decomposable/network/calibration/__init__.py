"""Batch normalisation statistics for any size."""
