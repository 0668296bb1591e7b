"""The adapted model as a plain module: its weights, and the statistics that it normalised with."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trueup.model.copy_model import copy_model
from trueup.model.split_model import SplitModel
from trueup.norm.instance import InstancePolicy
from trueup.norm.policy import BatchPolicy
from trueup.validate import check_choice

if TYPE_CHECKING:
    from trueup.core.lifecycle import AdapterBase

log = logging.getLogger("trueup")

STATISTICS = ("adapted", "source")


def plain_copy(adapter: AdapterBase, statistics: str) -> nn.Module:
    """Copy the network that predicts and give its BatchNorm layers the statistics of the stream, or the source's."""
    check_choice("statistics", statistics, STATISTICS)
    net = answering_network(adapter)
    model = copy_model(net.runner.without_caches())
    for name, p in model.named_parameters():
        p.requires_grad_(adapter.flags[name])
    if statistics == "source":
        _set_statistics(model, adapter.source)
        return model
    if adapter.batches:
        for reason in lost_parts(adapter):
            log.warning("the plain model lacks a part of what %s answered with: %s", adapter.method.info.name, reason)
    if not net.runner.settings.compile:
        _set_statistics(model, net.policy.by_name(net.model))
    return model


def answering_network(adapter: AdapterBase) -> SplitModel:
    """Return the network that predicts: the model, or the one that a method keeps as `teacher` in its state."""
    teacher = getattr(adapter.state, "teacher", None)
    return teacher if isinstance(teacher, SplitModel) else adapter.net


def lost_parts(adapter: AdapterBase) -> list[str]:
    """Say what the plain model lacks of the answers so far."""
    net, method = answering_network(adapter), adapter.method
    found = [method.info.lost] if method.info.lost else []
    if adapter.monitor is not None and adapter.monitor.marks.state == "fallback":
        found.append("the source's weights, which predict during a fallback; the model is the adapted one")
    if isinstance(net.policy, InstancePolicy):
        found.append("statistics corrected for each image; the running estimates take their place")
    if method.episodic and (adapter.optimizer is not None or net.policy.norm != "source"):
        found.append("what it took from each batch, which episodic=True forgets; the model is the source")
    if isinstance(net.policy, BatchPolicy) and net.runner.settings.compile:
        found.append(
            "the statistics of the batches, of which a compiled model keeps no record; the source's take their place. "
            "Adapt without compile=True to export the model"
        )
    elif isinstance(net.policy, BatchPolicy) and net.policy.empty and not found:
        found.append(
            "the statistics of the batches, as the adapter was reset after the last of them; the source's take their "
            "place. Call unwrap() before a reset"
        )
    return found


@torch.no_grad()
def _set_statistics(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Write running statistics into the BatchNorm layers of a model."""
    for path, layer in model.named_modules():
        if isinstance(layer, _BatchNorm):
            for name in ("running_mean", "running_var"):
                value, target = tensors.get(f"{path}.{name}" if path else name), getattr(layer, name)
                if value is not None and target is not None:
                    target.copy_(value)
