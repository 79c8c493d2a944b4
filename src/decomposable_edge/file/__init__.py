"""The one container of all files: safetensors, with a description in JSON and checksums. It needs numpy only.

header     where the tensors of a safetensors file lie, read and checked
container  a file written, and read as far as it is needed
"""
