"""Models of public libraries in small, and the page that says which methods run on them.

`python tests/zoo.py > docs/models.md` makes the page anew.
"""

import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import monai.networks.nets as monai_nets
import open_clip
import segmentation_models_pytorch as smp
import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn

import trueup

METHODS = ("tsd", "bn", "tent", "pl", "shot-im", "eta", "sar", "cotta", "t3a", "lame", "roid", "note")
CLASSES = 5


@dataclass(frozen=True)
class Entry:
    """A model of a library: its name on the page, how it is made in small, and the head that is found in it."""

    library: str
    name: str
    make: Callable[[], nn.Module]
    head: str | None
    shape: tuple[int, ...] = (3, 32, 32)

    @property
    def id(self) -> str:
        """Its name in the tests."""
        return f"{self.library} {self.name}"

    def build(self) -> nn.Module:
        """Make it with random weights; a head of zeros, from which nothing can be learnt, is filled."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries speak of their own future
            model = self.make().eval()
        for layer in model.modules():
            if isinstance(layer, nn.Linear) and not layer.weight.any():
                nn.init.normal_(layer.weight, std=0.1)
        return model

    def batches(self) -> list[Tensor]:
        """Two batches of four images."""
        random = torch.Generator().manual_seed(1)
        return [torch.randn(4, *self.shape, generator=random) for _ in range(2)]


def _torchvision(name: str) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, weights=None, num_classes=CLASSES)


def _segmenter(name: str) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=CLASSES)


def _timm(name: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=CLASSES, **options)


def _hugging_face(name: str, task: str = "ImageClassification", **options: object) -> Callable[[], nn.Module]:
    config = getattr(transformers, f"{name}Config")
    return lambda: getattr(transformers, f"{name}For{task}")(config(num_labels=CLASSES, **options))


def _unet(axes: int, units: int) -> Callable[[], nn.Module]:
    options = {"channels": (4, 8), "strides": (2,), "num_res_units": units}
    return lambda: monai_nets.UNet(axes, in_channels=1, out_channels=CLASSES, **options)


def _densenet() -> nn.Module:
    return monai_nets.DenseNet(
        2, in_channels=1, out_channels=CLASSES, init_features=8, growth_rate=4, block_config=(2, 2)
    )


def _segresnet() -> nn.Module:
    return monai_nets.SegResNet(
        3, init_filters=8, in_channels=1, out_channels=CLASSES, blocks_down=(1, 1), blocks_up=(1,)
    )


def _zero_shot_open_clip() -> nn.Module:
    vision = {"image_size": 32, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8}
    text = {"context_length": 8, "vocab_size": 99, "width": 16, "heads": 2, "layers": 1}
    model = open_clip.CLIP(embed_dim=12, vision_cfg=vision, text_cfg=text)
    with torch.no_grad():
        return trueup.zero_shot(model, model.encode_text(torch.randint(1, 99, (CLASSES, 8))))


def _zero_shot_hugging_face() -> nn.Module:
    config = transformers.CLIPConfig(text_config=_BODY, vision_config=_BODY | _IMAGE, projection_dim=12)
    return trueup.zero_shot(transformers.CLIPModel(config), torch.randn(CLASSES, 12))


_BODY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_IMAGE = {"image_size": 32, "patch_size": 8}
_SWIN = {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
_SEGFORMER = {"num_encoder_blocks": 2, "sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2]}
_SEGFORMER |= {"num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16}

TINY = torchvision.models.VisionTransformer
ENTRIES = [
    Entry("torchvision", "ResNet-18", _torchvision("resnet18"), "fc"),
    Entry("torchvision", "MobileNetV3", _torchvision("mobilenet_v3_small"), "classifier.3"),
    Entry("torchvision", "ViT", lambda: TINY(32, 8, 2, 2, 16, 32, num_classes=CLASSES), "heads.head"),
    Entry("torchvision", "SqueezeNet", _torchvision("squeezenet1_1"), None),
    Entry("torchvision", "LR-ASPP", _segmenter("lraspp_mobilenet_v3_large"), None),
    Entry("torchvision", "DeepLabV3", _segmenter("deeplabv3_mobilenet_v3_large"), "classifier.4"),
    Entry("timm", "ConvNeXt", _timm("convnext_atto", depths=(1, 1, 1, 1)), "head.fc"),
    Entry("timm", "ViT", _timm("vit_tiny_patch16_224", img_size=32, depth=2), "head"),
    Entry("timm", "DeiT, distilled", _timm("deit_tiny_distilled_patch16_224", img_size=32, depth=2), None),
    Entry("transformers", "ViT", _hugging_face("ViT", **_BODY, **_IMAGE), "classifier"),
    Entry("transformers", "Swin", _hugging_face("Swin", **_SWIN), "classifier"),
    Entry("transformers", "DINOv2", _hugging_face("Dinov2", **_BODY, **_IMAGE), "classifier"),
    Entry("transformers", "ConvNeXt", _hugging_face("ConvNext", num_stages=2, **_STAGES), "classifier"),
    Entry("transformers", "ResNet", _hugging_face("ResNet", embedding_size=8, **_STAGES), "classifier.1"),
    Entry(
        "transformers", "SegFormer", _hugging_face("Segformer", "SemanticSegmentation", **_STAGES, **_SEGFORMER),
        "decode_head.classifier",
    ),
    Entry("transformers", "CLIP, zero-shot", _zero_shot_hugging_face, "head"),
    Entry("open_clip", "CLIP, zero-shot", _zero_shot_open_clip, "head"),
    Entry(
        "smp", "U-Net", lambda: smp.Unet("mobilenet_v2", encoder_weights=None, classes=CLASSES), "segmentation_head.0"
    ),
    Entry("MONAI", "DenseNet", _densenet, "class_layers.out", (1, 16, 16)),
    Entry("MONAI", "UNet", _unet(2, 0), "model.2.conv", (1, 16, 16)),
    Entry("MONAI", "UNet, residual, 3-D", _unet(3, 2), "model.2.1", (1, 8, 8, 8)),
    Entry("MONAI", "SegResNet, 3-D", _segresnet, "conv_final.2.conv", (1, 8, 8, 8)),
]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How a method fares on a model: it runs, it runs and changes nothing, or it is refused; and why."""

    word: str
    reason: str = ""


