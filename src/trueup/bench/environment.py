"""The environment of a run: versions, threads, processor. No names of hosts, users or folders."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from trueup.version import __version__

LIBRARIES = ("numpy", "torchvision", "timm", "pillow", "scipy", "scikit-learn", "matplotlib")  # networks and images
MASKS = ("segmentation-models-pytorch", "nibabel", "SimpleITK")  # optional, for segmentation


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return the versions and hardware that a record names."""
    return {
        "trueup": __version__,
        "commit": _commit(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
        **{name: found for name in MASKS if (found := _optional(name)) is not None},
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "cpu": _cpu(),
    }


@cache
def _optional(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    return None


@cache
def _commit() -> str | None:
    """Return the commit of a checkout of this project; None if it is installed as a package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+changes"]
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@cache
def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def reset_peak_memory(device: str) -> None:
    """Reset the peak memory counter."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # if this is not allowed, the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: str) -> float:
    """Return the peak memory since the last reset in MiB: of the device, or of this process."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10
    except (OSError, StopIteration):
        return 0.0  # unknown on this platform
