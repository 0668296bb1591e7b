"""Metrics that tables show."""

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """The place of a number in records, how it is printed, and which end is better."""

    name: str
    title: str
    section: Literal["results", "cost"]
    lower: bool = False
    percent: bool = False
    digits: int = 1
    undefined: str = ""
    """Field of a record that counts the structures for which the metric is undefined."""

    def text(self, value: float, sign: str = "") -> str:
        """Format a value; `z` keeps a rounded -0.04 from becoming -0.0."""
        return f"{self.scaled(value):{sign}z.{self.digits}f}"

    def scaled(self, value: float) -> float:
        """Return a value in the printed unit."""
        return value * (100 if self.percent else 1)

    @property
    def unit(self) -> str:
        """The title up to its first comma, for axes."""
        return self.title.partition(",")[0]

    @property
    def heading(self) -> str:
        """The title, with the better end."""
        return f"{self.title}, {'lower' if self.lower else 'higher'} is better"


_UNIT = "mm (photographs: pixels)"
METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "accuracy in %", "results", percent=True),
        Metric("macro", "accuracy averaged over classes in %", "results", percent=True),
        Metric("ece", "expected calibration error in %", "results", percent=True, lower=True),
        Metric("nll", "negative log-likelihood", "results", lower=True, digits=3),
        Metric("dice", "Dice in %, mean over cases and structures", "results", percent=True, undefined="empty"),
        Metric("hd95", f"95 % Hausdorff distance in {_UNIT}", "results", lower=True, digits=2, undefined="no_distance"),
        Metric("assd", f"mean surface distance in {_UNIT}", "results", lower=True, digits=2, undefined="no_distance"),
        Metric("vcdr_error", "error of the vertical cup-to-disc ratio", "results", lower=True, digits=3),
        Metric("alignment", "alignment: mean squared distance of features of a class", "results", lower=True, digits=3),
        Metric("uniformity", "uniformity: log of the mean potential of features", "results", lower=True, digits=3),
        Metric("separation", "distance of features of a class over that of two", "results", lower=True, digits=3),
        Metric("images_per_second", "images per second", "cost"),
        Metric("peak_memory_mb", "peak memory in MB", "cost", lower=True),
        Metric("seconds", "seconds per run", "cost", lower=True, digits=2),
    )
}


def check_name(name: str, names: Collection[str], kind: str) -> str:
    """Return the name, or refuse it if it is not one of `names`."""
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"no {kind} is called {name!r}{hint} There are: {', '.join(names)}")
    return name
