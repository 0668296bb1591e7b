"""An adapter's own random stream, which can be saved and leaves the user's generators untouched."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Torch's generators are global: only one thread at a time may swap in a stream.
_GENERATORS = threading.RLock()


class RandomStream:
    """Generator states of the CPU and of the device in use, swapped in during a `with` block."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.states: dict[str, Tensor] = {}
        self._active: list[torch.device] = []

    @contextmanager
    def drawing(self, device: torch.device) -> Iterator[None]:
        """Draw random numbers from this stream within the block; adapters in other threads wait."""
        with _GENERATORS:
            yield from self._drawing(device)

    def _drawing(self, device: torch.device) -> Iterator[None]:
        devices = [torch.device("cpu")] + ([device] if device.type != "cpu" else [])
        before = [_get(d) for d in devices]
        try:
            for d in devices:
                _set(d, self.states.get(d.type, self._start(d)))
            self._active = devices
            yield
            self.states = {d.type: _get(d) for d in devices}  # skipped after a failure, which is rolled back
        finally:
            self._active = []
            for d, state in zip(devices, before, strict=True):
                _set(d, state)

    def restart(self, states: dict[str, Tensor] | None = None) -> None:
        """Restart from the seed, or from saved generator states."""
        self.states = dict(states or {})
        for device in self._active:
            _set(device, self.states.get(device.type, self._start(device)))

    def _start(self, device: torch.device) -> Tensor:
        return torch.Generator(device).manual_seed(self.seed).get_state()


def _get(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Restore the generators at the end of the block."""
    devices = [torch.device("cpu")] + ([device] if device.type != "cpu" else [])
    with _GENERATORS:
        states = [_get(d) for d in devices]
        try:
            yield
        finally:
            for d, state in zip(devices, states, strict=True):
                _set(d, state)
