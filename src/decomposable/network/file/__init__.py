"""How a decomposed network lies in a file: `artifact.py` and `loading.py` are what users see of it.

header     where the tensors of a safetensors file lie, read and checked
container  safetensors, a description in JSON, checksums
digests    the checksums of tensors, in blocks of rows
fields     reading JSON that nobody vouches for
skeleton   what is known of a model's modules without its code
contents   what a file holds, described and written
parsing    the same read back, every claim checked
choices    the part of it that a choice of size depends on
shrinking  one size of it, and reading no more than that
"""
