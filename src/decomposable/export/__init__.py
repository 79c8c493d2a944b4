"""From a network at a size to a file that other programs run: ONNX, `torch.export`, and the graph in its file."""
