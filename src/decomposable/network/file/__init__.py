"""How a decomposed network lies in a file: `artifact.py` and `loading.py` are what users see of it.

header     where the tensors of a safetensors file lie, read and checked
container  safetensors, a description in JSON, checksums
digests    the checksums of tensors, in blocks of rows
skeleton   what is known of a model's modules without its code
contents   what a file holds, described and written
parsing    the same read back, every claim checked
shrinking  one size of it, and reading no more than that
"""
