"""Source training: empirical risk minimisation over all source domains, with SWAD on request.

What step i does depends on the seed and i alone, so a training that was killed goes on exactly where its file says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trueup.core import files
from trueup.core.method import fusable
from trueup.data.datasets import Dataset
from trueup.data.domains import BrokenImageError, Domain, Image
from trueup.data.loading import ConcatDomains, Loader, normalize_images, prefetch
from trueup.data.streams import batches
from trueup.model.heads import as_logits, call_model
from trueup.source.checkpoints import KIND, Store, digest_of_file, named, part, read_unfinished
from trueup.source.external_checkpoints import misfits, refuse
from trueup.source.holdout import split
from trueup.source.networks import build
from trueup.source.recipe import Recipe, Training
from trueup.source.swad import Swad
from trueup.source.tasks import Task, task_of

log = logging.getLogger("trueup")
Progress = Callable[[int, int], None]  # done, of how many
MOMENTS = {"adam": ("step", "exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def train(
    recipe: Recipe,
    dataset: Dataset,
    store: Store,
    *,
    weights: str | None = None,
    threads: int = 2,
    device: str = "cpu",
    keep_every: float = 30.0,
    progress: Progress = lambda done, of: None,
) -> Path:
    """Train the model of a recipe, or go on with it, and keep it; returns its file. A finished one is left alone.

    weights: the file that the recipe's weights are the SHA-256 of.
    keep_every: seconds between saves of an unfinished training.
    """
    if store.has(recipe):
        store.partial(recipe).unlink(missing_ok=True)
        return store.path(recipe)
    if weights is not None and digest_of_file(weights) != recipe.weights:
        raise ValueError(f"{weights} is {digest_of_file(weights)}; the recipe's weights are {recipe.weights}")
    for stale in store.folder.glob(f".{recipe.name}.*.partial"):  # of a kill in the middle of a save
        if time.time() - stale.stat().st_mtime > 3600:  # and not of a process that is saving now
            stale.unlink(missing_ok=True)
    devices: list[int] = []
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(recipe.seed)
        size, channels = recipe.training.size, recipe.training.channels.count
        weights = weights or recipe.weights
        model = build(recipe.network, recipe.classes, weights=weights, size=size, channels=channels)
        domains = [dataset.domain(name) for name in recipe.sources] if recipe.training.iterations else []
        training = _Run(recipe, model.to(device), domains, task_of(dataset, recipe.training), device)
        training.train(store, threads, keep_every, progress)
    store.save(recipe, model, training.report())
    store.partial(recipe).unlink(missing_ok=True)
    return store.path(recipe)


@dataclass
class _Best:
    score: float = -1.0
    iteration: int = 0


class _Run:
    """One training: the model, its optimiser, and what was best so far."""

    def __init__(
        self, recipe: Recipe, model: nn.Module, domains: Sequence[Domain], task: Task, device: str = "cpu"
    ) -> None:
        self.recipe, self.settings, self.model, self.domains = recipe, recipe.training, model, domains
        self.task, self.device = task, device
        self.model.to(memory_format=torch.channels_last)
        self.optimizer = _optimizer(model, self.settings)
        self.parts = [split(d, self.settings.holdout, recipe.seed) for d in domains]
        self.swad = Swad(self.settings.converge, self.settings.tolerate, self.settings.tolerance)
        self.done, self.best = 0, _Best()
        self.kept: dict[str, Tensor] = {}
        self.history: list[dict[str, float]] = []
        self.broken: set[str] = set()
        self.loaders: dict[str, Loader] = {}

    def train(self, store: Store, threads: int, keep_every: float, progress: Progress) -> None:
        """All steps from where it stands, then the weights that are kept."""
        total, file = self.settings.iterations, store.partial(self.recipe)
        if total and file.is_file():
            self.restore(file)
        saved, cost = time.monotonic(), 0.0
        with ThreadPoolExecutor(threads) as pool:
            for i, (x, y) in self.batches(pool, range(self.done, total)):
                progress(i, total)
                if len(y):
                    self.step(i, x, y)
                self.done = i + 1
                if self.validates(i + 1) and self.validate(threads):
                    break
                # Saving never takes more than a twentieth of the time.
                if time.monotonic() - saved > max(keep_every, 20 * cost):
                    start = time.monotonic()
                    self.save(store)
                    saved = time.monotonic()
                    cost = saved - start
            progress(total, total)
            self.finish(pool, threads)

    def batches(self, pool: ThreadPoolExecutor, steps: range) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """The batch of each step, read and augmented ahead of time."""
        for i, waiting in prefetch(steps, lambda i: [pool.submit(self.read, *item) for item in self.draw(i)], 3):
            read = [result for future in waiting for result in future.result()]
            if not read:
                yield i, (torch.empty(0), torch.empty(0))
            else:
                x = normalize_images([image for image, _ in read], self.settings.channels)
                yield i, (x.to(self.device), self.task.tensor([answer for _, answer in read]).to(self.device))

    def draw(self, i: int) -> Iterator[tuple[int, list[int], int]]:
        """The images of step i: (domain, indices, step), drawn with replacement."""
        rng = np.random.default_rng([self.recipe.seed, 1, i])
        for d, (trains, _) in enumerate(self.parts):
            yield d, rng.choice(trains, size=self.settings.batch).tolist(), i

    def read(self, d: int, indices: list[int], i: int) -> list[tuple[Image, Any]]:
        """Decode and augment images of one domain; what cannot be read is left out."""
        rng = np.random.default_rng([self.recipe.seed, 2, i, d])
        domain, read = self.domains[d], []
        for j in indices:
            try:
                read.append(self.task.read(domain, j, rng))
            except BrokenImageError as error:
                if (name := domain.image_name(j)) not in self.broken:
                    self.broken.add(name)
                    log.warning("left out, cannot be read: %s (%s)", name, error)
        return read

    def step(self, i: int, x: Tensor, y: Tensor) -> None:
        """One step of gradient descent."""
        torch.manual_seed(1_000_003 * self.recipe.seed + i)  # dropout, the same when training goes on after a kill
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * 0.1 ** sum(
                i >= at * self.settings.iterations for at in self.settings.decay_at
            )
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.task.loss(self.logits(x), y)
        if not bool(loss.isfinite()):
            raise ValueError(f"the loss is {loss.item()} at iteration {i}; lower lr={self.settings.lr}")
        loss.backward()
        self.optimizer.step()
        self.done = i + 1
        if self.settings.algorithm == "swad":
            self.swad.step(dict(self.model.named_parameters()))

    def validates(self, done: int) -> bool:
        """Whether validation is due after this many steps."""
        first, every = min(self.settings.first, self.settings.iterations), self.settings.every
        return done == self.settings.iterations or (done >= first and (done - first) % every == 0)

    def validate(self, threads: int) -> bool:
        """Remember how the model does on what is held out; True when SWAD is satisfied."""
        score, loss = self.scores(threads)
        self.history.append({"iteration": self.done, self.task.score: score, "loss": loss})
        if self.settings.algorithm == "swad":
            return self.swad.validate(loss)
        if score > self.best.score:
            self.best = _Best(score, self.done)
            self.kept = {name: t.detach().clone() for name, t in self.model.state_dict().items()}
        return False

    def scores(self, threads: int) -> tuple[float, float]:
        """Score and loss on what is held out, mean over domains."""
        each = [self.evaluate(d, held, threads) for d, (_, held) in zip(self.domains, self.parts, strict=True)]
        scores = [score for score in each if score is not None]
        if not scores:
            least = "three images of a class" if self.task.score == "accuracy" else "two patients"
            raise ValueError(f"no held-out image can be read; a source domain needs at least {least}")
        score, loss = np.mean(scores, axis=0).tolist()
        if not np.isfinite(loss):
            where = f"on held-out images after {self.done} iterations"
            raise ValueError(f"the loss is {loss} {where}; lower lr={self.settings.lr}")
        return score, loss

    @torch.no_grad()
    def evaluate(self, domain: Domain, held: Any, threads: int) -> tuple[float, float] | None:
        """Score and mean loss of the model as it is; None where nothing is held out."""
        self.model.eval()
        fresh = Loader(ConcatDomains([domain]), self.settings.size, self.settings.channels, threads=threads)
        loader = self.loaders.setdefault(domain.name, fresh)  # one for all validations: it names broken files once
        counts, loss, n = [], 0.0, 0
        for x, at in loader.batches(list(batches(held, 128 if self.task.score == "accuracy" else 16))):
            y = self.task.answers(domain, at).to(self.device)
            logits = self.logits(x.to(self.device))
            counts.append(self.task.count(logits, y))
            loss += float(self.task.loss(logits, y)) * len(y)
            n += len(y)
        self.broken |= set(loader.broken.values())
        return (self.task.judge(np.sum(counts, axis=0)), loss / n) if n else None

    def logits(self, x: Tensor) -> Tensor:
        """What the network says, whatever it wraps it in."""
        return as_logits(call_model(self.model, x), None, rows=len(x), least=1)

    def finish(self, pool: ThreadPoolExecutor, threads: int) -> None:
        """Put the kept weights into the model; after SWAD estimate the statistics of BatchNorm layers anew."""
        if self.settings.algorithm == "swad" and self.settings.iterations:
            self.model.load_state_dict(self.swad.average(), strict=False)
            first = self.settings.iterations
            torch.manual_seed(1_000_003 * self.recipe.seed + first)
            fresh = self.batches(pool, range(first, first + self.settings.refresh))
            if self.settings.refresh:
                refresh(self.model, (x for _, (x, _) in fresh if len(x)))
            self.best = _Best(self.scores(threads)[0], self.done)
        elif self.kept:
            self.model.load_state_dict(self.kept)
        self.model.eval()

    def report(self) -> dict[str, Any]:
        """What to remember of the training."""
        best = {self.task.score: self.best.score, "iteration": self.best.iteration}
        kept: dict[str, Any] = best if self.history else {}
        if self.history and self.settings.algorithm == "swad":
            kept |= {"start": self.swad.start, "end": self.swad.end, "segments": len(self.swad.losses)}
        return {"history": self.history, "kept": kept, "broken": sorted(self.broken)}

    # Unfinished business

    def save(self, store: Store) -> None:
        """Write all that a training needs to go on."""
        store.folder.mkdir(parents=True, exist_ok=True)
        moments = self.optimizer.state_dict()["state"]
        tensors = {
            "model": self.model.state_dict(),
            "kept": self.kept,
            "swad": self.swad.tensors(),
            "optimizer": {
                f"{i}.{name}": t for i, state in moments.items() for name, t in state.items() if t is not None
            },
        }
        header = {
            "recipe": self.recipe.model_dump(mode="json"),
            "done": self.done,
            "best": vars(self.best),
            "history": self.history,
            "broken": sorted(self.broken),
            "swad": self.swad.values(),
        }
        files.write(store.partial(self.recipe), named(tensors), header, KIND)

    def restore(self, file: Path) -> None:
        """Go on from a saved state; a file that cannot be read or does not fit is named, and training starts anew."""
        try:
            tensors, header = read_unfinished(file)
            if header["recipe"] != self.recipe.model_dump(mode="json"):
                raise ValueError(f"{file} belongs to another recipe")
            refuse(self.misfits(tensors, header), file)
        except ValueError as error:
            log.warning("training starts anew: %s", error)
            return
        self.model.load_state_dict(part(tensors, "model"))
        self.kept = part(tensors, "kept")
        self.swad.restore(part(tensors, "swad"), header["swad"])
        moments: dict[int, dict[str, Tensor]] = {}
        parameters = list(self.model.parameters())
        for name, tensor in part(tensors, "optimizer").items():
            i, _, key = name.partition(".")
            like = parameters[int(i)]
            if tensor.shape == like.shape:  # the memory layout of the parameter, which fused steps rely on
                tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
            moments.setdefault(int(i), {})[key] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        self.done, self.best, self.history = header["done"], _Best(*header["best"].values()), header["history"]
        self.broken = set(header["broken"])

    def misfits(self, tensors: dict[str, Tensor], header: dict[str, Any]) -> list[str]:
        """What keeps a saved state from being taken; fused steps would write beyond moments that are too short."""
        whole, swad = self.model.state_dict(), header["swad"]
        weights: dict[str, Tensor] = dict(self.model.named_parameters())
        most = max(self.settings.converge, self.settings.tolerate)
        counts = {"done": (header["done"], self.settings.iterations), "waiting": (swad["waiting"], most)}
        if wrong := [f"{name} is {n}, more than {of}" for name, (n, of) in counts.items() if n > of]:
            return wrong
        _, kept_at = header["best"].values()
        must = {"model/": whole, **({"kept/": whole} if kept_at else {})}
        must |= {f"swad/{name}.": weights for name, n in (("segment", "steps"), ("total", "count")) if swad[n]}
        may: dict[str, dict[str, Tensor]] = {f"swad/waiting{i}.": weights for i in range(swad["waiting"])}
        for i, p in enumerate(weights.values()):
            keys = MOMENTS[self.settings.optimizer]
            may[f"optimizer/{i}."] = {key: torch.zeros(()) if key == "step" else p for key in keys}
        there = {group: like for group, like in may.items() if any(f"{group}{name}" in tensors for name in like)}
        ours = {f"{group}{name}": t for group, like in (must | there).items() for name, t in like.items()}
        return misfits(ours, tensors)


def _optimizer(model: nn.Module, settings: Training) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    fused = fusable(parameters)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=settings.lr, momentum=0.9, weight_decay=settings.weight_decay, fused=fused
        )
    return torch.optim.Adam(parameters, lr=settings.lr, weight_decay=settings.weight_decay, fused=fused)


@torch.no_grad()
def refresh(model: nn.Module, images: Iterator[Tensor]) -> None:
    """Replace the running statistics of BatchNorm layers by the mean over these batches."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [layer.momentum for layer in layers]
    if not layers:
        return
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the plain mean over all batches
    model.train()
    for x in images:
        model(x)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
