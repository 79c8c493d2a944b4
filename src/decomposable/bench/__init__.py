"""How long a network's sizes take on this machine, in PyTorch and in ONNX Runtime.

sweep      which sizes and alignments are timed side by side: the entry of a latency profile; a device uses it too
runners    a network as a function of no arguments, with a fixed batch and number of threads
measuring  the two together, for a decomposed network
"""
