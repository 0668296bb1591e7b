"""Buffers of images from the stream, for methods that learn from them again.

Which images are kept is decided one image at a time, as in the papers; the kept ones are written at once.
"""

import math
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.memory.bank import Journaled


class ImageBuffer(Journaled):
    """A buffer of images of one shape with their predicted classes; the label of an empty slot is -1.

    Subclasses decide which images are kept. `waiting` is the number of images since the last update.
    """

    large = ("pixels",)

    def __init__(self, capacity: int, classes: int, like: Tensor) -> None:
        super().__init__()
        self.classes = classes
        self.pixels: Tensor = nn.Buffer(torch.zeros(capacity, 0, dtype=like.dtype, device=like.device))  # flat images
        self.shape: Tensor = nn.Buffer(torch.zeros(0, dtype=torch.int64, device=like.device))  # empty before any image
        self.labels = nn.Buffer(torch.full((capacity,), -1, dtype=torch.int64, device=like.device))
        self.waiting = nn.Buffer(torch.zeros(1, dtype=torch.int64, device=like.device))

    def verify(self) -> None:
        """Refuse inconsistent contents, as from a damaged file."""
        wide = int(self.shape.prod()) if len(self.shape) else 0
        fits = self.pixels.shape == (len(self.labels), wide) and len(self.waiting) == 1 and int(self.waiting) >= 0
        labels = (self.labels >= -1) & (self.labels < self.classes)
        fits = fits and bool((self.shape > 0).all() and labels.all())
        if not fits:
            raise ValueError("the memory's images, shape and labels do not fit together")

    def check_shape(self, x: Tensor) -> None:
        """Refuse images of another shape than those in the buffer."""
        if len(self.shape) and self.shape.tolist() != list(x.shape[1:]):
            raise ValueError(
                f"the memory holds images of shape {tuple(self.shape.tolist())}, these have {tuple(x.shape[1:])}: "
                f"resize them, or reset() before the size changes"
            )

    def write(self, x: Tensor, positions: dict[int, int]) -> None:
        """Write images of a batch into slots: positions[slot] is the image's position in the batch."""
        if not len(self.shape):
            self.shape = torch.tensor(x.shape[1:], dtype=torch.int64, device=self.shape.device)
            self.pixels = self.pixels.new_zeros(len(self.pixels), x[0].numel())
        if positions:
            self.record(self.pixels, list(positions))
            self.pixels[list(positions)] = x.detach()[list(positions.values())].flatten(1).to(self.pixels)

    def read(self, net: nn.Module | None = None) -> Tensor:
        """Return all stored images, in the precision of `net` if given."""
        dtype = next((p.dtype for p in net.parameters()), None) if net is not None else None
        return self.pixels[self.labels >= 0].reshape(-1, *self.shape.tolist()).to(dtype or self.pixels.dtype)

    def count_images(self, n: int, every: int) -> bool:
        """Count n images; return True if an update is due, every `every` images."""
        self.waiting.copy_(n + torch.where(self.waiting >= every, 0, self.waiting))
        return bool(self.waiting >= every)

    def until_update(self, every: int) -> int:
        """Return the number of images until the next update."""
        waiting = int(self.waiting)
        return every - waiting if waiting < every else every


class PbrsBuffer(ImageBuffer):
    """Prediction-balanced reservoir sampling (PBRS): equally many images of each predicted class, uniform over time."""

    def __init__(self, capacity: int, classes: int, like: Tensor) -> None:
        super().__init__(capacity, classes, like)
        self.seen = nn.Buffer(torch.zeros(classes, dtype=torch.int64, device=like.device))

    def verify(self) -> None:
        """Refuse inconsistent contents."""
        super().verify()
        if len(self.seen) != self.classes or bool((self.seen < 0).any()):
            raise ValueError("the memory's counts of images do not fit its classes")

    def add(self, x: Tensor, labels: Tensor) -> None:
        """Offer images, one after another."""
        stored, seen, rows = self.labels.tolist(), self.seen.tolist(), {}
        random = torch.rand(len(x), 3).tolist()
        for i, label in enumerate(labels.tolist()):
            seen[label] += 1
            slot = _choose_slot(stored, label, seen[label], random[i])
            if slot is not None:
                stored[slot], rows[slot] = label, i
        self.write(x, rows)
        self.labels.copy_(torch.tensor(stored))
        self.seen.copy_(torch.tensor(seen))


