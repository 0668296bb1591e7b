"""Settings of a run, and sweeps that describe many runs in a few lines."""

from __future__ import annotations

import difflib
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from trueup.bench.hparam_search import search_grid
from trueup.bench.intruders import normalize_disturbance, parse_disturbance
from trueup.bench.method_spec import Spec, as_list, cast_values, parse_numbers, read_specs, split_guard
from trueup.core.registry import get_method, list_methods, make_method
from trueup.data.datasets import Dataset, open_dataset
from trueup.data.domains import parse_corruption
from trueup.data.pictures import Reading
from trueup.data.streams import order
from trueup.source.checkpoints import describe_given, digest_of_file
from trueup.source.networks import find_network, network_code
from trueup.source.recipe import GivenModel, Recipe, Settings, Training, training_for
from trueup.source.tasks import task_of

PAPER_METHODS = ("source", "bn", "tent", "pl", "shot-im", "t3a", "eta", "lame", "tsd")
"""The methods that the paper compares."""
MASK_METHODS = ("source", "bn", "tent", "pl", "shot-im", "eta", "tsd")
"""Those of them that work on masks."""

_SIM, _DEEPLAB = ("small-unet", "none"), ("smp:deeplabv3plus/mobilenet_v2", "imagenet")
NETWORKS = {
    "digits": ("digits-net", "none"),
    "cifar": ("resnet26-cifar", "none"),
    **dict.fromkeys(("fundus-sim", "cardiac-sim", "prostate-sim"), _SIM),
    **dict.fromkeys(("fundus", "cardiac", "prostate", "masks"), _DEEPLAB),
}
BATCHES = {"digits": 64, "imagenet": 64, **dict.fromkeys(("fundus", "cardiac", "prostate", "masks"), 8)}
BY_CLASS = ("dirichlet", "class-sorted", "gradual", "label-shift", "few-classes")  # streams that need classes
BY_ANSWER = ("replay", "crafted")  # disturbances that need classes
Select = Literal["default", "source", "oracle"]
# Left out of records, so that hashes of older runs do not change.
OMITTED_HYPER = {("tsd", "search"): "exact"}
Disturb = Annotated[str, AfterValidator(normalize_disturbance)]
Open = Callable[[str, Reading], Dataset]


