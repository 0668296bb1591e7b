"""One thread per test process, toy models that are trained once, and a warm start for processes of sweeps."""

import hashlib
import os
import tempfile
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

from trueup.testing import toys

torch.set_num_threads(1)  # sums are added in one order, and two processes share two cores
os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start

_trained = toys._trained
_KEY = hashlib.sha256(Path(toys.__file__).read_bytes())
_KEY.update(f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {os.getuid()}".encode())
_TOYS = Path(tempfile.gettempdir()) / f"trueup-toys-{_KEY.hexdigest()[:16]}"


@cache
def _remembered(kind: str, seed: int) -> nn.Sequential:
    """Return a trained toy from disk; train it if no process has done so yet."""
    path = _TOYS / f"{kind}-{seed}.safetensors"
    if not path.exists():
        _TOYS.mkdir(mode=0o700, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        save_model(_trained(kind, seed), str(partial))
        partial.replace(path)  # whole or not at all, whoever else writes it
    with torch.random.fork_rng([]), torch.inference_mode(False):
        model = toys.MODELS[kind]().eval()
    load_model(model, path)
    return model


toys._trained = _remembered


@pytest.fixture(scope="session")
def warm_sweeps() -> None:
    """Start the server that forks the processes of sweeps with torch._dynamo loaded.

    The first optimiser of a process imports it, which takes two seconds, longer than most jobs of a test.
    """
    forkserver.set_forkserver_preload(["trueup.bench.jobs", "torch._dynamo"])
    forkserver.ensure_running()
