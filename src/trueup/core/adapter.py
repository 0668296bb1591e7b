"""The adapter: the flow of a batch, and the optimiser step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trueup.core.building import make_ready
from trueup.core.copying import calling
from trueup.core.guarded_batch import MOVES, Answer, answer_good_rows, judged_answer, last_numbers, source_logits
from trueup.core.isolation import all_or_nothing, expect_update, serialized
from trueup.core.lifecycle import AdapterBase
from trueup.core.method import GradientMethod
from trueup.core.state import AdapterState
from trueup.guard.marks import Decision
from trueup.model.calls import Batch, read_images
from trueup.model.split_model import Output
from trueup.model.steps import left_to_device, sharpness_aware, step_if_finite


class Adapter(AdapterBase):
    """A model that predicts and then adapts, batch by batch: `logits = adapter(x)`."""

    @serialized
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Predict a batch and adapt to it. Returns detached logits, at least float32.

        Call it as you call the model: `adapter(x)`, `adapter(pixel_values=x)`, with a dict or several tensors. With a
        guard, rows with NaN, infinite or huge values get logits of zero and do not affect other rows. Threads take
        turns. An exception, also Ctrl-C, leaves the adapter as it was before the batch.
        """
        with torch.inference_mode(False):
            x = read_images(self.net.model, args, kwargs, rows=self.monitor is None)
            with calling(self, x) if isinstance(x, Batch) else nullcontext(), all_or_nothing(self):
                if self.monitor is None:
                    answers = self._answer(x)
                    self.last_numbers = last_numbers(answers, multilabel=self.multilabel)
                else:
                    answers = answer_good_rows(self, self.monitor, x, self._answer)
                self.batches, self.images = self.batches + 1, self.images + len(x)
                if self.autosave is not None:
                    self.autosave.after_batch(self)
        return answers

    __call__: Callable[..., Tensor]

    def _answer(self, x: Tensor) -> Tensor:
        """Predict and learn, in as many parts as the method asks for."""
        if not self.built or self.net.runner.caches is None:
            make_ready(self, x)
        if "prepare" in self.method.info.needs and not self.prepared:
            self.warn_once(
                "call adapter.prepare(...) before the first batch: %s runs without its source images",
                self.method.info.name,
            )
        answers = []
        with self.random.drawing(x.device):
            while len(x):
                n = self._rows(len(x))
                answers.append(self._take(x[:n], last=n == len(x)))
                x = x[n:]
        return answers[0] if len(answers) == 1 else torch.cat(answers)

    def _take(self, x: Tensor, *, last: bool) -> Tensor:
        """Run the hooks on one part of a batch: forward, observe, loss, after, predict.

        last: no other part follows; an episodic method then forgets the batch.
        """
        net, learns = self.net, self._learns
        # A policy with two passes predicts in the first, and learns in the second with statistics of the batch.
        two_passes = self.optimizer is not None and net.policy.two_passes
        reset = self.method.episodic and last
        # The policy stays active until after backward, for models that recompute their activations there.
        with torch.set_grad_enabled(self.optimizer is not None and learns and not two_passes), net.active(len(x)):
            with nullcontext() if learns else net.frozen_statistics():
                out = self._forward(x)
            if learns and not two_passes:
                reset |= self._learn(x, out)
        if learns and two_passes:
            inliers = x[net.policy.inlier_rows(len(x))]
            if len(inliers) >= (1 if self.method.many_views else net.policy.fewest_to_learn):
                with torch.enable_grad(), net.active(len(inliers), learning=True):
                    reset |= self._learn(inliers, self._forward(inliers))
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            if learns:
                net.update_estimates()
            answer = self.hooks.predict(net, out, self.state).detach()
            for observe in self.answer_observers:
                observe(net, out, answer)
        if reset:
            self.fresh.apply(self, progress=False)
            self.random.restart()
        return answer if self.monitor is None else judged_answer(self, self.monitor, x, answer)

    def _forward(self, x: Tensor) -> Output:
        """Run the method's forward pass."""
        out = self.hooks.forward(self.net, x, self.state)
        for observe in self.forward_observers:
            observe(self.net, out)
        return out

    def _learn(self, x: Tensor, out: Output) -> bool:
        """Observe, step, and run `after`; return whether the method asks for a reset."""
        method, net, state, reset = self.hooks, self.net, self.state, False
        # Only the model runs under the user's autocast; losses and memory do not.
        no_autocast = partial(torch.autocast, x.device.type, enabled=False)
        with no_autocast(), torch.no_grad():
            method.observe(net, out, state)
        for step in range(self.method.steps if isinstance(self.method, GradientMethod) else 1):
            if step > 0:
                with net.frozen_statistics():
                    out = self._forward(x)
            with no_autocast():
                decisions = self._update(out)
            expect_update(self)
            if decisions:  # the guard rolls back: `after` would mix two states
                self.act(decisions)
                break
            with no_autocast(), torch.no_grad():
                reset |= method.after(net, out, state) == "reset"
        return reset

    def _update(self, out: Output) -> list[Decision]:
        """Take an optimiser step; return the guard's decisions about it."""
        optimizer, monitor = self.optimizer, self.monitor
        loss = None if optimizer is None else self.hooks.loss(self.net, out, self.state)
        if optimizer is None or loss is None:
            return []
        if not loss.requires_grad:
            self.warn_once("the loss of %s does not depend on any selected parameter", self.method.info.name)
            return []
        optimizer.zero_grad(set_to_none=True)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        runner = self.net.runner
        runner.backward(loss, parameters)
        expect_update(self)
        if radius := self.method.radius:
            loss = sharpness_aware(loss, parameters, radius, partial(self._second_loss, out), runner.backward)
            if loss is None:
                optimizer.zero_grad(set_to_none=True)
                return []
        decisions: list[Decision] = []
        norm = torch.nn.utils.get_total_norm([loss.detach(), *(p.grad for p in parameters if p.grad is not None)])
        if monitor is None and left_to_device(optimizer, norm):
            runner.steps.taken(step_if_finite(optimizer, norm))  # without waiting for the device
        elif not bool(norm.isfinite()):
            runner.steps.left_out()
            decisions = [] if monitor is None else monitor.gradient_failed()
        elif monitor is None or not monitor.refuses(float(loss.detach()), float(norm)):
            optimizer.step()
            runner.steps.taken()
            if monitor is not None:
                size = torch.nn.utils.get_total_norm([p.detach() for p in parameters])
                decisions = monitor.step_taken(finite=bool(size.isfinite()))
        torch.clear_autocast_cache()  # it holds casts of the old weights
        optimizer.zero_grad(set_to_none=True)
        return decisions

    def _second_loss(self, out: Output) -> Tensor | None:
        """Return the second loss of a sharpness-aware step; methods read the first pass's memo as `memo["first"]`."""
        x = out.x
        if x.is_floating_point():
            x = x.to(next(self.net.parameters(), x).dtype)  # outside of autocast nothing else converts it
        with self.net.frozen_statistics():
            second = self._forward(x)
        second.memo["first"] = out.memo
        return self.hooks.loss(self.net, second, self.state)

    def act(self, decisions: Iterable[Decision]) -> None:
        """Carry out decisions of the guard, in order."""
        for decision in decisions:
            if decision.kind == "keep":
                self.kept = [*self.kept, AdapterState.capture(self)][-2:]
                continue
            expect_update(self)
            if decision.kind == "restart":
                self.kept = []
                self.fresh.apply(self, progress=False)
            elif decision.kind == "rollback":
                self.kept = self.kept[:1]
                (self.kept[0] if self.kept else self.fresh).apply(self, progress=False)
            else:
                MOVES[decision.kind](self.net, self.source, decision.share)
                torch.clear_autocast_cache()

    @property
    def _learns(self) -> bool:
        """False while paused, on batches that `every` skips, and while the guard suspects the adapter."""
        frozen = self.monitor is not None and self.monitor.frozen
        return not (self.paused or self.batches % self.every or frozen)

    def _rows(self, remaining: int) -> int:
        """Return how many rows to take next.

        While nothing is learnt, the fresh state decides: no part ends at an update that does not happen.
        """
        n = self.hooks.rows(self.state if self._learns else self.fresh.memory, remaining)
        if not 1 <= n <= remaining:
            raise ValueError(f"{self.method.info.name}.rows returned {n} for {remaining} remaining rows")
        return n

    @serialized
    def frozen(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the answer of the frozen source to a batch; nothing changes."""
        with torch.inference_mode(False):
            x = read_images(self.net.model, args, kwargs, rows=self.monitor is None)
            return source_logits(self, x)

    @serialized
    def answer(self, *args: Any, **kwargs: Any) -> Answer:
        """Call the adapter and the frozen source on one batch; without a guard, `health` then shows their agreement."""
        source = self.frozen(*args, **kwargs)
        answer = Answer(self(*args, **kwargs), source)
        self.last_numbers = last_numbers(*answer, multilabel=self.multilabel)
        return answer
