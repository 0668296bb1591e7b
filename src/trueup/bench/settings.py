"""What a run is: its settings, all of them. And sweeps: many runs in a few lines."""

from __future__ import annotations

import difflib
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_serializer

from trueup.bench.grids import search_grid
from trueup.bench.intruders import normalize_disturbance, parse_disturbance
from trueup.bench.method_spec import Spec, as_list, cast_values, parse_numbers, read_specs, split_guard
from trueup.core.registry import get_method, list_methods, make_method
from trueup.data.datasets import Dataset, open_dataset
from trueup.data.domains import parse_corruption
from trueup.data.pictures import Reading
from trueup.data.streams import order
from trueup.source.checkpoints import describe_given, digest_of_file
from trueup.source.networks import check_network, network_code
from trueup.source.recipe import GivenModel, Recipe, Settings, Training, omit_defaults, training_for
from trueup.source.tasks import task_of

PAPER_METHODS = ("source", "bn", "tent", "pl", "shot-im", "t3a", "eta", "lame", "tsd")
"""The methods that the paper compares."""
MASK_METHODS = ("source", "bn", "tent", "pl", "shot-im", "eta", "tsd")
"""Those of them that make masks."""

_SIM, _DEEPLAB = ("small-unet", "none"), ("smp:deeplabv3plus/mobilenet_v2", "imagenet")
NETWORKS = {
    "digits": ("digits-net", "none"),
    "cifar": ("resnet26-cifar", "none"),
    **dict.fromkeys(("fundus-sim", "cardiac-sim", "prostate-sim"), _SIM),
    **dict.fromkeys(("fundus", "cardiac", "prostate", "masks"), _DEEPLAB),
}
BATCHES = {"digits": 64, "imagenet": 64, **dict.fromkeys(("fundus", "cardiac", "prostate", "masks"), 8)}
BY_CLASS = (
    "dirichlet",
    "class-sorted",
    "gradual",
    "label-shift",
    "few-classes",
)  # streams that go by the classes of images
BY_ANSWER = ("replay", "crafted")  # disturbances; both go by the classes of images
Select = Literal["default", "source", "oracle"]
QUIET = {"guard": False, "repeat": 1, "disturb": ""}  # said only where they are not so: older runs keep their names
QUIET_HYPER = {("tsd", "search"): "exact"}  # likewise
Disturb = Annotated[str, AfterValidator(normalize_disturbance)]