def try_method(entry: Entry, model: nn.Module, method: str) -> Outcome:
    """Run two batches."""
    with _warnings() as said:
        try:
            adapter = trueup.adapt(model, method)
            answers = [adapter(x) for x in entry.batches()]
        except ValueError as error:
            return Outcome("refused", _short(str(error)))
    assert all(y.isfinite().all() and y.shape[:2] == (4, CLASSES) for y in answers)
    assert not any("does not depend on any selected parameter" in message for message in said)
    idle = [message for message in said if "changes nothing" in message]
    return Outcome("idle", _short(idle[0])) if idle else Outcome("works")


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what the library logs in here instead of showing it."""
    said: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("trueup")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    before, log.propagate = log.propagate, False
    try:
        yield said
    finally:
        log.propagate = before
        log.removeHandler(handler)


def _short(message: str) -> str:
    """The reason in a message, without the way out and the names that are the model's own."""
    message = re.split(r"; |\. ", message)[0]
    return re.sub(r" \([^()]*\)", "", message)


def outcomes() -> dict[Entry, dict[str, Outcome]]:
    """Try every method on every model."""
    found = {}
    for entry in ENTRIES:
        model = entry.build()
        found[entry] = {method: try_method(entry, model, method) for method in METHODS}
    return found


def page() -> str:
    """Make docs/models.md."""
    found, notes = outcomes(), list[str]()
    lines = [f"| | | {' | '.join(f'`{m}`' for m in METHODS)} |", f"|---|---|{'---|' * len(METHODS)}"]
    for entry, row in found.items():
        cells = []
        for outcome in row.values():
            if outcome.reason and outcome.reason not in notes:
                notes.append(outcome.reason)
            number = f" {notes.index(outcome.reason) + 1}" if outcome.reason else ""
            cells.append({"works": "✓", "idle": "○", "refused": "–"}[outcome.word] + number)
        lines.append(f"| {entry.library} | {entry.name} | {' | '.join(cells)} |")
    reasons = [f"{i}. {note}" for i, note in enumerate(notes, start=1)]
    return PAGE.replace("TABLE", "\n".join(lines)).replace("REASONS", "\n".join(reasons))


