"""Save an adapting model, and resume it exactly where it was."""

import tempfile
from pathlib import Path

import torch

import trueup
from trueup.testing import convnet, images

model = convnet()  # any trained torch.nn.Module
adapter = trueup.adapt(model, "tsd")
for step in range(5):
    adapter(images(32, seed=step, shift=1.0)[0])

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "night.safetensors"
    adapter.save(path)
    print(f"saved after {adapter.batches} batches: {path.stat().st_size / 1024:.0f} KiB")

    resumed = trueup.adapt(model, "tsd")
    resumed.load(path)

    try:  # a state belongs to one model, one method and its settings
        trueup.adapt(model, "tent").load(path)
    except ValueError as error:
        print("refused:", str(error).replace(folder, ""))

x = images(32, seed=5, shift=1.0)[0]
print("resumes bit-exactly:", torch.equal(adapter(x), resumed(x)))

resumed.reset()
print("resets bit-exactly:", torch.equal(resumed(x), trueup.adapt(model, "tsd")(x)))
