"""Use a guard: it survives broken images, reports events, and rolls a collapsed model back."""

import logging
import tempfile

import torch

import trueup
from trueup.testing import convnet, images

logging.getLogger("trueup.guard").setLevel(logging.ERROR)  # events are printed below instead

model = convnet()  # any trained torch.nn.Module


def print_event(event: trueup.Event) -> None:
    print(f"  after {event.images} images: {event.name}: {event.reason}")


adapter = trueup.adapt(model, "tent", norm="ema", guard=trueup.Guard(notify=print_event))
with tempfile.TemporaryDirectory() as folder:
    adapter.checkpoint(folder, every=10)  # after a crash, the same line resumes from the newest state
    for step in range(60):
        x, y = images(32, seed=step, shift=1.0)
        if step == 10:
            x[5, 0, 0, 0] = torch.nan  # a broken pixel: the answer to this image is zeros, the others are not affected
        if step == 30 and adapter.optimizer is not None:
            for group in adapter.optimizer.param_groups:  # a wrong setting
                group["lr"] = 1.0
        accuracy = (adapter(x).argmax(dim=1) == y).float().mean()
        if step in (9, 29, 33, 34, 59):
            print(f"batch {step}: {accuracy:.0%} right, {adapter.health.state}")

print(adapter.health)

# The most robust preset for difficult streams, for any method:
safe = trueup.adapt(model, "tsd", preset="safe")
single = torch.cat([safe(images(1, seed=1000 + i, shift=1.0)[0]) for i in range(100)])
labels = torch.cat([images(1, seed=1000 + i, shift=1.0)[1] for i in range(100)])
print(f"one image at a time: {(single.argmax(dim=1) == labels).float().mean():.0%} right")
