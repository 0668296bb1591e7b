"""A batch happens whole or not at all, wherever it is interrupted; threads take turns."""

import copy
import linecache
import pickle
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trueup
from trueup.testing import convnet
from trueup.testing.case import Case, difference

SOURCE = str(Path(trueup.__file__).parent)


class Interrupt:
    """Raises KeyboardInterrupt at the given lines of trueup's code, counted from the start; or only counts them."""

    def __init__(self, *at: int) -> None:
        self.at, self.lines = at, 0

    def __enter__(self) -> "Interrupt":
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        return self._line if frame.f_code.co_filename.startswith(SOURCE) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        # Tracing can raise between the end of a `with` block and the release of its lock; a signal cannot.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and "with _GENERATORS" not in line and "with self._lock" not in line:
            self.lines += 1
            if self.lines in self.at:
                raise KeyboardInterrupt
        return self._line


def case_of(name: str, **hyper: Any) -> Case:
    return Case(trueup.get_method(name), hyper)


CASES = [
    ("tsd", {"per_class": 3}, {}),
    ("tsd", {"per_class": 3}, {"guard": True}),
    ("t3a", {"per_class": 3}, {}),
    ("sar", {}, {}),
    ("cotta", {"views": 2}, {}),
    ("rotta", {"every": 10, "capacity": 8}, {}),
    ("note", {"every": 10, "capacity": 8}, {"guard": True}),
    ("memo", {"views": 2}, {}),
    ("adacontrast", {"capacity": 16}, {}),
    ("tast", {}, {}),
    ("tent", {"norm": "ema"}, {}),
    ("shot-im", {"norm": "robust"}, {"guard": True}),
]


