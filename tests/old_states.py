"""States and a checkpoint that an older version has written, in tests/fixtures/states; how they were made.

Run: python tests/old_states.py FOLDER writes such files with the version that is installed. Those in the repository
stay as they are: they stand for the files that users have. tests/core/test_old_files.py reads them.

All values of models and images are whole numbers over a power of two, so that they are the same on every machine.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import trueup
from trueup.source.checkpoints import Store
from trueup.source.recipe import Recipe, Training

FOLDER = Path(__file__).parent / "fixtures" / "states"
CLASSES, MASKS, SIDE = 4, 3, 8
TRAINING: dict[str, Any] = {"size": SIDE, "normalize": "half", "lr": 0.003, "augment": "none", "decay_at": (0.5,)}
MADE: dict[str, Any] = {"dataset": "made-up", "sources": ("a", "b"), "classes": CLASSES, "seed": 2}
RECIPE = Recipe(**MADE, network="old_states:classifier", training=Training(**TRAINING))
REPORT = {"history": [{"iteration": 1, "accuracy": 0.5, "loss": 1.25}], "kept": {"accuracy": 0.5}, "broken": ["ü.png"]}


def numbers(seed: int, *shape: int) -> Tensor:
    """Return numbers from -1 to 1 in steps of 1/128, well mixed."""
    at = torch.arange(torch.Size(shape).numel(), dtype=torch.int64) + 100_003 * seed
    at = (at * 2_654_435_761) % 2**32
    at = ((at ^ (at >> 15)) * 2_246_822_519) % 2**32
    return ((at >> 24).float() / 128 - 1).reshape(shape)


def filled(model: nn.Module) -> nn.Module:
    """Give a model its weights and statistics."""
    for i, (name, t) in enumerate(model.state_dict().items()):
        if t.is_floating_point():
            size = 2.0 if name.startswith("head") else 0.5
            t.copy_(numbers(i, *t.shape) * size + (1 if name in ("bn.weight", "bn.running_var") else 0))
    return model.eval()


def classifier(classes: int = CLASSES) -> nn.Module:
    """Return a tiny classifier with BatchNorm."""
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False))
    model.add_module("bn", nn.BatchNorm2d(8))
    model.add_module("relu", nn.ReLU())
    model.add_module("pool", nn.AvgPool2d(2))
    model.add_module("flat", nn.Flatten())
    model.add_module("head", nn.Linear(8 * 4, classes))
    return filled(model)


def segmenter() -> nn.Module:
    """Return a tiny segmenter with BatchNorm."""
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False))
    model.add_module("bn", nn.BatchNorm2d(8))
    model.add_module("relu", nn.ReLU())
    model.add_module("head", nn.Conv2d(8, MASKS, 1))
    model.add_module("up", nn.Upsample(scale_factor=2, mode="nearest"))
    return filled(model)


@dataclass(frozen=True)
class Case:
    """A state: the model, the options of `trueup.adapt`, and the stream before it was saved."""

    model: Callable[[], nn.Module]
    options: dict[str, Any]
    batches: int
    size: int

    def adapter(self) -> trueup.Adapter:
        """Return a fresh adapter."""
        return trueup.adapt(self.model(), **self.options)

    def stream(self, start: int, stop: int) -> list[Tensor]:
        """Return batches of images; some of their colours move away from the source's."""
        tint = torch.tensor([0.5, -0.25, 0.125]).view(1, 3, 1, 1)
        return [numbers(1000 + i, self.size, 3, SIDE, SIDE) * 2 + tint for i in range(start, stop)]


CASES = {
    "tent-guard": Case(
        classifier, {"method": "tent", "guard": True, "mean": (0.5, 0.25, 0.125), "std": (0.5, 0.5, 0.25)}, 9, 64
    ),
    "tsd-plain": Case(classifier, {"method": "tsd", "lr": 0.001}, 4, 16),
    "rotta-safe": Case(classifier, {"method": "rotta", "preset": "safe", "capacity": 24, "every": 24}, 5, 32),
    "masks-safe": Case(segmenter, {"method": "tsd", "preset": "safe", "seed": 3, "capacity": 96}, 4, 24),
}


def write(folder: Path) -> None:
    """Write all states, the answers to the two batches after each, and the checkpoint."""
    for name, case in CASES.items():
        adapter = case.adapter()
        for x in case.stream(0, case.batches):
            adapter(x)
        adapter.save(folder / f"{name}.safetensors")
        answers = {str(i): adapter(x) for i, x in enumerate(case.stream(case.batches, case.batches + 2))}
        save_file(answers, folder / f"{name}-answers.safetensors")
    Store(folder).save(RECIPE, classifier(), REPORT)


if __name__ == "__main__":
    sys.modules["old_states"] = sys.modules["__main__"]
    write(Path(sys.argv[1]))
