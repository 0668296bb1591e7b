"""Source training: empirical risk minimisation over all source domains, optionally with SWAD.

Step i depends on the seed and i alone, so a training that was killed resumes exactly from its file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from trueup.core import files
from trueup.core.method import fusable
from trueup.core.optimizer_state import follow_parameters
from trueup.data.datasets import Dataset
from trueup.data.domains import BrokenImageError, Domain, Image
from trueup.data.loading import ConcatDomains, Loader, normalize_images, prefetch
from trueup.data.streams import batches
from trueup.model.calls import as_logits, call_model
from trueup.source.checkpoints import KIND, Store, digest_of_file, read_unfinished
from trueup.source.external_checkpoints import find_misfits, refuse_misfits, take_prefix
from trueup.source.networks import build_network
from trueup.source.recipe import Recipe, Training
from trueup.source.swad import Swad
from trueup.source.tasks import Task, split_holdout, task_of

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
    """Train or resume the model of a recipe and return its file; a finished model is not trained again.

    weights: the file whose SHA-256 the recipe names.
    keep_every: seconds between saves of an unfinished training.
    """
    if store.has(recipe):
        store.partial(recipe).unlink(missing_ok=True)
        return store.path(recipe)
    if weights is not None and digest_of_file(weights) != recipe.weights:
        raise ValueError(f"{weights} is {digest_of_file(weights)}; the recipe's weights are {recipe.weights}")
    for stale in store.folder.glob(f".{recipe.name}.*.partial"):  # left by a kill during a save
        if time.time() - stale.stat().st_mtime > 3600:  # not by a process that is saving now
            stale.unlink(missing_ok=True)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(recipe.seed)
        size, channels = recipe.training.size, recipe.training.channels.count
        weights = weights or recipe.weights
        model = build_network(recipe.network, recipe.classes, weights=weights, size=size, channels=channels)
        domains = [dataset.domain(name) for name in recipe.sources] if recipe.training.iterations else []
        training = _TrainingRun(recipe, model.to(device), domains, task_of(dataset, recipe.training), device)
        training.train(store, threads, keep_every, progress)
    store.save(recipe, model, training.report())
    store.partial(recipe).unlink(missing_ok=True)
    return store.path(recipe)


class _TrainingRun:
    """One training: the model, its optimiser, and the best weights so far."""

    def __init__(
        self, recipe: Recipe, model: nn.Module, domains: Sequence[Domain], task: Task, device: str = "cpu"
    ) -> None:
        self.recipe, self.settings, self.model, self.domains = recipe, recipe.training, model, domains
        self.task, self.device = task, device
        self.model.to(memory_format=torch.channels_last)
        self.optimizer = _optimizer(model, self.settings)
        self.parts = [split_holdout(d, self.settings.holdout, recipe.seed) for d in domains]
        self.swad = Swad(self.settings.converge, self.settings.tolerate, self.settings.tolerance)
        self.done, self.best, self.best_at = 0, -1.0, 0
        self.kept: dict[str, Tensor] = {}  # the weights of the best iteration
        self.history: list[dict[str, float]] = []
        self.broken: set[str] = set()
        self.loaders: dict[str, Loader] = {}

    def train(self, store: Store, threads: int, keep_every: float, progress: Progress) -> None:
        """Run the remaining steps, then load the weights to keep into the model."""
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
                # Saving takes at most a twentieth of the time.
                if time.monotonic() - saved > max(keep_every, 20 * cost):
                    start = time.monotonic()
                    self.save(store)
                    saved = time.monotonic()
                    cost = saved - start
            progress(total, total)
            self.finish(pool, threads)

    def batches(self, pool: ThreadPoolExecutor, steps: range) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Yield the batch of each step, read and augmented in advance."""
        for i, waiting in prefetch(steps, lambda i: [pool.submit(self.read, *item) for item in self.draw(i)], 3):
            read = [result for future in waiting for result in future.result()]
            if not read:
                yield i, (torch.empty(0), torch.empty(0))
            else:
                x = normalize_images([image for image, _ in read], self.settings.channels)
                yield i, (x.to(self.device), self.task.tensor([answer for _, answer in read]).to(self.device))

    def draw(self, i: int) -> Iterator[tuple[int, list[int], int]]:
        """Yield (domain, indices, step) for step i, drawn with replacement."""
        rng = np.random.default_rng([self.recipe.seed, 1, i])
        for d, (training, _) in enumerate(self.parts):
            yield d, rng.choice(training, size=self.settings.batch).tolist(), i

    def read(self, d: int, indices: list[int], i: int) -> list[tuple[Image, Any]]:
        """Decode and augment images of one domain; unreadable ones are left out."""
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
        """Take one optimiser step."""
        torch.manual_seed(1_000_003 * self.recipe.seed + i)  # so that dropout is the same after a resume
        decays = sum(i >= at * self.settings.iterations for at in self.settings.decay_at)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * 0.1**decays
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
        """Return True if validation is due after this many steps."""
        first, every = min(self.settings.first, self.settings.iterations), self.settings.every
        return done == self.settings.iterations or (done >= first and (done - first) % every == 0)

    def validate(self, threads: int) -> bool:
        """Record the score on held-out images; return True if SWAD is complete."""
        score, loss = self.scores(threads)
        self.history.append({"iteration": self.done, self.task.score: score, "loss": loss})
        if self.settings.algorithm == "swad":
            return self.swad.validate(loss)
        if score > self.best:
            self.best, self.best_at = score, self.done
            self.kept = {name: t.detach().clone() for name, t in self.model.state_dict().items()}
        return False

    def scores(self, threads: int) -> tuple[float, float]:
        """Return score and loss on held-out images, averaged over domains."""
        each = [self.evaluate(d, held, threads) for d, (_, held) in zip(self.domains, self.parts, strict=True)]
        scores = [score for score in each if score is not None]
        if not scores:
            least = "three images of a class" if self.task.score == "accuracy" else "two patients"
            raise ValueError(f"no held-out image can be read; a source domain needs at least {least}")
        score, loss = np.mean(scores, axis=0).tolist()
        if not np.isfinite(loss):
            when = f"on held-out images after {self.done} iterations"
            raise ValueError(f"the loss is {loss} {when}; lower lr={self.settings.lr}")
        return score, loss

    @torch.no_grad()
    def evaluate(self, domain: Domain, held: Any, threads: int) -> tuple[float, float] | None:
        """Return score and mean loss of the current model on a domain; None if nothing is held out."""
        self.model.eval()
        fresh = Loader(ConcatDomains([domain]), self.settings.size, self.settings.channels, threads=threads)
        loader = self.loaders.setdefault(domain.name, fresh)  # shared, so that broken files are logged once
        counts, loss, n = [], 0.0, 0
        for x, at in loader.batches(list(batches(held, 128 if self.task.score == "accuracy" else 16))):
            y = self.task.answers(domain, at).to(self.device)
            logits = self.logits(x.to(self.device))
            counts.append(self.task.count(logits, y))
            loss += float(self.task.loss(logits, y)) * len(y)
            n += len(y)
        self.broken |= set(loader.broken.values())
        return (self.task.final_score(np.sum(counts, axis=0)), loss / n) if n else None

    def logits(self, x: Tensor) -> Tensor:
        """Return the network's logits, whatever container it returns."""
        return as_logits(call_model(self.model, x), None, rows=len(x), min_channels=1)

    def finish(self, pool: ThreadPoolExecutor, threads: int) -> None:
        """Load the kept weights into the model; with SWAD, estimate new BatchNorm statistics."""
        if self.settings.algorithm == "swad" and self.settings.iterations:
            self.model.load_state_dict(self.swad.average(), strict=False)
            first = self.settings.iterations
            torch.manual_seed(1_000_003 * self.recipe.seed + first)
            fresh = self.batches(pool, range(first, first + self.settings.refresh))
            if self.settings.refresh:
                update_bn((x for _, (x, _) in fresh if len(x)), self.model)
            self.best, self.best_at = self.scores(threads)[0], self.done
        elif self.kept:
            self.model.load_state_dict(self.kept)
        self.model.eval()

    def report(self) -> dict[str, Any]:
        """Return history, kept iteration and broken files."""
        kept: dict[str, Any] = {self.task.score: self.best, "iteration": self.best_at} if self.history else {}
        if self.history and self.settings.algorithm == "swad":
            kept |= {"start": self.swad.start, "end": self.swad.end, "segments": len(self.swad.losses)}
        return {"history": self.history, "kept": kept, "broken": sorted(self.broken)}

    # Unfinished trainings

    def save(self, store: Store) -> None:
        """Write the state that is needed to resume."""
        store.folder.mkdir(parents=True, exist_ok=True)
        moments = self.optimizer.state_dict()["state"]
        tensors = {
            "model": self.model.state_dict(),
            "kept": self.kept,
            "swad": self.swad.tensors(),
            "optimizer": {f"{i}.{key}": t for i, state in moments.items() for key, t in state.items() if t is not None},
        }
        header = {
            "recipe": self.recipe.model_dump(mode="json"),
            "done": self.done,
            "best": {"score": self.best, "iteration": self.best_at},
            "history": self.history,
            "broken": sorted(self.broken),
            "swad": self.swad.values(),
        }
        flat = {f"{group}/{name}": t for group, named in tensors.items() for name, t in named.items()}
        files.write(store.partial(self.recipe), flat, header, KIND)

    def restore(self, file: Path) -> None:
        """Resume from a saved state; if the file is unreadable or does not fit, log it and start over."""
        try:
            tensors, header = read_unfinished(file)
            if header["recipe"] != self.recipe.model_dump(mode="json"):
                raise ValueError(f"{file} belongs to another recipe")
            refuse_misfits(self.misfits(tensors, header), file)
        except ValueError as error:
            log.warning("training starts over: %s", error)
            return
        self.model.load_state_dict(take_prefix(tensors, "model/"))
        self.kept = take_prefix(tensors, "kept/")
        self.swad.restore(take_prefix(tensors, "swad/"), header["swad"])
        moments = {i: take_prefix(tensors, f"optimizer/{i}.") for i, _ in enumerate(self.model.parameters())}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        follow_parameters(self.optimizer)  # fused steps need the memory layout of the parameters
        self.done, self.history, self.broken = header["done"], header["history"], set(header["broken"])
        self.best, self.best_at = header["best"].values()

    def misfits(self, tensors: dict[str, Tensor], header: dict[str, Any]) -> list[str]:
        """Return why a saved state does not fit; fused steps would write past the end of short tensors."""
        state, swad = self.model.state_dict(), header["swad"]
        weights: dict[str, Tensor] = dict(self.model.named_parameters())
        most = max(self.settings.converge, self.settings.tolerate)
        counts = {"done": (header["done"], self.settings.iterations), "waiting": (swad["waiting"], most)}
        if wrong := [f"{name} is {n}, more than {of}" for name, (n, of) in counts.items() if n > of]:
            return wrong
        _, kept_at = header["best"].values()
        must = {"model/": state, **({"kept/": state} if kept_at else {})}
        must |= {f"swad/{name}.": weights for name, n in (("segment", "steps"), ("total", "count")) if swad[n]}
        may: dict[str, dict[str, Tensor]] = {f"swad/waiting{i}.": weights for i in range(swad["waiting"])}
        for i, p in enumerate(weights.values()):
            keys = MOMENTS[self.settings.optimizer]
            may[f"optimizer/{i}."] = {key: torch.zeros(()) if key == "step" else p for key in keys}
        present = {group: like for group, like in may.items() if any(f"{group}{name}" in tensors for name in like)}
        ours = {f"{group}{name}": t for group, like in (must | present).items() for name, t in like.items()}
        return find_misfits(ours, tensors)


def _optimizer(model: nn.Module, settings: Training) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    how: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay, "fused": fusable(parameters)}
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=0.9, **how)
    return torch.optim.Adam(parameters, **how)
