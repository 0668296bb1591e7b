"""What users rely on is written down here; a change to it is a decision."""

import inspect
from pathlib import Path

import trueup
import trueup.testing

PUBLIC = """
Adapter Event GradientMethod Guard Health Info Method Output SplitModel __version__ adapt get_method list_methods
register rules run streams zero_shot
"""
ADAPTER = """
answer checkpoint fork forward frozen load pause prepare reset resume save train unwrap
"""
# Used by the other modules of the core; not for users.
ADAPTER_PARTS = """
act make_memory make_optimizer mutable_tensors source_digest warn_once
"""
HOOKS = """
after forward hyperparameters init loss observe predict prepare rows
"""
METHODS = {
    "source": "norm episodic",
    "bn": "norm episodic",
    "tent": "lr params steps norm episodic",
    "pl": "lr params steps threshold norm episodic",
    "shot-im": "lr params steps norm episodic",
    "t3a": "per_class norm episodic",
    "eta": "lr params steps margin redundancy momentum norm episodic",
    "eata": "lr params steps margin redundancy momentum fisher_weight norm episodic",
    "lame": "affinity neighbors symmetric norm episodic",
    "tsd": "lr params steps per_class neighbors alignment consistency variant search norm episodic",
    "tent-clf": "lr params steps norm episodic",
    "pl-clf": "lr params steps threshold norm episodic",
    "bn-alpha": "norm episodic",
    "bn-prior": "norm episodic",
    "rdumb": "lr params steps margin redundancy momentum every norm episodic",
    "shot": "lr params steps threshold label_weight norm episodic",
    "tent-prebn": "lr params steps norm episodic",
    "sar": "lr params steps margin spared recovery momentum norm episodic",
    "deyo": "lr params steps margin weight_margin fall patches spared momentum norm episodic",
    "roid": "lr params steps temperature keep prior norm episodic",
    "memo": "lr params steps views norm episodic",
    "note": "lr params steps capacity every norm episodic",
    "rotta": "lr params steps capacity every momentum norm episodic",
    "cotta": "lr params steps views confidence momentum restore chunk norm episodic",
    "tast": "lr params steps per_class neighbors members norm episodic",
    "tast-bn": "lr params steps per_class neighbors capacity norm episodic",
    "adacontrast": "lr params steps neighbors warmup capacity temperature momentum crop norm episodic",
}
DEFAULTS = {
    "tent": {"lr": 1e-3, "params": "norm", "norm": "batch"},
    "pl": {"params": "all", "norm": "batch", "threshold": 0.9},
    "shot-im": {"params": "backbone", "norm": "batch"},
    "t3a": {"per_class": 100, "norm": "source"},
    "eta": {"lr": 2.5e-4, "margin": 0.4, "redundancy": "auto", "momentum": 0.9, "params": "norm"},
    "eata": {"fisher_weight": 2000.0},
    "lame": {"affinity": "knn", "neighbors": 5, "symmetric": False, "norm": "source"},
    "tsd": {"lr": 1e-4, "per_class": 100, "neighbors": 3, "alignment": 0.1, "consistency": True, "steps": 1},
    "tent-clf": {"lr": 5e-5, "params": "head", "norm": "source"},
    "pl-clf": {"lr": 5e-5, "params": "head", "threshold": 0.9, "norm": "source"},
    "bn-alpha": {"norm": "mix:0.1"},
    "bn-prior": {"norm": "prior:16"},
    "rdumb": {"lr": 2.5e-4, "params": "norm", "every": 1000},
    "shot": {"lr": 1e-4, "params": "backbone", "threshold": 0.9, "label_weight": 0.1, "norm": "batch"},
    "tent-prebn": {"lr": 5e-5, "params": "none", "norm": "source"},
    "sar": {"lr": 2.5e-4, "params": "norm", "margin": 0.4, "spared": 0.25, "momentum": 0.9, "norm": "batch"},
    "deyo": {"lr": 2.5e-4, "params": "norm", "margin": 0.5, "weight_margin": 0.4, "fall": 0.2, "patches": 4},
    "roid": {"lr": 1e-3, "params": "norm", "temperature": 1 / 3, "keep": 0.99, "prior": "logits", "norm": "batch"},
    "memo": {"lr": 0.005, "params": "all", "views": 32, "norm": "mix:0.0588235"},
    "note": {"lr": 1e-4, "params": "norm", "capacity": 64, "every": 64, "norm": "instance:4"},
    "rotta": {"lr": 1e-3, "params": "norm", "capacity": 64, "every": 64, "momentum": 0.999, "norm": "ema:0.05"},
    "cotta": {"lr": 1e-3, "params": "all", "views": 32, "confidence": 0.92, "momentum": 0.999, "restore": 0.01},
    "tast": {"lr": 1e-3, "params": "none", "per_class": 100, "neighbors": 4, "members": 10, "norm": "source"},
    "tast-bn": {"lr": 1e-3, "params": "norm", "per_class": 20, "neighbors": 4, "capacity": 150, "norm": "batch"},
    "adacontrast": {"lr": 2e-4, "params": "all", "neighbors": 10, "warmup": 1024, "capacity": 16384, "crop": 0.2},
}


def own(cls: type) -> set[str]:
    ours = [base for base in cls.__mro__ if base.__module__.startswith("trueup.")]
    return {n for base in ours for n, v in vars(base).items() if inspect.isfunction(v) and not n.startswith("_")}


def test_names() -> None:
    assert set(trueup.__all__) == set(PUBLIC.split())
    assert all(hasattr(trueup, name) for name in trueup.__all__)
    assert own(trueup.Adapter) == {*ADAPTER.split(), *ADAPTER_PARTS.split()}
    assert own(trueup.Method) == set(HOOKS.split())


def test_methods_and_their_hyperparameters() -> None:
    ours = [n for n in trueup.list_methods() if trueup.get_method(n).__module__.startswith("trueup.methods.")]
    assert ours == list(METHODS)
    for name, hyper in METHODS.items():
        assert list(trueup.get_method(name)().hyperparameters()) == hyper.split()


def test_defaults() -> None:
    for name, values in DEFAULTS.items():
        assert trueup.get_method(name)().hyperparameters().items() >= values.items()


def test_the_readme_names_every_method() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    _, _, section = text.partition("\n## Methods\n")
    listed = section.partition("\n## ")[0]
    assert [name for name in METHODS if f"`{name}`" not in listed] == []


def test_adapt_takes() -> None:
    parameters = inspect.signature(trueup.adapt).parameters
    assert list(parameters) == [
        "model", "method", "preset", "guard", "head", "output", "example", "multilabel", "mean", "std", "seed",
        "precision", "channels_last", "compile", "memory", "hyper",
    ]  # fmt: skip
