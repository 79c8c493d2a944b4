"""How a decomposed network lies in a file: `artifact.py` and `loading.py` are what users see of it.

container  safetensors, a description in JSON, checksums: `decomposable_edge.file` for tensors of PyTorch
contents   what a file holds, described and written
parsing    the same read back, every claim checked
"""
