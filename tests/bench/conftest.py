"""Fixtures of tests that use toy_streams."""

from typing import Any

import pytest
from toy_streams import Seen

from trueup.bench import scorers


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The probabilities and labels that were measured, run by run."""
    calls: Seen = []
    measure = scorers.measure_classes

    def note(probs: Any, labels: Any) -> dict[str, Any]:
        calls.append((probs, labels))
        return measure(probs, labels)

    monkeypatch.setattr(scorers, "measure_classes", note)
    return calls
