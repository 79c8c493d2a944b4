"""The verbs of decomposable-lab, one module each."""
