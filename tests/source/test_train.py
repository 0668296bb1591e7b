"""Source training on made-up images: what is trained on what, what is kept, and that a kill changes nothing.

Each pixel of an image says which image it is, so that a network can tell what it was shown.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup.source.tasks as tasks
import trueup.source.train as training
from trueup.core import files
from trueup.data.datasets import Dataset
from trueup.data.domains import ArrayDomain, BrokenImageError, Domain, Image
from trueup.source.checkpoints import Store, digest_of_file
from trueup.source.holdout import split_holdout
from trueup.source.networks import build_network
from trueup.source.recipe import Recipe, Training
from trueup.source.train import refresh_statistics, train

CLASSES, COUNT, SIZE = 3, 30, 8
DOMAINS = ("amber", "blue")


# Networks, found by their names as a user's own are


SEEN: list[tuple[bool, Tensor]] = []  # whether in training mode, and the images, of each batch that the spy was shown


class Spy(nn.Sequential):
    """Remembers what it is shown."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append((self.training, x.clone()))
        return super().forward(x)


def layers(classes: int, between: nn.Module) -> list[nn.Module]:
    first = [nn.Conv2d(3, 6, 3, stride=2, bias=False), nn.BatchNorm2d(6), nn.ReLU(), between]
    return [*first, nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, classes)]


def net(classes: int) -> nn.Module:
    return nn.Sequential(*layers(classes, nn.Identity()))


def dropout(classes: int) -> nn.Module:
    return nn.Sequential(*layers(classes, nn.Dropout2d(0.5)))


def spy(classes: int) -> nn.Module:
    return Spy(*layers(classes, nn.Identity()))


# Images


def domain(name: str, count: int = COUNT) -> ArrayDomain:
    """Red is the number of the image, green its domain, blue its class."""
    labels = np.arange(count) % CLASSES
    rows = [(i, 100 * DOMAINS.index(name), 100 * label) for i, label in enumerate(labels)]
    images = np.tile(np.array(rows, np.uint8)[:, None, None], (1, SIZE, SIZE, 1))
    return ArrayDomain(name, images, labels.astype(np.int64))


