import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import trueup
from trueup.memory.image_buffer import CstuBuffer, ImageBuffer, PbrsBuffer
from trueup.testing import convnet, images

LIKE = torch.empty(0, dtype=torch.float64)


def numbered(n: int, start: int = 0) -> Tensor:
    """Images whose only pixel is their number."""
    return torch.arange(start, start + n).double().view(-1, 1, 1, 1)


class ByTheBook:
    """CSTU with a list for each class: [number, entropy, age], as the paper tells it."""

    def __init__(self, capacity: int, classes: int) -> None:
        self.n, self.c = capacity, classes
        self.lists: list[list[list[float]]] = [[] for _ in range(classes)]

    def score(self, h: float, age: float) -> float:
        return 1 / (1 + math.exp(-age / self.n)) + h / math.log(self.c)

    def offer(self, number: int, label: int, h: float) -> None:
        if self.welcome(label, h):
            self.lists[label].append([number, h, 0])
        for each in self.lists:
            for item in each:
                item[2] += 1

    def welcome(self, label: int, h: float) -> bool:
        if len(self.lists[label]) < self.n / self.c:
            if sum(map(len, self.lists)) < self.n:
                return True
            most = max(map(len, self.lists))
            return self.evict([k for k in range(self.c) if len(self.lists[k]) == most], h)
        return self.evict([label], h)

    def evict(self, classes: list[int], h: float) -> bool:
        worst, at = -math.inf, (-1, -1)
        for k in classes:
            for i, (_, doubt, age) in enumerate(self.lists[k]):
                if self.score(doubt, age) >= worst:
                    worst, at = self.score(doubt, age), (k, i)
        if worst > self.score(h, 0):
            del self.lists[at[0]][at[1]]
            return True
        return False

    def items(self) -> list[tuple[float, ...]]:
        return sorted((number, k, h, age) for k, each in enumerate(self.lists) for number, h, age in each)


@pytest.mark.parametrize(("capacity", "classes"), [(10, 3), (9, 3), (4, 7), (64, 6)])
@pytest.mark.parametrize("seed", range(4))
def test_timely_is_as_the_book_says(capacity: int, classes: int, seed: int) -> None:
    """In batches of changing size, with classes in long runs and entropies that are often equal."""
    g = torch.Generator().manual_seed(seed)
    book, held = ByTheBook(capacity, classes), CstuBuffer(capacity, classes, LIKE)
    start = 0
    for n in [1, 5, 3, 17, 2, 30, 40, 64]:
        run = int(torch.randint(classes, (1,), generator=g))
        labels = torch.where(torch.rand(n, generator=g) < 0.5, run, torch.randint(classes, (n,), generator=g))
        entropy = (torch.rand(n, generator=g, dtype=torch.float64) * 4).round() / 4 * math.log(classes)
        held.add(numbered(n, start), labels, entropy)
        for i in range(n):
            book.offer(start + i, int(labels[i]), float(entropy[i]))
        start += n
        there = held.labels >= 0
        columns = (held.pixels.flatten(), held.labels, held.entropy, held.age)
        ours = sorted(zip(*(c[there].tolist() for c in columns), strict=True)) if held.pixels.numel() else []
        assert ours == book.items()


def test_a_full_class_gives_way_only_to_better() -> None:
    """Quota 2 of 4: the certain newcomer takes the place of the uncertain one, an uncertain one is turned away."""
    held = CstuBuffer(4, 2, LIKE)
    held.add(numbered(2), torch.tensor([0, 0]), torch.tensor([0.6, 0.1]))
    held.add(numbered(1, 2), torch.tensor([0]), torch.tensor([0.69]))
    assert sorted(held.read().flatten().tolist()) == [0, 1]
    held.add(numbered(1, 3), torch.tensor([0]), torch.tensor([0.3]))
    assert sorted(held.read().flatten().tolist()) == [1, 3]
    assert held.labels.tolist().count(-1) == 2


def test_old_images_give_way_to_new_ones_that_are_as_certain() -> None:
    held = CstuBuffer(4, 2, LIKE)
    for i in range(6):
        held.add(numbered(1, i), torch.tensor([1]), torch.tensor([0.2]))
    assert sorted(held.read().flatten().tolist()) == [4, 5]
    assert sorted(held.age[held.labels >= 0].tolist()) == [1, 2]


@pytest.mark.parametrize("add", [
    lambda held, x: held.add(x, torch.zeros(len(x), dtype=torch.int64)),
    lambda held, x: held.add(x, torch.zeros(len(x), dtype=torch.int64), torch.zeros(len(x))),
], ids=["balanced", "timely"])  # fmt: skip
def test_a_place_taken_twice_in_a_batch_holds_the_last(add: Callable, request: pytest.FixtureRequest) -> None:
    kind = PbrsBuffer if request.node.callspec.id == "balanced" else CstuBuffer
    together, apart = (kind(4, 2, LIKE) for _ in range(2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        add(together, numbered(50))
        torch.manual_seed(0)
        for i in range(50):
            add(apart, numbered(1, i))
    assert all(torch.equal(a, b) for a, b in zip(together.buffers(), apart.buffers(), strict=True))
    assert len(set(together.read().flatten().tolist())) == len(together.read())


def test_an_update_is_due_after_so_many() -> None:
    held = ImageBuffer(4, 2, LIKE)
    assert held.until_update(8) == 8
    assert not held.count_images(5, 8)
    assert held.until_update(8) == 3
    assert held.count_images(3, 8)
    assert held.until_update(8) == 8
    assert not held.count_images(1, 8)
    assert held.until_update(8) == 7
    assert held.count_images(20, 8)  # a whole batch at once


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("labels", torch.tensor([0, 5, -1, -1])),
        ("labels", torch.tensor([0, 1])),
        ("pixels", torch.zeros(4, 3)),
        ("shape", torch.tensor([-1, -1, 1])),
        ("waiting", torch.tensor([-1])),
        ("age", torch.tensor([1, -(10**9), 0, 0])),
        ("entropy", torch.tensor([torch.nan, 0, 0, 0])),
        ("seen", torch.tensor([1])),
    ],
    ids=str,
)
def test_contents_that_no_images_left_are_refused(name: str, value: Tensor) -> None:
    held: ImageBuffer = PbrsBuffer(4, 2, LIKE) if name == "seen" else CstuBuffer(4, 2, LIKE)
    held.verify()
    held.write(numbered(2), {0: 0, 1: 1})
    held.verify()
    setattr(held, name, value)
    with pytest.raises(ValueError, match="memory"):
        held.verify()


@pytest.mark.parametrize("method", [m for m in trueup.list_methods() if trueup.get_method(m).info.images])
def test_saving_images_of_users_is_said(method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter = trueup.adapt(convnet(), method)
    adapter(images(8, seed=0)[0])
    adapter.save(tmp_path / "state")
    adapter.save(tmp_path / "state")
    assert [r.message for r in caplog.records].count(
        f"a state of {method} holds images of the stream: protect it as you protect them"
    ) == 1
