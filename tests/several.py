"""Two processes of a program, as `torchrun` would start them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

import decomposable as dn

LIMIT = 240  # seconds until processes that hang are ended, and the test fails


def weights_of_two(program: Path, folder: Path) -> list[dict]:
    """Run it as two processes, and return what each of them wrote."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(Path(dn.__file__).parents[1]), *sys.path])
    known = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    known |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    running = [
        subprocess.Popen(
            [sys.executable, str(program), str(folder)],
            env={**os.environ, **known, "RANK": str(i), "LOCAL_RANK": str(i)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=LIMIT)[1] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)
    return [torch.load(folder / f"weights-{i}.pt") for i in range(2)]


def check_same(found: list[dict], alone: dict[str, dict]) -> None:
    """Both processes have the same bits, and up to rounding those of one process with the whole batch."""
    for name, expected in alone.items():
        for key, value in expected.items():
            assert torch.equal(found[0][name][key], found[1][name][key]), (name, key)
            torch.testing.assert_close(found[0][name][key], value, rtol=1e-4, atol=1e-5, msg=f"{name} {key}")
    for key, value in found[0]["True"].items():
        assert torch.equal(found[0]["resumed"][key], value), key
