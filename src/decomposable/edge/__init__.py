"""For devices without PyTorch: `AnySizeSession` runs a file of `decomposable.export_any_size` at any size.

source        the file, of which no more is read than is needed
wire          where in it the large tensors lie
container     its outer shape: an ONNX model with a description, arrays and a checksum
bundle        what it holds, every claim checked
graph         where its graph has the decomposed layers
recurrent     recurrent layers, as an operator or as a loop over the steps
weights       factors, dense weights and batch normalisation at any size
building      the ONNX model of one size
feeding       what goes into it, checked
onnx_runtime  how ONNX Runtime is asked to work
npy           an array in a file, for the command line
session       the session, and changing its size under load
"""

from decomposable.errors import MissingExtraError, how_to_install

try:
    from decomposable.edge.bundle import Port
    from decomposable.edge.session import AnySizeSession
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("numpy", "onnx", "onnxruntime"):
        raise
    package = (error.name or "").partition(".")[0]
    raise MissingExtraError(
        f"{package} is not installed, which decomposable-edge needs; run on a device: pip install {package}; or "
        f"{how_to_install('onnx')}"
    ) from error

__all__ = ["AnySizeSession", "Port"]
