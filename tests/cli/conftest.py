"""Sweeps of commands without processes of their own."""

import pytest

from trueup.bench import sweep
from trueup.bench.jobs import run_job


class OneProcess(sweep._Pool):
    """A pool that runs its jobs here: a process for each would import for longer than it computes."""

    def work(self) -> None:
        """Run all trainings, then all jobs."""
        for job in (*self.trainings.values(), *self.jobs):
            self.on_event("start", job, None)
            run_job(job, lambda event, value: self.keep(value) if event == "record" else None)
            self.on_event("end", job, None)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the jobs of sweeps in this process; tests/bench has those in many, and two tests here."""
    monkeypatch.setattr(sweep, "_Pool", OneProcess)