class Run(Settings):
    """One method on one stream: the protocol with every knob."""

    dataset: str
    data: str = Field("", description="fingerprint of the files, for datasets on disk")
    target: str = Field(description="a domain, or several joined by +")
    network: str
    weights: str
    code: dict[str, str] = Field(
        default_factory=dict, description="SHA-256 of the file of a method or network that is not of this library"
    )
    source: Training | GivenModel = Field(description="how the model was trained, or the file that it comes from")
    method: str
    hyper: dict[str, Any] = Field(description="all hyper-parameters, but those that are searched")
    seed: int = Field(0, ge=0)
    stream: str = "iid"
    stream_options: dict[str, Any] = Field(default_factory=dict)
    batch: int = Field(128, ge=1)
    limit: int | None = Field(None, ge=1, description="only this many images of the stream")
    reset: bool = Field(False, description="start afresh wherever the stream enters another domain")
    select: Select = Field("default", description="hyper-parameters: default, or searched on source, or oracle")
    guard: bool = Field(False, description="whether the adapter watches itself")
    repeat: int = Field(1, ge=1, description="how often the stream is run through, in a new order each time")
    disturb: Disturb = Field("", description="what is put into batches: nan, huge, ood:0.1, replay:0.1, crafted:0.1")

    @model_serializer(mode="wrap")
    def _quiet(self, dump: Callable[[Run], dict[str, Any]]) -> dict[str, Any]:
        return {
            key: value for key, value in omit_defaults(dump(self)).items() if key not in QUIET or value != QUIET[key]
        }

    @property
    def targets(self) -> tuple[str, ...]:
        """The domains of the stream."""
        return tuple(self.target.split("+"))

    def recipe(self, dataset: Dataset) -> Recipe | None:
        """How to make its source model; None if that is a file."""
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
    target: Annotated[list[str], OneOrMany] | None = Field(
        None, description="domains; all if left out; a+b is one stream"
    )
    network: Annotated[list[str], OneOrMany] | None = None
    weights: str | None = Field(None, description="none, imagenet, or a file")
    checkpoint: str | None = Field(None, description="a trained model's file; {target} and {seed} are filled in")
    training: dict[str, Any] = Field(default_factory=dict)
    method: Annotated[list[Spec], BeforeValidator(read_specs)] | None = Field(
        None, min_length=1, description="all that the paper compares, if left out"
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
    plugin: Annotated[list[str], OneOrMany] = Field([], description="modules to import first: methods of your own")

    def root_of(self, dataset: str) -> str | None:
        """The folder of a dataset."""
        return self.root.get(dataset) if isinstance(self.root, dict) else self.root

    def open(self, dataset: str, reading: Reading | None = None) -> Dataset:
        """A dataset of the sweep; `reading`: how a checkpoint reads pictures, if otherwise than the sweep says."""
        reading = reading or training_for(dataset, self.training).reading
        return open_dataset(dataset, self.root_of(dataset), reading)

    def file_of(self, run: Run) -> str | None:
        """The file of a run's weights or trained model, if it has one."""
        if self.checkpoint is not None:
            return fill_path(self.checkpoint, run.target, run.seed)
        return self.weights if run.weights.startswith("sha256:") else None

    def runs(self) -> list[Run]:
        """All runs, each once, checked before anything starts."""
        import_plugins(self.plugin)
        return list({run.digest(): run for name in self.dataset for run in self.runs_on(self.open(name))}.values())

    def runs_on(self, dataset: Dataset) -> Iterator[Run]:
        """The runs on one of its datasets."""
        name = dataset.name
        network, weights = next((v for k, v in NETWORKS.items() if name.startswith(k)), ("resnet50", "imagenet"))
        weights = self.weights or weights
        if weights not in ("none", "imagenet"):
            weights = digest_of_file(weights)
        batch = next((v for k, v in BATCHES.items() if name.startswith(k)), 128)
        training = training_for(name, self.training)
        task_of(dataset, training)  # refuses a training that is for another task
        self._check(dataset, self.network or [network])
        # A model's file is read once for each target and seed, not once for each method.
        models: dict[tuple[str, int], GivenModel] = {}
        for target, seed in itertools.product(self.target or dataset.targets, self.seed) if self.checkpoint else ():
            file = fill_path(self.checkpoint or "", target, seed)
            models[target, seed] = describe_given(file, target.split("+"), name, training)
            self._agree(models[target, seed], training, file)
        for net, stream, size, select, target, seed, (method, said) in itertools.product(
            self.network or [network], self.stream, self.batch or [batch], self.select,
            self.target or dataset.targets, self.seed, self.method or _usual(dataset.task),
        ):  # fmt: skip
            source = models.get((target, seed), training)
            hyper, guard = split_guard(said)
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

    def _agree(self, model: GivenModel, training: Training, file: str) -> None:
        """Refuse what was asked for where a model's file says otherwise."""
        for key in ("normalize", "grey"):
            own, asked = getattr(model, key), getattr(training, key)
            if key in self.training and own != asked:
                raise ValueError(f"{file} was trained with {key}={own}, not {asked}: leave it out, the file knows it")

    def _check(self, dataset: Dataset, networks: Iterable[str]) -> None:
        """Refuse what would fail every run, before anything starts."""
        for network in networks:
            check_network(network)
        if self.checkpoint is not None and "source" in self.select:
            raise ValueError("a search needs source images that training held out, so it cannot go with a checkpoint")
        if self.disturb and dataset.structures and parse_disturbance(self.disturb).kind in BY_ANSWER:
            raise ValueError(f"disturb={self.disturb!r} makes no sense here: {dataset.name} has masks, not classes")
        for target in self.target or dataset.targets:
            parts = target.split("+")
            if len(set(parts)) < len(parts):
                raise ValueError(f"target {target!r} names a domain twice")
            for part in parts:
                base = part.partition("-")[0] if dataset.clean else part
                there = dataset.domains or dataset.targets
                check_known(base.partition(":")[0] if dataset.structures else base, there, "domain")
                if dataset.clean:
                    parse_corruption(part)
                if dataset.structures:
                    dataset.domain(part)  # knows its parts
            if self.checkpoint is None:
                dataset.sources(parts)
            for stream in self.stream:  # what it says of two images tells what it thinks of its settings
                order(stream, [0, 0], [0, len(parts) - 1], 0, **self.stream_options)
                if (stream in BY_CLASS and dataset.structures) or (stream == "cases" and not dataset.structures):
                    what = "has masks, not classes" if dataset.structures else "has images, not cases"
                    raise ValueError(f"the stream {stream!r} makes no sense here: {dataset.name} {what}")
                if stream == "mixed" and self.reset and len(parts) > 1:
                    raise ValueError(
                        "reset makes no sense with the stream 'mixed', which enters another domain all the time"
                    )


def fill_path(path: str, target: str, seed: int) -> str:
    """A path with {target} and {seed} filled in."""
    try:
        return path.format(target=target, seed=seed)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"checkpoint={path!r} may hold {{target}} and {{seed}}, and nothing else in braces") from error


