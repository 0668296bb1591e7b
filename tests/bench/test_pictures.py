"""The picture shows what methods said, of the images that it says."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

import trueup
from trueup.bench.pictures import COLOURS, Example, draw, examples
from trueup.bench.protocol import Stage
from trueup.core.registry import make_method
from trueup.data.datasets import open_dataset
from trueup.data.loading import Loader, Place
from trueup.source.nets import build


def stage() -> Stage:
    torch.manual_seed(0)
    dataset = open_dataset("fundus-sim")
    loader = Loader(Place([dataset.domain("handheld")]), 32, "half")
    stream = [np.array([3, 1, 4]), np.array([15, 9]), np.array([2, 6, 5])]
    return Stage(build("small-unet", 3), loader, stream, structures=dataset.structures)


def test_examples_are_the_last_of_the_stream_as_each_method_sees_them_by_then() -> None:
    here = stage()
    methods = [make_method(name, {}, "segmentation") for name in ("source", "tsd")]
    ticks = []
    found = examples(here, methods, 4, lambda done, of: ticks.append((done, of)))
    assert [e.name for e in found] == ["handheld-009", "handheld-002", "handheld-006", "handheld-005"]
    assert ticks == [(0, 2), (1, 2), (2, 2)]
    domain = here.loader.place.domains[0]
    for name in ("source", "tsd"):
        adapter = trueup.adapt(here.model, name)
        answers = [adapter(x) for x, _ in here.loader.batches(here.stream)]
        last = torch.cat(answers)[-4:].softmax(dim=1)
        up = torch.nn.functional.interpolate(last, size=128, mode="bilinear")  # Pillow's way, but for the border
        for example, expected in zip(found, up.argmax(dim=1).numpy(), strict=True):
            inner = np.s_[4:-4, 4:-4]
            assert np.mean(example.answers[name]["disc"][inner] == (expected > 0)[inner]) > 0.99
            assert np.mean(example.answers[name]["cup"][inner] == (expected == 2)[inner]) > 0.99
    for example, i in zip(found, (9, 2, 6, 5), strict=True):
        assert np.array_equal(example.image, domain.image(i))
        assert np.array_equal(example.truth["disc"], domain.mask(i) > 0)


def test_outlines_are_drawn_where_the_masks_are(tmp_path: Path) -> None:
    grey = np.full((64, 64, 3), 90, dtype=np.uint8)
    left, right = np.zeros((64, 64), dtype=bool), np.zeros((64, 64), dtype=bool)
    left[20:40, 5:25], right[20:40, 40:60] = True, True
    nothing = np.zeros((64, 64), dtype=bool)
    example = Example("a", grey, {"disc": left}, {"tent": {"disc": right}, "tsd": {"disc": nothing}})
    draw({"screening": [example], "handheld": [example, example]}, tmp_path / "deep" / "masks.png")
    picture = np.asarray(Image.open(tmp_path / "deep" / "masks.png").convert("RGB")).astype(int)
    assert picture.shape[0] > picture.shape[1] * 0.7  # three rows of four
    colour = np.array([int(COLOURS[0][k : k + 2], 16) for k in (1, 3, 5)])
    outline = np.abs(picture - colour).sum(axis=2) < 60
    columns = np.array_split(outline[: int(0.95 * len(outline))], 4, axis=1)  # the legend is below
    image, truth, tent, tsd = (part.sum() for part in columns)
    assert image == tsd == 0
    assert truth > 500
    assert tent > 500
    middle = columns[1].shape[1] // 2
    assert columns[1][:, :middle].sum() > 0.9 * truth
    assert columns[2][:, middle:].sum() > 0.9 * tent
