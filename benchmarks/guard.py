"""Cost of the guard: its share of the time of the steps that it monitors, in one run.

ResNet-18 at 224 pixels. The free signals (input rows, gradients, parameters, diversity, kept states) are timed apart
from the comparison with the frozen source, which is one more forward every 8th batch.

Run: python benchmarks/guard.py [--quick]
"""

import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torchvision
from measure import write

import trueup
from trueup.core import adapter as flow
from trueup.core import guarded_batch
from trueup.core.guarded_batch import source_logits

CASES = [("tent", "norm"), ("tsd", "all")]


class Clock:
    """A sum of the seconds of calls; time inside another clock's calls counts there only."""

    running: "list[Clock]" = []  # noqa: RUF012

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            self.running.append(self)
            try:
                return function(*args, **kwargs)
            finally:
                self.running.pop()
                elapsed = time.perf_counter() - start
                self.seconds += elapsed
                if self.running:
                    self.running[-1].seconds -= elapsed

        return timed


def measure(method: str, params: str, batch: int, size: int, batches: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None)
    adapter = trueup.adapt(model, method, params=params, guard=True, example=torch.randn(2, 3, size, size))
    whole, free, answer, source = Clock(), Clock(), Clock(), Clock()
    watch = adapter.monitor
    assert watch is not None
    adapter._answer = answer(adapter._answer)  # type: ignore[method-assign]
    for name in ("refuses", "step_taken"):
        setattr(watch, name, free(getattr(watch, name)))
    step = whole(adapter)
    with (
        mock.patch.object(guarded_batch, "source_logits", source(source_logits)),
        mock.patch.object(flow, "answer_good_rows", free(guarded_batch.answer_good_rows)),
        mock.patch.object(flow, "judged_answer", free(guarded_batch.judged_answer)),
    ):
        for _ in range(3):  # warm-up
            step(torch.randn(batch, 3, size, size))
        watch.marks.checking = 0  # all of the first window is compared; here is what comes after
        for clock in (whole, free, answer, source):
            clock.seconds = 0.0
        for _ in range(batches):
            step(torch.randn(batch, 3, size, size))
    total = whole.seconds + free.seconds + answer.seconds + source.seconds
    step_alone = answer.seconds
    return {
        "method": method,
        "params": params,
        "batch": batch,
        "pixels": size,
        "batches": batches,
        "step_ms": round(1000 * step_alone / batches, 1),
        "free_over_step": round(free.seconds / step_alone, 4),
        "source_over_step": round(source.seconds / step_alone, 4),
        "events": {k: v for k, v in adapter.health.events.items() if v},
        "seconds": round(total, 1),
    }


def main() -> None:
    quick = "--quick" in sys.argv
    rows = []
    for method, params in CASES:
        row = measure(method, params, *((4, 64, 4) if quick else (16, 224, 64)))
        rows.append(row)
        print(
            f"{method}, params={params}: step {row['step_ms']} ms; free signals {row['free_over_step']:.2%} of it, "
            f"comparison with the source {row['source_over_step']:.2%}"
        )
    if not quick:
        write("guard", rows)


if __name__ == "__main__":
    main()
