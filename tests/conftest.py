"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest

# Some virtual machines announce AMX and trap its instructions: a bfloat16 kernel would end the process. Must be set
# before torch runs its first one.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
# As the package itself does it; some tests import ONNX Runtime first.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real images and weights; a test that asks for it is skipped where there is none."""
    variable = os.environ.get("DECOMPOSABLE_SHARED_DATA")
    folder = Path(variable) if variable else CHECKOUT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is not a folder (set DECOMPOSABLE_SHARED_DATA to another)")
    return folder
