"""Our methods return what public implementations return, batch by batch."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trueup

FILES = sorted((Path(__file__).parent / "golden").glob("*.npz"))
DATA = {path.stem: dict(np.load(path)) for path in FILES}
RUNS = [
    (stem, key.removeprefix("outputs/")) for stem, data in DATA.items() for key in data if key.startswith("outputs/")
]


class Reference(nn.Module):
    """The network of the reference runs."""

    def __init__(self, widths: list[int], classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in zip([3, *widths], widths, strict=False):
            layers += [nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))


def hyperparameters(run: str, settings: dict) -> tuple[str, dict]:
    """Method and hyper-parameters of a run, from its name."""
    if match := re.fullmatch(r"t3a-m(\d+)", run):
        return "t3a", {"per_class": kept(match[1])}
    if match := re.fullmatch(r"tsd-released-m(\d+)-lam([\d.]+)", run):
        hyper = {"variant": "released", "per_class": kept(match[1]), "alignment": float(match[2]), "lr": settings["lr"]}
        return "tsd", hyper
    if match := re.fullmatch(r"lame-([a-z]+)(\d*)(-sym)?", run):
        return "lame", {"affinity": match[1], "neighbors": int(match[2] or 5), "symmetric": bool(match[3])}
    eta = {"lr": settings["lr_affine"], "margin": settings["e_margin"], "redundancy": settings["d_margin"]}
    return {
        "erm": ("source", {}),
        "bn": ("bn", {}),
        "tent": ("tent", {"lr": settings["lr_affine"]}),
        "pl": ("pl", {"lr": settings["lr"]}),
        "shot-im": ("shot-im", {"lr": settings["lr"]}),
        "eta": ("eta", eta),
        "eata": ("eata", {**eta, "fisher_weight": 20.0}),
    }[run]


def kept(text: str) -> int | None:
    return None if text == "1000000" else int(text)


@pytest.mark.parametrize(("stem", "run"), RUNS, ids=[f"{stem}-{run}" for stem, run in RUNS])
def test_reference_outputs_are_reproduced(stem: str, run: str) -> None:
    data = DATA[stem]
    settings = json.loads(str(data["settings"]))
    model = Reference(settings["widths"], settings["classes"]).eval()
    prefix = "weights/"
    weights = {k.removeprefix(prefix): torch.from_numpy(v) for k, v in data.items() if k.startswith(prefix)}
    model.load_state_dict(weights)
    method, hyper = hyperparameters(run, settings)
    inputs = torch.from_numpy(data["inputs"])
    adapter = trueup.adapt(model, method, example=inputs[0], **hyper)
    if run == "eata":  # the reference has made-up Fisher information
        for i, fisher in enumerate(adapter.state.fisher.buffers()):
            fisher.fill_(0.5 + 0.1 * i)
        adapter.prepared = True
    for t, expected in enumerate(data[f"outputs/{run}"]):
        answer = adapter(inputs[t])
        answer = answer.exp() if method == "lame" else answer
        worst = float((answer - torch.from_numpy(expected)).abs().max())
        assert worst <= 1e-4, f"batch {t}"


def test_a_million_per_class_is_no_filter() -> None:
    data = DATA["reference-a"]
    settings = json.loads(str(data["settings"]))
    model = Reference(settings["widths"], settings["classes"]).eval()
    inputs = torch.from_numpy(data["inputs"])
    many, every = (trueup.adapt(model, "t3a", per_class=m) for m in (1_000_000, None))
    for x in inputs:
        torch.testing.assert_close(many(x), every(x))
