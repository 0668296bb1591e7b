"""The data of a monitor: its counters and flags, and its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

STATES = ("healthy", "suspect", "rolled back", "fallback", "probation")
FROZEN = ("suspect", "rolled back")  # nothing is learnt
EVENTS = ("suspect", "rollback", "fallback", "reset", "pull", "skipped", "quarantined", "drift")


class Decision(NamedTuple):
    """One thing for the adapter to do.

    rollback: return to the older kept state, or to the source if none is kept; the newer one may be damaged already.
    restart: return to the source and drop the kept states. pull, restore, part: move parameters towards the source, as
    `Action` says. keep: keep the present state to return to.
    """

    kind: Literal["rollback", "restart", "pull", "restore", "part", "keep"]
    share: float = 0.0


class Verdict(NamedTuple):
    """Decisions after a batch, and whether the source answers it."""

    decisions: list[Decision]
    source_answers: bool


@dataclass
class Marks:
    """The counters and flags of a monitor; saved with the state of an adapter."""

    checking: int
    """Every batch is compared with the source up to this number of images."""
    cooldown: int
    """Length of the next cool-down, in images."""
    state: str = "healthy"
    reason: str = ""
    images: int = 0
    batches: int = 0
    since: int = 0
    """Number of images when the state began."""
    good: int = 0
    """Images without a bad sign since then."""
    until: int = 0
    """Number of images when the cool-down ends."""
    last: int = 0
    """Number of images when a state was last kept."""
    before: str = "healthy"
    """State before the suspicion."""
    usual: float = 0.0
    """Typical maximum of the absolute values of an image."""
    refused: int = 0
    """Images refused for their size since one was taken."""
    stuck: int = 0
    """Gradients in a row that were not finite."""
    shapes: list[list[int]] = field(default_factory=list)
    """Shapes of the last image and of the answer to it."""
    numbers: dict[str, float] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVENTS, 0))
    quarantined: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a file."""
        return asdict(self)

    def loaded(self, values: Mapping[str, Any]) -> Marks:
        """Return the marks in a file; refuse malformed data."""
        values = {**values, "events": {"drift": 0, **values["events"]}}  # older files do not have it
        mine = self.to_dict()
        fits = values.keys() == mine.keys() and values["state"] in STATES and values["before"] in STATES
        fits = fits and all(isinstance(values[n], int | float if n == "usual" else type(mine[n])) for n in mine)
        if not fits or values["events"].keys() != mine["events"].keys():
            raise ValueError("the saved guard state is malformed")
        return Marks(**values)
