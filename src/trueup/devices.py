"""What a device asks of the host."""

from torch import Tensor


def waits(tensor: Tensor) -> bool:
    """Whether to read a value of a tensor is to wait for its device."""
    return tensor.device.type != "cpu"