class Run(Settings):
    """All settings of one method on one stream."""

    dataset: str
    data: str = Field("", description="fingerprint of the files, for datasets on disk")
    target: str = Field(description="a domain, or several joined by +")
    network: str
    weights: str
    code: dict[str, str] = Field(
        default_factory=dict, description="SHA-256 of the file of a user's own method or network"
    )
    source: Training | GivenModel = Field(description="how the model was trained, or its file")
    method: str
    hyper: dict[str, Any] = Field(description="all hyper-parameters that are not searched")
    seed: int = Field(0, ge=0)
    stream: str = "iid"
    stream_options: dict[str, Any] = Field(default_factory=dict)
    batch: int = Field(128, ge=1)
    limit: int | None = Field(None, ge=1, description="only this many images of the stream")
    reset: bool = Field(False, description="reset the adapter when the stream enters another domain")
    select: Select = Field("default", description="hyper-parameters: default, or searched on source, or oracle")
    guard: bool = Field(False, description="use a guard")
    repeat: int = Field(1, ge=1, description="number of passes over the stream, each in a new order")
    disturb: Disturb = Field("", description="rows added to batches: nan, huge, ood:0.1, replay:0.1, crafted:0.1")

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the domains of the stream."""
        return tuple(self.target.split("+"))

    def recipe(self, dataset: Dataset) -> Recipe | None:
        """Return the recipe of the source model; None if the model is a file."""
        if isinstance(self.source, GivenModel):
            return None
        return Recipe(
            dataset=self.dataset,
            data=self.data,
            sources=dataset.sources(self.targets),
            classes=dataset.outputs(multilabel=self.source.multilabel),
            network=self.network,
            weights=self.weights,
            code=self.code.get("network", ""),
            seed=self.seed,
            training=self.source,
        )


OneOrMany = BeforeValidator(as_list)


class Sweep(Settings):
    """Runs over datasets × networks × targets × streams × batches × seeds × methods."""

    dataset: Annotated[list[str], OneOrMany] = Field(["digits"], min_length=1)
    root: str | dict[str, str] | None = Field(None, description="the dataset's folder, or one for each dataset")
    target: Annotated[list[str], OneOrMany] | None = Field(None, description="domains; default all; a+b is one stream")
    network: Annotated[list[str], OneOrMany] | None = None
    weights: str | None = Field(None, description="none, imagenet, or a file")
    checkpoint: str | None = Field(None, description="a trained model's file; {target} and {seed} are filled in")
    training: dict[str, Any] = Field(default_factory=dict)
    method: Annotated[list[Spec], BeforeValidator(read_specs)] | None = Field(
        None, min_length=1, description="default: all that the paper compares"
    )
    seed: Annotated[list[Annotated[int, Field(ge=0)]], OneOrMany] = Field([0, 1, 2], min_length=1)
    stream: Annotated[list[str], OneOrMany] = Field(["iid"], min_length=1)
    stream_options: Annotated[dict[str, Any], BeforeValidator(parse_numbers)] = Field(default_factory=dict)
    batch: Annotated[list[Annotated[int, Field(ge=1)]], OneOrMany] | None = None
    limit: int | None = Field(None, ge=1)
    reset: bool = False
    select: Annotated[list[Select], OneOrMany] = Field(["default"], min_length=1)
    repeat: int = Field(1, ge=1)
    disturb: Disturb = ""
    plugin: Annotated[list[str], OneOrMany] = Field([], description="modules to import first, for your own methods")

    def root_of(self, dataset: str) -> str | None:
        """Return the folder of a dataset."""
        return self.root.get(dataset) if isinstance(self.root, dict) else self.root

    def reading_of(self, dataset: str) -> Reading:
        """Return how the settings read pictures; a checkpoint may read them in another way."""
        return training_for(dataset, self.training).reading

    def open(self, dataset: str, reading: Reading | None = None) -> Dataset:
        """Open a dataset of the sweep."""
        return open_dataset(dataset, self.root_of(dataset), reading or self.reading_of(dataset))

    def file_of(self, run: Run) -> str | None:
        """Return the file of a run's weights or trained model; None if it has none."""
        if self.checkpoint is not None:
            return fill_path(self.checkpoint, run.target, run.seed)
        return self.weights if run.weights.startswith("sha256:") else None

    def runs(self, opened: Open | None = None) -> list[Run]:
        """Return all runs, each once, checked before anything starts; `opened`: a cached `open`."""
        import_plugins(self.plugin)
        datasets = [(opened or self.open)(name, self.reading_of(name)) for name in self.dataset]
        return list({run.digest(): run for dataset in datasets for run in self.runs_on(dataset)}.values())

    def runs_on(self, dataset: Dataset) -> Iterator[Run]:
        """Yield the runs on one of the datasets."""
        name = dataset.name
        network, weights = next((v for k, v in NETWORKS.items() if name.startswith(k)), ("resnet50", "imagenet"))
        weights = self.weights or weights
        if weights not in ("none", "imagenet"):
            weights = digest_of_file(weights)
        batch = next((v for k, v in BATCHES.items() if name.startswith(k)), 128)
        training = training_for(name, self.training)
        task_of(dataset, training)  # refuses a training for another task
        self._check(dataset, self.network or [network])
        # Read a model's file once for each target and seed, not for each method.
        given = itertools.product(self.target or dataset.targets, self.seed) if self.checkpoint else ()
        models = {(target, seed): self._model(name, target, seed, training) for target, seed in given}
        for net, stream, size, select, target, seed, (method, spec) in itertools.product(
            self.network or [network], self.stream, self.batch or [batch], self.select,
            self.target or dataset.targets, self.seed, self.method or default_methods(dataset.task),
        ):  # fmt: skip
            source = models.get((target, seed), training)
            hyper, guard = split_guard(spec)
            values = resolve_hyper(method, hyper, select, dataset.task)
            code = {"network": network_code(net), "method": method_code(method, dataset.task)}
            yield Run(
                dataset=name, data=dataset.fingerprint, target=target, network=net, source=source,
                weights="" if isinstance(source, GivenModel) else weights,
                code={key: v for key, v in code.items() if v},
                method=method, hyper=values, seed=seed, stream=stream,
                stream_options=self.stream_options, batch=size, limit=self.limit, reset=self.reset,
                select=select if search_grid(method, hyper, dataset.task) else "default",
                guard=guard, repeat=self.repeat, disturb=self.disturb,
            )  # fmt: skip

    def _model(self, dataset: str, target: str, seed: int, training: Training) -> GivenModel:
        """Describe the file of a trained model; refuse training settings that contradict it."""
        file = fill_path(self.checkpoint or "", target, seed)
        model = describe_given(file, target.split("+"), dataset, training)
        for key in ("normalize", "grey"):
            own, asked = getattr(model, key), getattr(training, key)
            if key in self.training and own != asked:
                raise ValueError(f"{file} was trained with {key}={own}, not {asked}: leave it out, the file states it")
        return model

    def _check(self, dataset: Dataset, networks: Iterable[str]) -> None:
        """Refuse settings that would fail every run, before anything starts."""
        for network in networks:
            find_network(network)
        if self.checkpoint is not None and "source" in self.select:
            raise ValueError("a search needs source images that training held out, which a checkpoint does not have")
        if self.disturb and dataset.structures and parse_disturbance(self.disturb).kind in BY_ANSWER:
            raise ValueError(f"disturb={self.disturb!r} does not fit {dataset.name}, which has masks, not classes")
        for target in self.target or dataset.targets:
            parts = target.split("+")
            if len(set(parts)) < len(parts):
                raise ValueError(f"target {target!r} names a domain twice")
            for part in parts:
                base = part.partition("-")[0] if dataset.clean else part
                domains = dataset.domains or dataset.targets
                check_known(base.partition(":")[0] if dataset.structures else base, domains, "domain")
                if dataset.clean:
                    parse_corruption(part)
                if dataset.structures:
                    dataset.domain(part)  # refuses unknown parts of a domain
            if self.checkpoint is None:
                dataset.sources(parts)
            for stream in self.stream:  # ordering two images checks the stream's settings
                order(stream, [0, 0], [0, len(parts) - 1], 0, **self.stream_options)
                if (stream in BY_CLASS and dataset.structures) or (stream == "cases" and not dataset.structures):
                    why = "has masks, not classes" if dataset.structures else "has images, not cases"
                    raise ValueError(f"the stream {stream!r} does not fit {dataset.name}, which {why}")
                if stream == "mixed" and self.reset and len(parts) > 1:
                    raise ValueError("reset does not go with the stream 'mixed', which changes domain all the time")


