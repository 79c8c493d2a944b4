"""Choosing a size: costs, ranks and plans, interpolation, latency. numpy only: a device without torch has it too."""
