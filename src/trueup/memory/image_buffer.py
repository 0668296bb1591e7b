"""Memories of whole images, for methods that learn from them again: which of a stream are kept, and where.

Who comes and goes is decided image by image, as the papers say; the images themselves are written at once.
"""

import math
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.memory.journal import Journaled


class ImageBuffer(Journaled):
    """A memory of so many images of one shape with their predicted classes, -1 where a place is empty.

    Which image comes and goes is for who derives from it. `waiting` counts the images since the last update.
    """

    pixels: Tensor
    shape: Tensor
    labels: Tensor
    waiting: Tensor
    large = ("pixels",)

    def __init__(self, capacity: int, classes: int, like: Tensor) -> None:
        super().__init__()
        self.classes = classes

        def whole(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=like.device)

        self.register_buffer("pixels", torch.zeros(capacity, 0, dtype=like.dtype, device=like.device))  # flat images
        self.register_buffer("shape", whole())  # of an image, once there is one
        self.register_buffer("labels", whole(*[-1] * capacity))
        self.register_buffer("waiting", whole(0))

    def verify(self) -> None:
        """Refuse contents, such as a file's, that no images can have left."""
        wide = int(self.shape.prod()) if len(self.shape) else 0
        fits = self.pixels.shape == (len(self.labels), wide) and len(self.waiting) == 1 and int(self.waiting) >= 0
        fits = fits and bool(
            (self.shape > 0).all() and (self.labels >= -1).all() and (self.labels < self.classes).all()
        )
        if not fits:
            raise ValueError("the memory's images do not belong together")

    def suits(self, x: Tensor) -> None:
        """Refuse images of another shape than those that are kept."""
        if len(self.shape) and self.shape.tolist() != list(x.shape[1:]):
            raise ValueError(
                f"the memory holds images of shape {tuple(self.shape.tolist())}, these have {tuple(x.shape[1:])}: "
                f"resize them, or reset() before the size changes"
            )

    def write(self, x: Tensor, rows: dict[int, int]) -> None:
        """Put images of a batch into places: rows[place] is the number of the image."""
        if not len(self.shape):
            self.shape = torch.tensor(x.shape[1:], dtype=torch.int64, device=self.shape.device)
            self.pixels = self.pixels.new_zeros(len(self.pixels), x[0].numel())
        if rows:
            self.note(self.pixels, list(rows))
            self.pixels[list(rows)] = x.detach()[list(rows.values())].flatten(1).to(self.pixels)

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """All images, without the empty places."""
        return self.pixels[self.labels >= 0].reshape(-1, *self.shape.tolist()).to(dtype or self.pixels.dtype)

    def wait(self, n: int, every: int) -> bool:
        """Count n images; whether an update is due with them."""
        self.waiting.copy_(n + torch.where(self.waiting >= every, 0, self.waiting))
        return bool(self.waiting >= every)

    def due(self, every: int) -> int:
        """How many images are missing to the next update."""
        waiting = int(self.waiting)
        return every - waiting if waiting < every else every


class PbrsBuffer(ImageBuffer):
    """Prediction-balanced reservoir sampling: as many images of each predicted class, drawn evenly over time."""

    seen: Tensor

    def __init__(self, capacity: int, classes: int, like: Tensor) -> None:
        super().__init__(capacity, classes, like)
        self.register_buffer("seen", torch.zeros(classes, dtype=torch.int64, device=like.device))

    def verify(self) -> None:
        """Refuse contents that no images can have left."""
        super().verify()
        if len(self.seen) != self.classes or bool((self.seen < 0).any()):
            raise ValueError("the memory's counts are none")

    def add(self, x: Tensor, labels: Tensor) -> None:
        """Offer images, one after another."""
        held, seen, rows = self.labels.tolist(), self.seen.tolist(), {}
        draws = torch.rand(len(x), 3).tolist()
        for i, label in enumerate(labels.tolist()):
            seen[label] += 1
            place = _place(held, label, seen[label], draws[i])
            if place is not None:
                held[place], rows[place] = label, i
        self.write(x, rows)
        self.labels.copy_(torch.tensor(held))
        self.seen.copy_(torch.tensor(seen))