def fill_path(path: str, target: str, seed: int) -> str:
    """Fill {target} and {seed} into a path."""
    try:
        return path.format(target=target, seed=seed)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"checkpoint={path!r} may hold {{target}} and {{seed}}, and nothing else in braces") from error


def default_methods(task: str) -> list[Spec]:
    """Return the methods that the paper compares and that support the task."""
    return [(name, {}) for name in (PAPER_METHODS if task == "classification" else MASK_METHODS)]


def method_code(method: str, task: str) -> str:
    """Return the hash of a user's own method file, so that a changed method is run again; empty for built-in ones."""
    cls = get_method(method, task)
    return "" if cls.__module__.startswith("trueup.") else digest_of_file(inspect.getsourcefile(cls) or __file__)


def resolve_hyper(
    method: str, given: Mapping[str, Any], select: Select, task: str = "classification"
) -> dict[str, Any]:
    """Return all hyper-parameters with their values, without those that are searched."""
    check_known(method, list_methods(), "method")
    searched = {} if select == "default" else {key: 0 for c in search_grid(method, given, task) for key in c}
    try:
        full = make_method(method, cast_values(method, given, task), task).hyperparameters()
    except TypeError as error:
        raise ValueError(str(error)) from error
    values = {key: value for key, value in cast_values(method, full, task).items() if key not in searched}
    return {key: value for key, value in values.items() if value != OMITTED_HYPER.get((method, key), ())}


def import_plugins(modules: Iterable[str]) -> None:
    """Import modules that register methods, installed or in the current folder."""
    for module in modules:
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            importlib.import_module(module)
        except Exception as error:
            raise ValueError(f"plugin {module!r} cannot be imported: {type(error).__name__}: {error}") from error


def check_known(name: str, names: Iterable[str], kind: str) -> None:
    """Refuse a name that is not in the list, and suggest a similar one."""
    names = list(names)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no {kind} is called {name!r}.{hint} There are: {', '.join(names)}")


def read_settings(path: str | Path, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Read the settings of a YAML file; flags override them."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold settings such as `dataset: digits`")
    for group in ("training", "stream_options"):
        if isinstance(values.get(group), dict) and group in flags:
            flags = {**flags, group: {**values[group], **flags[group]}}
    return {**values, **flags}


def make_sweep(values: Mapping[str, Any]) -> Sweep:
    """Make a sweep from settings; raise a ValueError with the first mistake."""
    return validate_settings(Sweep, values)


S = TypeVar("S", bound=Sweep)


def validate_settings(kind: type[S], values: Mapping[str, Any]) -> S:
    """Make a sweep of this class from settings; raise a ValueError with the first mistake."""
    training = values.get("training") or {}
    if not isinstance(training, Mapping):
        raise ValueError(f"training must be settings such as `iterations: 500`, not {training!r}")
    for group, cls in ((values, kind), (training, Training)):
        for key in group:
            check_known(str(key), cls.model_fields, "setting")
    try:
        training_for("", training)
    except ValidationError as error:
        raise ValueError(_first_mistake(error, "training")) from error
    try:
        return kind(**values)
    except ValidationError as error:
        raise ValueError(_first_mistake(error)) from error


def _first_mistake(error: ValidationError, *group: str) -> str:
    first = error.errors()[0]
    setting = ".".join(str(part) for part in (*group, *first["loc"]))
    reason = first["msg"].removeprefix("Value error, ")
    return f"{setting}: {reason} (it is {first['input']!r})" if setting else reason
