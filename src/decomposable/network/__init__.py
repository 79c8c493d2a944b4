"""A network at any size: `decompose` makes it, and it is calibrated, resized, saved and loaded."""
