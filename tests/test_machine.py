import gc
import subprocess
import sys

import pytest

from decomposable_edge.machine import collecting_later

PROGRAM = """
import resource
import numpy as np
from decomposable_edge.machine import keep_freed_memory

is_kept = keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    np.ones(2_000_000)  # 16 MB, freed at once
print(is_kept, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / 16e6)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resource counts pages in its own way elsewhere")
def test_what_was_freed_is_used_again():
    """In a process of its own, because it stays so: fresh pages for the first of fifty arrays, and not for all."""
    out = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    is_kept, arrays = out.split()
    if is_kept == "False":
        pytest.skip("not glibc")
    assert float(arrays) < 5


def test_python_looks_for_garbage_again_afterwards():
    assert gc.isenabled()
    with collecting_later():
        with collecting_later():
            assert not gc.isenabled()
        assert not gc.isenabled()  # who turned it off turns it on
    assert gc.isenabled()