def _place(held: list[int], label: int, seen: int, draws: list[float]) -> int | None:
    """Where an image goes: an empty place, one of a largest class, or by chance one of its own, if that is largest."""
    if -1 in held:
        return held.index(-1)
    sizes = Counter(held)
    largest = sorted(k for k in sizes if sizes[k] == max(sizes.values()))
    if label not in largest:
        leaves = largest[int(draws[0] * len(largest))]
    elif draws[1] <= sizes[label] / seen:
        leaves = label
    else:
        return None
    places = [place for place, k in enumerate(held) if k == leaves]
    return places[int(draws[2] * len(places))]


class CstuBuffer(ImageBuffer):
    """Category-balanced sampling with timeliness and uncertainty (CSTU): who is old or uncertain gives way."""

    age: Tensor
    entropy: Tensor

    def __init__(self, capacity: int, classes: int, like: Tensor) -> None:
        super().__init__(capacity, classes, like)
        self.register_buffer("age", torch.zeros_like(self.labels))
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.register_buffer("entropy", torch.zeros_like(self.labels, dtype=dtype))

    def verify(self) -> None:
        """Refuse contents that no images can have left."""
        super().verify()
        fits = self.age.shape == self.entropy.shape == self.labels.shape
        if not fits or bool((self.age < 0).any()) or not bool(self.entropy.isfinite().all()):
            raise ValueError("the memory's ages and entropies are none")

    def add(self, x: Tensor, labels: Tensor, entropy: Tensor) -> None:
        """Offer images, one after another; with each of them all that are kept grow older."""
        held, age, doubt, rows = self.labels.tolist(), self.age.tolist(), self.entropy.tolist(), {}
        for i, (label, h) in enumerate(zip(labels.tolist(), entropy.tolist(), strict=True)):
            place = self._place(held, age, doubt, label, h)
            if place is not None:
                held[place], age[place], doubt[place], rows[place] = label, 0, h, i
            age = [a + 1 for a in age]
        self.write(x, rows)
        for mine, new in ((self.labels, held), (self.age, age), (self.entropy, doubt)):
            mine.copy_(torch.tensor(new, dtype=mine.dtype))

    def _place(self, held: list[int], age: list[int], doubt: list[float], label: int, h: float) -> int | None:
        """Where an image goes: an empty place while its class is small, else that of the worst, if it is no worse."""
        n = len(held)
        sizes = Counter(k for k in held if k >= 0)
        if sizes[label] < n / self.classes and -1 in held:
            return held.index(-1)
        large = [k for k in sizes if sizes[k] == max(sizes.values())] if sizes[label] < n / self.classes else [label]

        def score(age: int, h: float) -> float:
            return 1 / (1 + math.exp(-age / n)) + h / math.log(self.classes)

        rivals = [(score(age[p], doubt[p]), held[p], -age[p], p) for p in range(n) if held[p] in large]
        worst = max(rivals)  # of equals the last class, and there the newest
        return worst[3] if worst[0] > score(0, h) else None


class LowEntropyBuffer(ImageBuffer):
    """Of each predicted class the images of lowest entropy, as it was when they came."""

    entropy: Tensor

    def __init__(self, capacity: int, classes: int, like: Tensor) -> None:
        super().__init__(capacity, classes, like)
        # Differs: with more classes than places published code keeps nothing; here the most certain of a class.
        self.per_class = max(1, capacity // classes)
        self.register_buffer("entropy", self.labels.to(torch.promote_types(like.dtype, torch.float32)))

    def verify(self) -> None:
        """Refuse contents that no images can have left."""
        super().verify()
        if self.entropy.shape != self.labels.shape or not bool(self.entropy.isfinite().all()):
            raise ValueError("the memory's entropies are none")

    def add(self, x: Tensor, labels: Tensor, entropy: Tensor) -> None:
        """Offer images, all at once; of equals the one that is kept stays."""
        n, labels, entropy = len(self.labels), torch.cat((self.labels, labels)), torch.cat((self.entropy, entropy))
        order = entropy.argsort(stable=True)
        order = order[labels[order].argsort(stable=True)]
        group = labels[order]  # an image is one too many if so many places before it there is one of its class
        order = order[group != F.pad(group, (self.per_class, 0), value=-1)[: len(group)]]
        stays = torch.zeros_like(labels, dtype=torch.bool)
        stays[order[entropy[order].argsort(stable=True)][:n]] = True
        new = stays[n:].nonzero().flatten()
        free = (~stays[:n]).nonzero().flatten()[: len(new)]  # of those who leave first: empty places come last
        self.labels[free], self.entropy[free] = labels[n + new], entropy[n + new]
        self.write(x, dict(zip(free.tolist(), new.tolist(), strict=True)))