@pytest.mark.parametrize(
    ("name", "hyper", "more"), CASES, ids=[f"{n}-{'guard' if m else 'plain'}" for n, _, m in CASES]
)
def test_an_interrupt_at_any_line_leaves_the_state_before_or_after(name: str, hyper: dict, more: dict) -> None:
    """Brute force: the same batch is interrupted at many lines, one after another."""
    case = case_of(name, **hyper)
    few = 6 if name == "memo" else 24
    warm, x, following = case.stream(1, size=few) + case.stream(2, size=few, seed=1)
    adapter = case.adapter(**more)
    adapter(warm)
    before = copy.deepcopy(adapter)
    done = copy.deepcopy(adapter)
    with Interrupt() as counted:
        answer = done(x)
    then = copy.deepcopy(done)(following)
    hooks = count_hooks(adapter)
    for at in {*range(1, counted.lines, max(1, counted.lines // 60)), counted.lines - 1}:
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            adapter(x)
        assert count_hooks(adapter) == hooks, at
        if difference(done, adapter) == []:  # interrupted when all was done
            adapter = copy.deepcopy(before)
        assert difference(before, adapter) == [], at
    assert torch.equal(adapter(x), answer)
    assert torch.equal(adapter(following), then)


def count_hooks(adapter: trueup.Adapter) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + ("forward" in vars(m)) for m in adapter.modules())


def test_a_second_interrupt_while_going_back_does_no_harm() -> None:
    case = case_of("tsd", per_class=3)
    xs = case.stream(2)
    adapter = case.adapter()
    adapter(xs[0])
    before = copy.deepcopy(adapter)
    twin = copy.deepcopy(adapter)
    with Interrupt() as counted:
        twin(xs[1])
    late = 3 * counted.lines // 4
    for more in range(2, 60):
        with pytest.raises(KeyboardInterrupt), Interrupt(late, late + more):
            adapter(xs[1])
        assert difference(before, adapter) == [], more


HOOKS = ("forward", "observe", "loss", "after", "predict", "rows")


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("late", [False, True], ids=["at once", "when it is done"])
@pytest.mark.parametrize("name", ["tsd", "rotta"])
def test_an_error_in_any_hook_is_undone(name: str, hook: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(name)
    xs = case.stream(3)
    adapter = case.adapter()
    adapter(xs[0])
    before, kind = copy.deepcopy(adapter), type(adapter.method)
    right = getattr(kind, hook)

    def wrong(self: Any, *args: Any) -> Any:
        if late:
            right(self, *args)
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(kind, hook, wrong)
        with pytest.raises(MemoryError):
            adapter(xs[1])
    assert difference(before, adapter) == []
    assert torch.equal(adapter(xs[1]), before(xs[1]))


def test_a_step_that_fails_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("tsd")
    xs = case.stream(3)
    adapter = case.adapter()
    adapter(xs[0])
    before, step = copy.deepcopy(adapter), torch.optim.Adam.step

    def broken(self: torch.optim.Adam) -> None:
        step(self)
        raise RuntimeError("the driver is gone")

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", broken)
        with pytest.raises(RuntimeError, match="the driver"):
            adapter(xs[1])
    assert difference(before, adapter) == []
    assert torch.equal(adapter(xs[1]), before(xs[1]))


def test_the_first_batch_can_fail_too(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("tsd")
    x, fresh, adapter = case.stream(1)[0], case.adapter(), case.adapter()
    with monkeypatch.context() as patch:
        patch.setattr(type(adapter.method), "predict", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            adapter(x)
    assert torch.equal(adapter(x), fresh(x))
    assert difference(fresh, adapter) == []


def test_nothing_is_kept_between_batches() -> None:
    case = case_of("tsd")
    adapter = case.adapter()
    adapter(case.stream(1)[0])
    assert adapter.undo is None
    assert adapter.state.journal is None


class Slow(nn.Module):
    """Lets other threads run in the middle of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.inside = convnet(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.inside += 1
        assert self.inside == 1, "two threads are in one adapter"
        threading.Event().wait(0.0005)
        out: Tensor = self.inner(x)
        self.inside -= 1
        return out


def test_threads_take_turns_and_nothing_is_lost() -> None:
    """Eight threads, four batches each: played again one after another in the order they came, all answers agree."""
    case = case_of("tsd", per_class=5)
    xs = case.stream(32, size=8)
    adapter = trueup.adapt(Slow(), "tsd", per_class=5, head="inner.head", example=xs[0])
    alone = trueup.adapt(convnet(), "tsd", per_class=5, example=xs[0])
    answers: dict[int, Tensor] = {}
    order: list[int] = []
    start = threading.Barrier(8)

    def work(first: int) -> None:
        start.wait()
        for i in range(first, 32, 8):
            with adapter.lock.held:  # to learn the order; the adapter takes the same lock again
                answers[i] = adapter(xs[i])
                order.append(i)

    in_threads({k: partial(work, k) for k in range(8)})
    assert sorted(order) == list(range(32))
    for i in order:
        assert torch.equal(answers[i], alone(xs[i])), i
    assert adapter.batches == adapter.updates == 32


def test_every_answer_is_one_that_some_order_gives() -> None:
    """Without a look at the order: two threads, one batch each, both orders are worked out."""
    jobs = dict(zip("ab", case_of("tsd").stream(2, size=8), strict=True))
    orders = []
    for names in ("ab", "ba"):
        alone = trueup.adapt(convnet(), "tsd", example=jobs["a"])
        orders.append({name: alone(jobs[name]) for name in names})
    for _ in range(5):
        adapter = trueup.adapt(Slow(), "tsd", head="inner.head", example=jobs["a"])
        found = in_threads({name: partial(adapter, x) for name, x in jobs.items()})
        assert any(all(torch.equal(found[name], order[name]) for name in jobs) for order in orders)


def test_adapters_in_two_threads_keep_their_own_random_streams() -> None:
    """CoTTA draws views and weights; torch's generator is one for all threads."""
    xs = case_of("cotta").stream(6, size=8)

    def play(seed: int) -> list[Tensor]:
        adapter = trueup.adapt(convnet(), "cotta", views=2, seed=seed, confidence=1.0)
        return [adapter(x) for x in xs]

    expected = [play(0), play(1)]
    state = torch.get_rng_state()
    found = in_threads({k: partial(play, k) for k in (0, 1)})
    for k in (0, 1):
        assert all(torch.equal(p, q) for p, q in zip(expected[k], found[k], strict=True))
    assert torch.equal(state, torch.get_rng_state())


def in_threads(jobs: dict[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """What each job returns, all run at the same time."""
    found: dict[Any, Any] = {}
    threads = [threading.Thread(target=lambda k=k, job=job: found.update({k: job()})) for k, job in jobs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("name", ["tent", "tsd", "t3a", "note", "cotta"])
def test_an_interrupted_first_batch_leaves_an_adapter_that_works(name: str) -> None:
    hyper = {"views": 2} if name == "cotta" else {}
    case = case_of(name, **hyper)
    (x,) = case.stream(1, size=8)
    fresh = case.adapter()
    with Interrupt() as counted:
        expected = fresh(x)
    for at in range(1, counted.lines, max(1, counted.lines // 40)):
        adapter = case.adapter()
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            adapter(x)
        if adapter.batches == 0:
            assert torch.equal(adapter(x), expected), at
            assert adapter.updates == fresh.updates, at


def test_copies_and_pickles_while_another_thread_adapts() -> None:
    """No copy holds hooks of a step, and each is one that some number of batches gives."""
    (x,) = case_of("tent").stream(1, size=8)
    adapter = trueup.adapt(convnet(), "tent", example=x)
    reference, answers = trueup.adapt(convnet(), "tent", example=x), []
    for _ in range(61):
        answers.append(copy.deepcopy(reference)(x))
        reference(x)
    thread = threading.Thread(target=lambda: [adapter(x) for _ in range(60)])
    thread.start()
    copies = []
    for _ in range(15):
        copies += [copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))]
    thread.join()
    for twin in copies:
        assert count_hooks(twin) == 0
        seen = twin.batches
        assert torch.equal(twin(x), answers[seen])