PAGE = """\
# Models

`trueup.adapt` takes classifiers and segmenters as they are: of torchvision, timm, transformers, open_clip,
segmentation_models_pytorch, MONAI, or your own. A model may return a tensor, a dict with "out" or "logits", or an
object with `.logits`; otherwise `output=` names the part that holds the logits, or is a function that returns them. One
forward of the first batch finds the head: the last linear layer, convolution, transposed convolution, or sum of such
(a residual head) whose answer is the logits, also where they are resized later.

## Which methods run on which models

Each cell was tested with two batches on a small model of the family with random weights. ✓ works; ○ runs and changes
nothing, which is logged; – is refused with an error before anything has changed. The numbers are the reasons, below
the table.

TABLE

REASONS

`bn` sets the statistics of BatchNorm layers, so it changes nothing in models with LayerNorm or InstanceNorm alone.
Where nothing matches `params="norm"`, other parameters can be updated:
`trueup.adapt(model, "tent", params="all", lr=1e-5)`. `pl` needs neither a head nor normalisation layers.

## Hugging Face

```python
import torch
import trueup
from transformers import ViTConfig, ViTForImageClassification

small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
config = ViTConfig(**small, image_size=64, num_labels=7)
model = ViTForImageClassification(config)  # yours: ViTForImageClassification.from_pretrained(...)
adapter = trueup.adapt(model, "tsd")
logits = adapter(torch.randn(8, 3, 64, 64))  # a tensor (8, 7), not an object
logits = adapter(pixel_values=torch.randn(8, 3, 64, 64))  # called as the model is
```

## Volumes

3-D segmenters and classifiers are adapted as 2-D ones are: images are (N, channels, depth, height, width).

```python
from monai.networks.nets import UNet

model = UNet(3, in_channels=1, out_channels=3, channels=(8, 16), strides=(2,), num_res_units=2)
adapter = trueup.adapt(model, "tsd")
logits = adapter(torch.randn(2, 1, 16, 16, 16))  # (2, 3, 16, 16, 16)
```

MONAI's `UNet` has InstanceNorm without affine parameters by default, so methods with `params="norm"`, such as Tent,
need another `params=`; with `norm="batch"` or `norm=("instance", {"affine": True})` in the network they run as they
are.

## Zero-shot CLIP

```python
import open_clip

vision = {"image_size": 32, "layers": 2, "width": 32, "patch_size": 8, "head_width": 16}
text = {"context_length": 8, "vocab_size": 100, "width": 32, "heads": 2, "layers": 1}
clip = open_clip.CLIP(16, vision, text)  # yours: open_clip.create_model_and_transforms(...)
tokens = torch.randint(1, 100, (7, 8))  # yours: tokenizer(["a photo of a dog", ...]), one row per class

with torch.no_grad():
    text_features = clip.encode_text(tokens)  # several prompts per class: the mean of their unit features
classifier = trueup.zero_shot(clip, text_features)  # logits as the library's: scale × cosines
adapter = trueup.adapt(classifier, "tsd")
logits = adapter(torch.randn(8, 3, 32, 32))
```

The image encoder adapts; text features and scale stay as they are. CLIP and SigLIP of transformers are passed alike:
their text features are `model.get_text_features(...)`, or its `pooler_output` in newer versions. So does any encoder
that returns features, with `scale=`.

## What is refused, and the way out

| model | way out |
|---|---|
| softmax at the end | leave it out, or `output=torch.log` |
| sigmoid at the end (answers between 0 and 1) | leave it out, or `output=functools.partial(torch.logit, eps=1e-6)` |
| no classifier (`num_classes=0`, `fc = Identity()`) | pass the whole model; against text, `trueup.zero_shot` |
| `DataParallel`, `DistributedDataParallel` | `model.module` |
| TorchScript | the module that it was made from |
| int8 layers | adapt the float model and quantise `adapter.unwrap()` |
| `ultralytics.YOLO` | detectors are not supported; of a classifier pass `model.model`, with `output=` |
| two heads that are averaged, a map that is pooled after the head | a method that needs no head, or `head=` |
"""

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(page())
