"""Zero-shot classifiers: the image encoder of CLIP with a head of fixed text features."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.model.copy_model import check_model
from trueup.model.readout import CosineHead


class ZeroShot(nn.Module):
    """An image encoder whose unit features are compared with fixed text features; it returns logits."""

    def __init__(self, encoder: nn.Module, head: CosineHead) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.training = encoder.training

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the scaled similarities (N, classes) of images with the text features."""
        features = _features(self.encoder(pixel_values))
        if features.ndim != 2 or features.shape[1] != self.head.weight.shape[1]:
            raise ValueError(
                f"the encoder gives image features of shape {tuple(features.shape)} and text_features have "
                f"{self.head.weight.shape[1]} values each: both must come from one model"
            )
        logits: Tensor = self.head(F.normalize(features, p=2, dim=1))
        return logits


class ProjectedEncoder(nn.Module):
    """The vision model and the projection of a transformers model with two towers."""

    def __init__(self, vision_model: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.vision_model = vision_model
        self.projection = projection

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the features that are compared with text."""
        projected: Tensor = self.projection(self.vision_model(pixel_values=pixel_values).pooler_output)
        return projected


def zero_shot(model: nn.Module, text_features: Tensor, *, scale: float | None = None) -> nn.Module:
    """Return a classifier with CLIP's image encoder and fixed text features, one per class, for `trueup.adapt`.

    model: of open_clip or transformers (CLIP, SigLIP), or an image encoder that returns features (N, D). Its weights
        are shared, not copied, and its text encoder is left out.
    text_features: (classes, D), in the order of the classes. They stay as they are: only the image encoder adapts.
    scale: factor of the cosines; by default the model's logit_scale.
    """
    check_model(model)
    _check_text(text_features)
    own = getattr(model, "logit_scale", None)
    if scale is None:
        if not isinstance(own, Tensor):
            raise ValueError(f"{type(model).__name__} has no logit_scale: pass scale=, 100 for OpenAI's CLIP")
        scale = float(own.detach().exp())
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ValueError(f"scale={scale!r} must be a number above 0")
    encoder, bias = _encoder(model), getattr(model, "logit_bias", None)
    like = next((p for p in encoder.parameters() if p.is_floating_point()), text_features)
    text = text_features.detach().to(like.device, like.dtype)
    head = CosineHead(text, scale, float(bias.detach()) if isinstance(bias, Tensor) else None)
    return ZeroShot(encoder, head)


def _encoder(model: nn.Module) -> nn.Module:
    """Return the part of a model with two towers that sees images; other models are encoders themselves."""
    visual, vision = getattr(model, "visual", None), getattr(model, "vision_model", None)
    if isinstance(visual, nn.Module) and hasattr(model, "encode_image"):
        return visual
    if isinstance(vision, nn.Module) and hasattr(model, "get_image_features"):
        projection = getattr(model, "visual_projection", None)
        return ProjectedEncoder(vision, projection if isinstance(projection, nn.Module) else nn.Identity())
    return model


def _features(answer: Any) -> Tensor:
    """Return the image features in what an encoder returned."""
    if isinstance(answer, tuple):  # open_clip's with output_tokens
        answer = answer[0]
    answer = getattr(answer, "image_embeds", answer)
    if not isinstance(answer, Tensor):
        raise ValueError(f"the image encoder returned {type(answer).__name__}, not features of shape (N, D)")
    return answer


def _check_text(text: Tensor) -> None:
    if not isinstance(text, Tensor):
        way = "; pass its pooler_output" if hasattr(text, "pooler_output") else ""  # of transformers
        raise TypeError(f"text_features must be a torch.Tensor, not {type(text).__name__}{way}")
    if text.ndim != 2 or len(text) < 2 or not text.is_floating_point():
        raise ValueError(
            f"text_features are {text.dtype} of shape {tuple(text.shape)}: expected one row of floating-point values "
            f"for each of at least two classes"
        )
    lengths = torch.linalg.vector_norm(text.detach().float(), dim=1)
    if bad := (~((lengths > 0) & lengths.isfinite())).nonzero().flatten().tolist():
        raise ValueError(f"text_features have rows that are zero or not finite: {bad[:10]}")
