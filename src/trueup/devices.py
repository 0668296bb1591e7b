"""Differences between devices."""

from torch import Tensor


def waits(tensor: Tensor) -> bool:
    """Return True if reading a tensor's value synchronises with its device."""
    return tensor.device.type != "cpu"
