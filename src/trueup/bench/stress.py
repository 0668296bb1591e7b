"""Stress tests: the same methods in many scenarios, most of them harder than published benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from trueup.bench.method_spec import Spec
from trueup.bench.settings import (
    BY_ANSWER,
    BY_CLASS,
    OneOrMany,
    Open,
    Run,
    Sweep,
    check_known,
    default_methods,
    import_plugins,
)
from trueup.core.presets import with_preset
from trueup.data.datasets import Dataset

SMALL = (1, 2, 4, 16)
"""Batch sizes of the small-batch scenarios."""
SCENARIOS: dict[str, tuple[str, dict[str, Any]]] = {
    "iid": ("one domain, shuffled", {}),
    "dirichlet": ("images of a class come in bursts", {"stream": "dirichlet"}),
    "class-sorted": ("one class after the other", {"stream": "class-sorted"}),
    "mixed": ("the target and the next domain, shuffled together; the source has seen neither", {"stream": "mixed"}),
    "few-classes": ("three classes only", {"stream": "few-classes"}),
    "batch-1": ("1 image per batch", {"batch": 1, "limit": 1000}),
    "batch-2": ("2 images per batch", {"batch": 2, "limit": 1000}),
    "batch-4": ("4 images per batch", {"batch": 4, "limit": 1000}),
    "batch-16": ("16 images per batch", {"batch": 16}),
    "long": ("the same images again and again, in a new order each time", {"repeat": 20, "limit": 1000}),
    "nan": ("one image has a NaN pixel", {"disturb": "nan"}),
    "huge": ("one image is a million times too bright", {"disturb": "huge"}),
    "ood-10": ("10 % of each batch belong to no class", {"disturb": "ood:0.1"}),
    "ood-50": ("50 % of each batch belong to no class", {"disturb": "ood:0.5"}),
    "replay-10": ("10 % of each batch are repeated images that the source gets wrong", {"disturb": "replay:0.1"}),
    "crafted-10": (
        "10 % of each batch are crafted by an attacker who knows the source model", {"disturb": "crafted:0.1"}
    ),
}  # fmt: skip
"""A description of each scenario, and the settings it changes. `mixed` joins a target with `with_next_domain`."""
SAFE: Spec = ("tsd", {"preset": "safe"})
FIXED = ("stream", "stream_options", "repeat", "disturb", "reset")  # settings that scenarios change
QUICK = {"limit": 256, "repeat": 4}


class Stress(Sweep):
    """A sweep over scenarios × targets × seeds × methods; the frozen source is always included."""

    scenario: Annotated[list[str], OneOrMany] = Field(list(SCENARIOS), min_length=1, description="all, if left out")
    quick: bool = Field(False, description="one seed, one target, 256 images: a first look")

    @model_validator(mode="after")
    def _check_scenarios(self) -> Self:
        for name in self.scenario:
            check_known(name, SCENARIOS, "scenario")
        for name in FIXED:
            if getattr(self, name) != Sweep.model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name} is set by the scenarios: leave it out, or use `trueup bench`")
        if self.batch is not None and (len(self.batch) > 1 or self.batch[0] in SMALL):
            raise ValueError(f"batch={self.batch} must be one number, and none of {SMALL}, which are scenarios")
        return self

    def runs(self, opened: Open | None = None) -> list[Run]:
        """Return all runs, each once, scenario by scenario, checked before anything starts."""
        found = super().runs(opened)
        if not found:
            raise ValueError(f"no scenario is left: {'; '.join(self.left_out(opened))}")
        return found

    def runs_on(self, dataset: Dataset) -> Iterator[Run]:
        """Yield the runs of all scenarios that fit a dataset."""
        for scenario in self.scenario:
            if not self._unfit(dataset, scenario):
                yield from self.variant(dataset, scenario).runs_on(dataset)

    def left_out(self, opened: Open | None = None) -> list[str]:
        """Return the scenarios that do not fit, each with the reason."""
        import_plugins(self.plugin)
        datasets = [(opened or self.open)(name, self.reading_of(name)) for name in self.dataset]
        reasons = [(s, d.name, self._unfit(d, s)) for d in datasets for s in self.scenario]
        return [f"{scenario} is left out on {name}: {reason}" for scenario, name, reason in reasons if reason]

    def variant(self, dataset: Dataset, scenario: str) -> Sweep:
        """Return the sweep of one scenario on one dataset."""
        values = {name: getattr(self, name) for name in Sweep.model_fields} | SCENARIOS[scenario][1]
        targets = list(self.target or dataset.targets)[: 1 if self.quick else None]
        limits = [limit for limit in (self.limit, values["limit"], self.quick and QUICK["limit"]) if limit]
        values |= {"dataset": [dataset.name], "target": targets, "limit": min(limits, default=None)}
        specs = [*default_methods(dataset.task), SAFE] if self.method is None else self.method
        values["method"] = specs if any(name == "source" for name, _ in specs) else [("source", {}), *specs]
        if self.quick:
            values |= {"seed": self.seed[:1], "repeat": min(values["repeat"], QUICK["repeat"])}
        if scenario == "mixed":
            values["target"] = [with_next_domain(dataset, target) for target in targets]
        return Sweep(**values)

    def _unfit(self, dataset: Dataset, scenario: str) -> str:
        """Return why a scenario does not fit a dataset; empty if it does."""
        changes = SCENARIOS[scenario][1]
        by_class = changes.get("stream") in BY_CLASS or changes.get("disturb", "").partition(":")[0] in BY_ANSWER
        if by_class and dataset.structures:
            return "it needs classes, and this dataset has masks"
        if scenario == "mixed":
            if any("+" not in with_next_domain(dataset, target) for target in self.target or dataset.targets):
                return "there is no other domain to mix a target with"
            try:
                list(self.variant(dataset, scenario).runs_on(dataset))
            except (ValueError, OSError) as error:
                return " ".join(str(error).split())
        return ""


def with_next_domain(dataset: Dataset, target: str) -> str:
    """Join a target with the next one in the dataset's order, the last with the first.

    A corruption keeps its severity. A joined target, or the only one, is returned unchanged.
    """
    base, dash, severity = target.partition("-") if dataset.clean else (target, "", "")
    names = dataset.targets
    if "+" in target or base not in names or len(names) < 2:
        return target
    follower = names[(names.index(base) + 1) % len(names)]
    return f"{target}+{follower}{dash}{severity}"


def scenario_of(settings: Mapping[str, Any]) -> str:
    """Return the scenario of a run, from the settings in its record."""
    kind, _, share = settings.get("disturb", "").partition(":")
    if kind:
        return f"{kind}-{100 * float(share):g}" if share else kind
    if settings.get("repeat", 1) > 1:
        return "long"
    if settings["stream"] != "iid":
        return str(settings["stream"])
    return f"batch-{settings['batch']}" if settings["batch"] in SMALL else "iid"


def label_of(settings: Mapping[str, Any]) -> str:
    """Return the label of a run with a preset, from the settings in its record; empty for others."""
    hyper, safe = settings.get("hyper", {}), with_preset("safe", {})
    return f"{settings['method']}, safe" if settings.get("guard") and safe.items() <= hyper.items() else ""
