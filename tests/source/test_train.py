"""Source training on made-up images: the finished file, batches, steps and the weights that are kept."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_training import (
    CLASSES,
    DOMAINS,
    RECIPES,
    SEEN,
    Stop,
    dataset,
    decode,
    domain,
    net,
    read,
    recipe,
    same,
    start,
    steps_of,
    stop,
)

import trueup.source.tasks as tasks
import trueup.source.train as training
from trueup.data.domains import ArrayDomain, Domain, Image
from trueup.source.checkpoints import Store, digest_of_file
from trueup.source.tasks import split_holdout
from trueup.source.train import train

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


# Batches


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
    step = training._TrainingRun.step

    def spied(run: Any, i: int, x: Tensor, y: Tensor) -> None:
        step(run, i, x, y)
        used.append(run.optimizer.param_groups[0]["lr"])

    monkeypatch.setattr(training._TrainingRun, "step", spied)
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

    monkeypatch.setattr(training._TrainingRun, "scores", scores)
    tensors, header = read(train(recipe(), dataset(), Store(tmp_path)))
    assert list(states) == [2, 4, 6, 8]
    assert header["report"]["kept"] == {"accuracy": max(accuracies), "iteration": best}
    assert all(torch.equal(t, tensors[n]) for n, t in states[best].items())


def test_swad_averages_parameters_and_takes_statistics_from_fresh_batches(
    seen: list[tuple[bool, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses 3, 1, 1.5, 9 with converge 2: the start is the second segment, and the average goes to the last."""
    losses, weights = iter([3.0, 1.0, 1.5, 9.0, 0.0]), []
    monkeypatch.setattr(training._TrainingRun, "scores", lambda run, threads: (0.5, next(losses)))
    step = training._TrainingRun.step

    def spied(run: Any, i: int, x: Tensor, y: Tensor) -> None:
        step(run, i, x, y)
        weights.append({name: p.detach().clone() for name, p in run.model.named_parameters()})

    monkeypatch.setattr(training._TrainingRun, "step", spied)
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
    training.update_bn(iter([torch.tensor([[1.0], [3.0]]), torch.tensor([[4.0], [8.0]])]), model)
    assert layer.running_mean.item() == pytest.approx(4.0)
    assert layer.running_var.item() == pytest.approx(5.0)
    assert layer.num_batches_tracked.item() == 2
    assert layer.momentum == 0.3
    assert (layer.weight.item(), layer.bias.item()) == (1.0, 0.0)


def test_a_network_without_batchnorm_reads_no_batch_for_it() -> None:
    def never() -> Iterator[Tensor]:
        raise AssertionError
        yield

    training.update_bn(never(), nn.Linear(2, 2))