def _choose_slot(stored: list[int], label: int, seen: int, random: list[float]) -> int | None:
    """Return an empty slot, else one of a largest class; with a certain probability if that is the image's own."""
    if -1 in stored:
        return stored.index(-1)
    sizes = Counter(stored)
    largest = sorted(k for k in sizes if sizes[k] == max(sizes.values()))
    if label not in largest:
        replaced = largest[int(random[0] * len(largest))]
    elif random[1] <= sizes[label] / seen:
        replaced = label
    else:
        return None
    slots = [slot for slot, k in enumerate(stored) if k == replaced]
    return slots[int(random[2] * len(slots))]


class CstuBuffer(ImageBuffer):
    """Category-balanced sampling with timeliness and uncertainty (CSTU): old or uncertain images are replaced."""

    def __init__(self, capacity: int, classes: int, like: Tensor) -> None:
        super().__init__(capacity, classes, like)
        self.age = nn.Buffer(torch.zeros_like(self.labels))
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.entropy = nn.Buffer(torch.zeros_like(self.labels, dtype=dtype))

    def verify(self) -> None:
        """Refuse inconsistent contents."""
        super().verify()
        fits = self.age.shape == self.entropy.shape == self.labels.shape
        if not fits or bool((self.age < 0).any()) or not bool(self.entropy.isfinite().all()):
            raise ValueError("the memory's ages or entropies are invalid")

    def add(self, x: Tensor, labels: Tensor, entropy: Tensor) -> None:
        """Offer images, one after another; each one makes all stored images older by one."""
        stored, age, entropies, rows = self.labels.tolist(), self.age.tolist(), self.entropy.tolist(), {}
        for i, (label, h) in enumerate(zip(labels.tolist(), entropy.tolist(), strict=True)):
            slot = self._choose_slot(stored, age, entropies, label, h)
            if slot is not None:
                stored[slot], age[slot], entropies[slot], rows[slot] = label, 0, h, i
            age = [a + 1 for a in age]
        self.write(x, rows)
        for buffer, new in ((self.labels, stored), (self.age, age), (self.entropy, entropies)):
            buffer.copy_(torch.tensor(new, dtype=buffer.dtype))

    def _choose_slot(
        self, stored: list[int], age: list[int], entropies: list[float], label: int, h: float
    ) -> int | None:
        """Return an empty slot if the class is small, else the slot of the highest score if the image's is lower."""
        n = len(stored)
        sizes = Counter(k for k in stored if k >= 0)
        if sizes[label] < n / self.classes and -1 in stored:
            return stored.index(-1)
        large = [k for k in sizes if sizes[k] == max(sizes.values())] if sizes[label] < n / self.classes else [label]

        def score(age: int, h: float) -> float:
            return 1 / (1 + math.exp(-age / n)) + h / math.log(self.classes)

        rivals = [(score(age[i], entropies[i]), stored[i], -age[i], i) for i in range(n) if stored[i] in large]
        worst = max(rivals)  # ties: the last class, then the newest image
        return worst[3] if worst[0] > score(0, h) else None


class LowEntropyBuffer(ImageBuffer):
    """The images of lowest entropy of each predicted class."""

    def __init__(self, capacity: int, classes: int, like: Tensor) -> None:
        super().__init__(capacity, classes, like)
        # Differs: with more classes than slots published code keeps nothing; here one image of a class may stay.
        self.per_class = max(1, capacity // classes)
        self.entropy = nn.Buffer(self.labels.to(torch.promote_types(like.dtype, torch.float32)))

    def verify(self) -> None:
        """Refuse inconsistent contents."""
        super().verify()
        if self.entropy.shape != self.labels.shape or not bool(self.entropy.isfinite().all()):
            raise ValueError("the memory's entropies are invalid")

    def add(self, x: Tensor, labels: Tensor, entropy: Tensor) -> None:
        """Offer images, all at once; at equal entropy the stored one stays."""
        n, labels, entropy = len(self.labels), torch.cat((self.labels, labels)), torch.cat((self.entropy, entropy))
        order = entropy.argsort(stable=True)
        order = order[labels[order].argsort(stable=True)]
        group = labels[order]  # an image is surplus if the one `per_class` places before it has the same class
        order = order[group != F.pad(group, (self.per_class, 0), value=-1)[: len(group)]]
        kept = torch.zeros_like(labels, dtype=torch.bool)
        kept[order[entropy[order].argsort(stable=True)][:n]] = True
        new = kept[n:].nonzero().flatten()
        free = (~kept[:n]).nonzero().flatten()[: len(new)]  # removed images first: empty slots are last
        self.labels[free], self.entropy[free] = labels[n + new], entropy[n + new]
        self.write(x, dict(zip(free.tolist(), new.tolist(), strict=True)))