def decode(x: Tensor) -> list[tuple[int, int, int]]:
    """Number, domain and class of each image of a batch, which was normalised to values from -1 to 1."""
    assert torch.equal(x, x[:, :, :1, :1].expand_as(x))
    values = (x[:, :, 0, 0] * 127.5 + 127.5).round().long()
    return [(i, d // 100, label // 100) for i, d, label in values.tolist()]


def dataset(open_: Callable[[str], Domain] = domain) -> Dataset:
    return Dataset("made-up", tuple("xyz"), DOMAINS, open_)


def recipe(network: str = "net", seed: int = 0, **changed: Any) -> Recipe:
    values = {
        "iterations": 8, "batch": 4, "lr": 1e-2, "augment": "none", "normalize": "half", "size": SIZE,
        "first": 2, "every": 2, "converge": 2, "tolerate": 2, "refresh": 3, **changed,
    }  # fmt: skip
    name = network if network == "digits-net" else f"{__name__}:{network}"
    return Recipe(
        dataset="made-up", sources=DOMAINS, classes=CLASSES, network=name, seed=seed, training=Training(**values)
    )


RECIPES = {
    "adam": recipe(augment="shift"),
    "weight decay": recipe(weight_decay=0.1),
    "sgd with decay": recipe(optimizer="sgd", lr=0.05, weight_decay=1e-3, decay_at=(0.3, 0.7)),
    "swad": recipe(algorithm="swad"),
    "swad, long segments": recipe(algorithm="swad", first=3, every=3, converge=1),
    "dropout": recipe("dropout"),
    "swad with dropout": recipe("dropout", algorithm="swad"),
    "digits-net": recipe("digits-net"),
}
STEPS = 8


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return files.read(path, "source")


def same(a: Path, b: Path) -> bool:
    """Weights to the bit, and the report."""
    (mine, header), (yours, other) = read(a), read(b)
    return header == other and mine.keys() == yours.keys() and all(torch.equal(t, yours[n]) for n, t in mine.items())


class Stop(BaseException):
    """Somebody pulls the plug."""


class Clock:
    """Stands still while work is done and ticks before every step: each step is saved, at no cost."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def progress(self, stop: int | None, end: Callable[[], object]) -> Callable[[int, int], None]:
        def tick(done: int, of: int) -> None:
            self.now += 1
            if done == stop:
                end()

        return tick


def stop() -> None:
    raise Stop


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(training, "time", made)
    return made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    store = Store(tmp_path_factory.mktemp("undisturbed"))
    return lambda name: train(RECIPES[name], dataset(), store)


@pytest.fixture(autouse=True)
def seen() -> Iterator[list[tuple[bool, Tensor]]]:
    SEEN.clear()
    yield SEEN
    SEEN.clear()


def start(chosen: Recipe) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(chosen.seed)
        return build_network(chosen.network, chosen.classes, size=SIZE)


# The finished file


@pytest.mark.parametrize("name", RECIPES)
def test_a_finished_file_holds_the_recipe_and_the_report_and_loads(name: str, tmp_path: Path) -> None:
    store, chosen = Store(tmp_path), RECIPES[name]
    path = train(chosen, dataset(), store)
    assert path == store.path(chosen)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    tensors, header = read(path)
    model, report = store.load(chosen)
    assert header == {"recipe": chosen.model_dump(mode="json"), "report": report}
    assert all(torch.equal(t, tensors[n]) for n, t in model.state_dict().items())
    assert not model.training
    assert report["broken"] == []
    assert all(set(entry) == {"iteration", "accuracy", "loss"} for entry in report["history"])


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_recipe_gives_the_same_weights(name: str, undisturbed: Callable[[str], Path], tmp_path: Path) -> None:
    torch.manual_seed(99)
    assert same(undisturbed(name), train(RECIPES[name], dataset(), Store(tmp_path), threads=1, keep_every=0))


def test_another_seed_gives_other_weights_and_other_images(tmp_path: Path) -> None:
    for seed in (0, 1):
        train(recipe("spy", seed), dataset(), Store(tmp_path))
    half = len(SEEN) // 2
    assert decode(SEEN[0][1]) != decode(SEEN[half][1])
    a, b = (read(Store(tmp_path).path(recipe("spy", seed)))[0] for seed in (0, 1))
    assert not torch.equal(a["0.weight"], b["0.weight"])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_trains_under_any_gradient_mode(
    mode: Callable[[], Any], undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    with mode():
        assert same(undisturbed("adam"), train(RECIPES["adam"], dataset(), Store(tmp_path)))


def test_the_random_state_of_the_user_is_untouched(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    train(RECIPES["dropout"], dataset(), Store(tmp_path))
    assert torch.equal(torch.random.get_rng_state(), before)
    with pytest.raises(Stop):
        train(recipe("dropout", seed=1), dataset(), Store(tmp_path), progress=lambda done, of: done < 3 or stop())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_finished_model_is_not_trained_again(tmp_path: Path) -> None:
    def refuse(name: str) -> Domain:
        raise AssertionError(name)

    path = train(RECIPES["adam"], dataset(), Store(tmp_path))
    when = path.stat().st_mtime_ns
    assert train(RECIPES["adam"], dataset(refuse), Store(tmp_path)) == path
    assert path.stat().st_mtime_ns == when


def test_no_iterations_keep_the_weights_as_they_are(tmp_path: Path) -> None:
    def refuse(name: str) -> Domain:
        raise AssertionError(name)

    chosen = recipe(iterations=0)
    tensors, header = read(train(chosen, dataset(refuse), Store(tmp_path)))
    assert all(torch.equal(t, tensors[n]) for n, t in start(chosen).state_dict().items())
    assert header["report"] == {"history": [], "kept": {}, "broken": []}


def test_no_iterations_of_swad_have_nothing_to_tell_either(tmp_path: Path) -> None:
    """What was kept has an accuracy, or is empty."""
    _, header = read(train(recipe(iterations=0, algorithm="swad"), dataset(), Store(tmp_path)))
    assert header["report"] == {"history": [], "kept": {}, "broken": []}


def test_weights_from_a_file_are_where_training_starts(tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = net(CLASSES)
    torch.save(model.state_dict(), tmp_path / "x.pt")
    chosen = recipe(iterations=0).model_copy(update={"weights": digest_of_file(tmp_path / "x.pt")})
    tensors, _ = read(train(chosen, dataset(), Store(tmp_path), weights=str(tmp_path / "x.pt")))
    assert all(torch.equal(t, tensors[n]) for n, t in model.state_dict().items())


def test_weights_that_are_not_the_recipes_are_refused(tmp_path: Path) -> None:
    """Otherwise the checkpoint's name and recipe would speak of other weights than it was made from."""
    torch.save(net(CLASSES).state_dict(), tmp_path / "x.pt")
    chosen = recipe(iterations=0).model_copy(update={"weights": "sha256:0123456789abcdef"})
    with pytest.raises(ValueError, match=r"x\.pt"):
        train(chosen, dataset(), Store(tmp_path), weights=str(tmp_path / "x.pt"))


# Kills


@pytest.mark.parametrize("at", [1, 3, 6, STEPS])
@pytest.mark.parametrize("name", RECIPES)
def test_a_training_that_was_stopped_ends_as_an_undisturbed_one(
    name: str, at: int, undisturbed: Callable[[str], Path], clock: Clock, tmp_path: Path
) -> None:
    store, chosen = Store(tmp_path), RECIPES[name]
    with pytest.raises(Stop):
        train(chosen, dataset(), store, keep_every=0, progress=clock.progress(at, stop))
    assert read(store.partial(chosen))[1]["done"] == at
    assert not store.has(chosen)
    begun: list[int] = []
    train(chosen, dataset(), store, progress=lambda done, of: begun.append(done))
    assert begun == list(range(at, STEPS + 1))
    assert same(store.path(chosen), undisturbed(name))
    assert not store.partial(chosen).exists()


@pytest.mark.parametrize("name", ["adam", "swad"])
def test_a_training_that_is_stopped_after_every_step_comes_to_the_same_end(
    name: str, undisturbed: Callable[[str], Path], clock: Clock, tmp_path: Path
) -> None:
    for at in range(1, STEPS + 1):
        with pytest.raises(Stop):
            train(RECIPES[name], dataset(), Store(tmp_path), keep_every=0, progress=clock.progress(at, stop))
    assert same(train(RECIPES[name], dataset(), Store(tmp_path)), undisturbed(name))


def test_swad_that_ends_early_goes_on_to_the_same_end(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses 1, 4, 16: the threshold is 1.3 × 2.5, the last two are above it, and the first segment is the end."""
    rising = lambda run, threads: (0.5, float(4 ** len(run.history)))  # noqa: E731
    monkeypatch.setattr(training._Run, "scores", rising)
    chosen = recipe(algorithm="swad", iterations=20)
    whole = train(chosen, dataset(), Store(tmp_path / "a"))
    kept = read(whole)[1]["report"]["kept"]
    assert (kept["start"], kept["end"], kept["segments"], kept["iteration"]) == (0, 0, 3, 6)
    with pytest.raises(Stop):
        train(chosen, dataset(), Store(tmp_path / "b"), keep_every=0, progress=clock.progress(5, stop))
    assert same(train(chosen, dataset(), Store(tmp_path / "b")), whole)


KILLED = ("adam", "sgd with decay", "swad", "swad with dropout")


def be_killed(folder: str) -> None:
    """In a process of its own: begin each training in a child that dies in its fifth step, or while it saves."""
    torch.set_num_threads(1)
    torch.optim.Adam([torch.ones(1)])  # imports half of torch, which each child would do anew
    for name in KILLED:
        for when in ("step", "save"):
            if not (child := os.fork()):
                _die(name, when, Store(Path(folder) / when))
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), status
            assert os.WTERMSIG(status) == signal.SIGKILL


def _die(name: str, when: str, store: Store) -> None:
    clock = Clock()
    training.time = clock  # type: ignore[assignment]

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def begin_to_kill() -> None:
        os.fsync = kill  # the new file is written, and not yet in place

    end = kill if when == "step" else begin_to_kill
    train(RECIPES[name], dataset(), store, keep_every=0, progress=clock.progress(5, end))
    os._exit(1)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        [sys.executable, "-c", f"import {__name__} as t; t.be_killed({str(folder)!r})"],
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("when", ["step", "save"])
@pytest.mark.parametrize("name", KILLED)
def test_kill_minus_nine_changes_nothing(
    name: str, when: str, killed: Path, undisturbed: Callable[[str], Path]
) -> None:
    store = Store(killed / when)
    assert not store.has(RECIPES[name])
    assert read(store.partial(RECIPES[name]))[1]["done"] == 5
    assert same(train(RECIPES[name], dataset(), store), undisturbed(name))
    assert not store.partial(RECIPES[name]).exists()


# Unfinished files


@pytest.fixture
def unfinished(clock: Clock, tmp_path: Path) -> Path:
    store = Store(tmp_path)
    with pytest.raises(Stop):
        train(RECIPES["adam"], dataset(), store, keep_every=0, progress=clock.progress(5, stop))
    return store.partial(RECIPES["adam"])


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:1000], lambda b: b[:-1] + bytes([b[-1] ^ 1])])
def test_a_damaged_unfinished_file_is_named_and_training_starts_anew(
    damage: Callable[[bytes], bytes],
    unfinished: Path,
    undisturbed: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    unfinished.write_bytes(damage(unfinished.read_bytes()))
    begun: list[int] = []
    with caplog.at_level(logging.WARNING, "trueup"):
        path = train(RECIPES["adam"], dataset(), Store(unfinished.parent), progress=lambda done, of: begun.append(done))
    assert begun[0] == 0
    assert re.search(rf"training starts anew: .*{re.escape(unfinished.name)}", caplog.text)
    assert same(path, undisturbed("adam"))
    assert not unfinished.exists()


def test_the_unfinished_file_of_another_recipe_is_not_gone_on_with(unfinished: Path, tmp_path: Path) -> None:
    """A file that was renamed fits in every shape, and would give weights that its recipe does not."""
    other = recipe(seed=3, augment="shift")
    whole = train(other, dataset(), Store(tmp_path / "elsewhere"))
    unfinished.rename(Store(tmp_path).partial(other))
    assert same(train(other, dataset(), Store(tmp_path)), whole)


def test_a_network_that_has_changed_since_starts_anew(
    unfinished: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "net", spy)
    monkeypatch.setattr(sys.modules[__name__], "layers", lambda n, _: [nn.Flatten(), nn.Linear(3 * SIZE * SIZE, n)])
    with caplog.at_level(logging.WARNING, "trueup"):
        tensors, _ = read(train(RECIPES["adam"], dataset(), Store(unfinished.parent)))
    assert set(tensors) == {"1.weight", "1.bias"}
    assert unfinished.name in caplog.text


def test_an_unfinished_file_beside_a_finished_one_is_removed(unfinished: Path) -> None:
    """It stays behind when the kill comes between the two, and is several times as large as the model."""
    blob = unfinished.read_bytes()
    train(RECIPES["adam"], dataset(), Store(unfinished.parent))
    unfinished.write_bytes(blob)
    train(RECIPES["adam"], dataset(), Store(unfinished.parent))
    assert not unfinished.exists()


def test_nothing_is_saved_before_its_time(clock: Clock, tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(Stop):
        train(RECIPES["adam"], dataset(), store, keep_every=3, progress=clock.progress(3, stop))
    assert not store.partial(RECIPES["adam"]).exists()
    with pytest.raises(Stop):
        train(RECIPES["adam"], dataset(), store, keep_every=3, progress=clock.progress(6, stop))
    assert read(store.partial(RECIPES["adam"]))[1]["done"] == 4


# Batches


def steps_of(seen: list[tuple[bool, Tensor]]) -> list[list[tuple[int, int, int]]]:
    return [decode(x) for training_mode, x in seen if training_mode]


def test_every_batch_has_as_many_images_of_each_domain_from_the_training_part_alone(
    seen: list[tuple[bool, Tensor]], tmp_path: Path
) -> None:
    train(recipe("spy", iterations=20, batch=5), dataset(), Store(tmp_path))
    parts = [split_holdout(domain(name), 0.2, 0)[0].tolist() for name in DOMAINS]
    drawn: list[set[int]] = [set(), set()]
    assert len(steps_of(seen)) == 20
    for batch in steps_of(seen):
        assert [d for _, d, _ in batch] == [0] * 5 + [1] * 5
        for i, d, label in batch:
            assert i in parts[d]
            assert label == i % CLASSES
            drawn[d].add(i)
    assert drawn == [set(p) for p in parts]  # 100 draws of 24: all are met, with these seeds


def test_validation_sees_every_held_out_image_once_and_nothing_else(
    seen: list[tuple[bool, Tensor]], tmp_path: Path
) -> None:
    train(recipe("spy", iterations=1), dataset(), Store(tmp_path))
    held = [split_holdout(domain(name), 0.2, 0)[1].tolist() for name in DOMAINS]
    shown = [decode(x) for training_mode, x in seen if not training_mode]
    assert [[i for i, _, _ in batch] for batch in shown] == held
    assert [{d for _, d, _ in batch} for batch in shown] == [{0}, {1}]


def test_accuracy_and_loss_are_means_over_domains(tmp_path: Path) -> None:
    """Domains of different sizes weigh the same."""
    sizes = {"amber": 30, "blue": 60}
    data = dataset(lambda name: domain(name, sizes[name]))
    chosen = recipe(iterations=1)
    train(chosen, data, Store(tmp_path))
    model, report = Store(tmp_path).load(chosen)
    accuracies, losses = [], []
    for name in DOMAINS:
        _, held = split_holdout(data.domain(name), 0.2, 0)
        images = torch.from_numpy(data.domain(name).images[held]).permute(0, 3, 1, 2)
        with torch.no_grad():
            logits = model(images / 127.5 - 1)
        y = torch.from_numpy(data.domain(name).labels[held])
        accuracies.append(float((logits.argmax(dim=1) == y).float().mean()))
        losses.append(float(F.cross_entropy(logits, y)))
    assert report["history"][0]["accuracy"] == pytest.approx(np.mean(accuracies))
    assert report["history"][0]["loss"] == pytest.approx(np.mean(losses), rel=1e-4)


def test_batches_come_in_order_though_threads_read_them(seen: list[tuple[bool, Tensor]], tmp_path: Path) -> None:
    class Slow(ArrayDomain):
        def image(self, i: int, size: int | None = None) -> Image:
            if size is None and i % 3 == 0:
                time.sleep(0.003)
            return super().image(i, size)

    def slow(name: str) -> Domain:
        base = domain(name)
        return Slow(name, base.images, base.labels)

    train(recipe("spy"), dataset(), Store(tmp_path / "a"), threads=1)
    plain = steps_of(seen)
    seen.clear()
    train(recipe("spy"), dataset(slow), Store(tmp_path / "b"), threads=4)
    assert steps_of(seen) == plain


def test_augmentation_is_for_training_alone_and_differs_each_time(
    seen: list[tuple[bool, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noise(image: Image, size: int, rng: np.random.Generator) -> Image:
        return rng.integers(256, size=(size, size, 3), dtype=np.uint8)

    monkeypatch.setitem(tasks.TRANSFORMS, "shift", noise)
    train(recipe("spy", augment="shift"), dataset(), Store(tmp_path))
    trained = torch.cat([x for training_mode, x in seen if training_mode])
    assert len(trained.flatten(1).unique(dim=0)) == len(trained) == 8 * 8
    for training_mode, x in seen:
        if not training_mode:
            decode(x)  # plain colours


# Steps


@pytest.mark.parametrize("changed", [{}, {"optimizer": "sgd", "weight_decay": 0.1, "decay_at": (0.25, 0.5)}])
def test_training_is_what_plain_torch_does_with_the_same_batches(
    changed: dict[str, Any], seen: list[tuple[bool, Tensor]], tmp_path: Path
) -> None:
    chosen = recipe("spy", first=8, **changed)
    model = start(chosen)
    tensors, _ = read(train(chosen, dataset(), Store(tmp_path)))
    if changed:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1, fused=False
        )
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=False)
    for i, x in enumerate([x for training_mode, x in list(seen) if training_mode]):
        if changed:
            optimizer.param_groups[0]["lr"] = 1e-2 if i < 2 else 1e-3 if i < 4 else 1e-4
        y = torch.tensor([label for _, _, label in decode(x)])
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(tensors[name].float(), tensor.float(), atol=2e-4), name


@pytest.mark.parametrize(
    ("decay_at", "rates"),
    [
        ((), [1] * 10),
        ((0.5,), [1] * 5 + [0.1] * 5),
        ((0.7, 0.9), [1] * 7 + [0.1] * 2 + [0.01]),
        ((0.25,), [1] * 3 + [0.1] * 7),
    ],
)
def test_the_rate_is_divided_by_ten_after_the_given_parts(
    decay_at: tuple[float, ...], rates: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[float] = []
    step = training._Run.step

    def spied(run: Any, i: int, x: Tensor, y: Tensor) -> None:
        step(run, i, x, y)
        used.append(run.optimizer.param_groups[0]["lr"])

    monkeypatch.setattr(training._Run, "step", spied)
    train(recipe(iterations=10, lr=0.5, optimizer="sgd", decay_at=decay_at), dataset(), Store(tmp_path))
    assert used == pytest.approx([0.5 * rate for rate in rates])


@pytest.mark.parametrize(
    ("iterations", "first", "every", "at"),
    [(10, 3, 3, [3, 6, 9, 10]), (9, 3, 3, [3, 6, 9]), (5, 2, 9, [2, 5]), (4, 100, 300, [4]), (3, 1, 1, [1, 2, 3])],
)
def test_validation_is_at_the_first_then_every_so_often_and_at_the_end(
    iterations: int, first: int, every: int, at: list[int], tmp_path: Path
) -> None:
    _, header = read(train(recipe(iterations=iterations, first=first, every=every), dataset(), Store(tmp_path)))
    assert [entry["iteration"] for entry in header["report"]["history"]] == at


@pytest.fixture
def warn_always() -> Iterator[None]:
    """Torch gives each of its warnings once in a process, unless it is told otherwise."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.usefixtures("warn_always")
def test_a_loss_that_is_not_finite_is_named_with_the_way_out(tmp_path: Path) -> None:
    chosen = recipe(lr=1e30)
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) at iteration \d; lower lr=1e\+30"):
        train(chosen, dataset(), Store(tmp_path))
    assert not Store(tmp_path).has(chosen)


@pytest.mark.parametrize("algorithm", ["erm", "swad"])
def test_a_loss_that_is_not_finite_on_held_out_images_is_an_error_too(algorithm: str, tmp_path: Path) -> None:
    """The last step can ruin the weights without any training loss that shows it."""
    chosen = recipe(iterations=1, lr=1e38, algorithm=algorithm)
    with pytest.raises(ValueError, match="lower lr"):
        train(chosen, dataset(), Store(tmp_path))
    assert not Store(tmp_path).has(chosen)


# What is kept


@pytest.mark.parametrize(
    ("accuracies", "best"),
    [([0.1, 0.5, 0.3, 0.2], 4), ([0.5, 0.5, 0.5, 0.5], 2), ([0.1, 0.2, 0.3, 0.4], 8), ([0.0, 0.0, 0.0, 0.0], 2)],
)
def test_the_first_of_the_best_on_held_out_images_is_kept(
    accuracies: list[float], best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: dict[int, dict[str, Tensor]] = {}

    def scores(run: Any, threads: int) -> tuple[float, float]:
        states[run.done] = {name: t.clone() for name, t in run.model.state_dict().items()}
        return accuracies[len(run.history)], 1.0

    monkeypatch.setattr(training._Run, "scores", scores)
    tensors, header = read(train(recipe(), dataset(), Store(tmp_path)))
    assert list(states) == [2, 4, 6, 8]
    assert header["report"]["kept"] == {"accuracy": max(accuracies), "iteration": best}
    assert all(torch.equal(t, tensors[n]) for n, t in states[best].items())


def test_swad_averages_parameters_and_takes_statistics_from_fresh_batches(
    seen: list[tuple[bool, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses 3, 1, 1.5, 9 with converge 2: the start is the second segment, and the average goes to the last."""
    losses, weights = iter([3.0, 1.0, 1.5, 9.0, 0.0]), []
    monkeypatch.setattr(training._Run, "scores", lambda run, threads: (0.5, next(losses)))
    step = training._Run.step

    def spied(run: Any, i: int, x: Tensor, y: Tensor) -> None:
        step(run, i, x, y)
        weights.append({name: p.detach().clone() for name, p in run.model.named_parameters()})

    monkeypatch.setattr(training._Run, "step", spied)
    chosen = recipe("spy", algorithm="swad", converge=2, tolerate=2, tolerance=0.3)
    tensors, header = read(train(chosen, dataset(), Store(tmp_path)))
    kept = header["report"]["kept"]
    assert (kept["start"], kept["end"], kept["segments"], kept["iteration"]) == (1, None, 4, 8)
    for name in weights[0]:
        assert torch.allclose(tensors[name], torch.stack([w[name] for w in weights[2:]]).mean(dim=0), atol=1e-6), name
    fresh = [x for training_mode, x in list(seen) if training_mode][8:]
    assert len(fresh) == 3
    assert not any(batch in steps_of(seen)[:8] for batch in map(decode, fresh))
    maps = [F.conv2d(x, tensors["0.weight"], stride=2) for x in fresh]
    assert torch.allclose(
        tensors["1.running_mean"], torch.stack([m.mean(dim=(0, 2, 3)) for m in maps]).mean(dim=0), atol=1e-5
    )
    variance = torch.stack([m.transpose(0, 1).flatten(1).var(dim=1) for m in maps]).mean(dim=0)
    assert torch.allclose(tensors["1.running_var"], variance, atol=1e-5)
    assert tensors["1.num_batches_tracked"] == 3


def test_swad_without_a_refresh_keeps_the_statistics_of_training(tmp_path: Path) -> None:
    """Zero batches must not leave means of 0 and variances of 1, which no batch ever had."""
    tensors, _ = read(train(recipe(algorithm="swad", refresh=0), dataset(), Store(tmp_path)))
    assert tensors["1.num_batches_tracked"] == 8
    assert tensors["1.running_mean"].abs().max() > 0


def test_refreshed_statistics_by_hand() -> None:
    """Means over batches: of means 2 and 6; of unbiased variances 2 and 8."""
    layer = nn.BatchNorm1d(1, momentum=0.3)
    layer.running_mean.fill_(100.0)
    model = nn.Sequential(layer)
    refresh_statistics(model, iter([torch.tensor([[1.0], [3.0]]), torch.tensor([[4.0], [8.0]])]))
    assert layer.running_mean.item() == pytest.approx(4.0)
    assert layer.running_var.item() == pytest.approx(5.0)
    assert layer.num_batches_tracked.item() == 2
    assert layer.momentum == 0.3
    assert (layer.weight.item(), layer.bias.item()) == (1.0, 0.0)


def test_a_network_without_batchnorm_reads_no_batch_for_it() -> None:
    def never() -> Iterator[Tensor]:
        raise AssertionError
        yield

    refresh_statistics(nn.Linear(2, 2), never())


# Broken images


class Damaged(ArrayDomain):
    """Some of its images cannot be read."""

    broken: frozenset[int] = frozenset()

    def image(self, i: int, size: int | None = None) -> Image:
        if i in self.broken:
            raise BrokenImageError("not an image")
        return super().image(i, size)


def damaged(**broken: set[int]) -> Dataset:
    def open_(name: str) -> Domain:
        base = domain(name)
        made = Damaged(name, base.images, base.labels)
        made.broken = frozenset(broken.get(name, ()))
        return made

    return dataset(open_)


def test_a_broken_image_is_left_out_and_named(
    seen: list[tuple[bool, Tensor]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trains, _ = split_holdout(domain("blue"), 0.2, 0)
    bad = int(trains[0])
    with caplog.at_level(logging.WARNING, "trueup"):
        _, header = read(train(recipe("spy", batch=16), damaged(blue={bad}), Store(tmp_path)))
    assert header["report"]["broken"] == [f"blue[{bad}]"]
    assert f"left out, cannot be read: blue[{bad}] (not an image)" in caplog.text
    batches = steps_of(seen)
    assert (bad, 1, bad % CLASSES) not in {image for batch in batches for image in batch}
    assert min(len(batch) for batch in batches) < 32
    assert len(batches) == 8


def test_a_broken_image_that_is_held_out_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, held = split_holdout(domain("amber"), 0.2, 0)
    bad = int(held[0])
    with caplog.at_level(logging.WARNING, "trueup"):
        _, header = read(train(recipe(), damaged(amber={bad}), Store(tmp_path)))
    assert header["report"]["broken"] == [f"amber[{bad}]"]
    assert caplog.text.count(f"amber[{bad}]") == 1


def test_broken_images_are_named_though_training_was_stopped(clock: Clock, tmp_path: Path) -> None:
    chosen, data = recipe(iterations=30, batch=2), damaged(blue={1, 2, 3, 5, 7}, amber={0, 4})
    whole = train(chosen, data, Store(tmp_path / "a"))
    with pytest.raises(Stop):
        train(chosen, data, Store(tmp_path / "b"), keep_every=0, progress=clock.progress(20, stop))
    assert same(train(chosen, data, Store(tmp_path / "b")), whole)


def test_training_without_a_single_readable_image_is_an_error(tmp_path: Path) -> None:
    """Otherwise the network is kept as it started, as if it had been trained."""
    everything = set(range(COUNT))
    with pytest.raises(ValueError, match="read"):
        train(recipe(), damaged(amber=everything, blue=everything), Store(tmp_path))
    assert not Store(tmp_path).has(recipe())


def test_a_batch_without_a_readable_image_does_not_move_the_validations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = training._Run.draw

    def drawn(run: Any, i: int) -> Iterator[tuple[int, list[int], int]]:
        for d, indices, step in draw(run, i):
            yield d, [0] * len(indices) if i in (3, 7) else [j for j in indices if j] or [1], step

    monkeypatch.setattr(training._Run, "draw", drawn)
    _, header = read(train(recipe(), damaged(amber={0}, blue={0}), Store(tmp_path)))
    assert [entry["iteration"] for entry in header["report"]["history"]] == [2, 4, 6, 8]


def test_a_domain_of_which_nothing_is_held_out_does_not_count_as_all_wrong(tmp_path: Path) -> None:
    """Two images of each class: a fifth of them is none. Accuracy and loss are those of the other domain."""
    sizes = {"amber": 30, "blue": 6}
    assert len(split_holdout(domain("blue", 6), 0.2, 0)[1]) == 0
    chosen = recipe(iterations=1)
    train(chosen, dataset(lambda name: domain(name, sizes[name])), Store(tmp_path))
    model, report = Store(tmp_path).load(chosen)
    amber = domain("amber")
    _, held = split_holdout(amber, 0.2, 0)
    with torch.no_grad():
        logits = model(torch.from_numpy(amber.images[held]).permute(0, 3, 1, 2) / 127.5 - 1)
    loss = F.cross_entropy(logits, torch.from_numpy(amber.labels[held]))
    assert report["history"][0]["loss"] == pytest.approx(float(loss), rel=1e-4)


def test_the_split_of_a_fixed_domain_never_changes() -> None:
    """If it does, models out there have been trained on what is now held out."""
    assert split_holdout(domain("amber"), 0.2, 0)[1].tolist() == [7, 14, 19, 21, 24, 29]