def _usual(task: str) -> list[Spec]:
    return [(name, {}) for name in (PAPER_METHODS if task == "classification" else MASK_METHODS)]


def method_code(method: str, task: str) -> str:
    """The hash of the file of a method that is not of this library, so that a changed one is run anew."""
    cls = get_method(method, task)
    return "" if cls.__module__.startswith("trueup.") else digest_of_file(inspect.getsourcefile(cls) or __file__)


def resolve_hyper(
    method: str, given: Mapping[str, Any], select: Select, task: str = "classification"
) -> dict[str, Any]:
    """All hyper-parameters with their values, without those that are searched."""
    check_known(method, list_methods(), "method")
    searched = {} if select == "default" else {key: 0 for c in search_grid(method, given, task) for key in c}
    try:
        full = make_method(method, cast_values(method, given, task), task).hyperparameters()
    except TypeError as error:
        raise ValueError(str(error)) from error
    said = {key: value for key, value in cast_values(method, full, task).items() if key not in searched}
    return {key: value for key, value in said.items() if value != QUIET_HYPER.get((method, key), ())}


def import_plugins(modules: Iterable[str]) -> None:
    """Import modules that register methods; the current folder counts."""
    for module in modules:
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            importlib.import_module(module)
        except Exception as error:
            raise ValueError(f"plugin {module!r} cannot be imported: {type(error).__name__}: {error}") from error


def check_known(name: str, names: Iterable[str], kind: str) -> None:
    """Refuse a name that is not on the list, and suggest one that is."""
    names = list(names)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no {kind} is called {name!r}.{hint} There are: {', '.join(names)}")


def read_sweep(path: str | Path, flags: Mapping[str, Any]) -> Sweep:
    """A sweep from a YAML file, with flags in place of what the file says."""
    return make_sweep(read_settings(path, flags))


def read_settings(path: str | Path, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a YAML file, with flags in place of what the file says."""
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
    """A sweep of these settings; the first thing wrong is said in one sentence."""
    return validate_settings(Sweep, values)


S = TypeVar("S", bound=Sweep)


def validate_settings(kind: type[S], values: Mapping[str, Any]) -> S:
    """A sweep of some kind of these settings; the first thing wrong is said in one sentence."""
    training = values.get("training") or {}
    if not isinstance(training, Mapping):
        raise ValueError(f"training must be settings such as `iterations: 500`, not {training!r}")
    for group, cls in ((values, kind), (training, Training)):
        for key in group:
            check_known(str(key), cls.model_fields, "setting")
    try:
        training_for("", dict(training))
    except ValidationError as error:
        raise ValueError(_first(error, "training")) from error
    try:
        sweep = kind(**values)
    except ValidationError as error:
        raise ValueError(_first(error)) from error
    return sweep


def _first(error: ValidationError, *group: str) -> str:
    first = error.errors()[0]
    where, said = ".".join(str(part) for part in (*group, *first["loc"])), first["msg"].removeprefix("Value error, ")
    return f"{where}: {said} (it is {first['input']!r})" if where else said
