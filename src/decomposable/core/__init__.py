"""The paper, without files: weights → matrix form → SVD → score → two plain layers → the joint step (`joint.py`)."""
