"""Losses and scores as pure functions of logits with classes along dim 1: (N, C), or (N, C, H, W) for pixels."""

import torch.nn.functional as F
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """Return H(p) = -Σ_k s_k log s_k of s = softmax(logits), in nats."""
    log_s = F.log_softmax(logits, dim=1)
    return -(log_s.exp() * log_s).sum(dim=1)


def soft_cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    """Return -Σ_k t_k log softmax(logits)_k for a target distribution t."""
    return -(target * F.log_softmax(logits, dim=1)).sum(dim=1)


def kl_divergence(logits: Tensor, other: Tensor) -> Tensor:
    """Return KL(softmax(logits) || softmax(other))."""
    log_p, log_q = F.log_softmax(logits, dim=1), F.log_softmax(other, dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=1)


def negative_diversity(logits: Tensor, eps: float = 1e-5) -> Tensor:
    """Return Σ_k p̄_k log(p̄_k + eps) of the mean prediction p̄: lowest if all classes are predicted equally often."""
    mean = F.softmax(logits, dim=1).transpose(0, 1).flatten(1).mean(dim=1)
    return (mean * (mean + eps).log()).sum()


def pseudo_label_loss(logits: Tensor, threshold: float) -> Tensor | None:
    """Return the mean CE(p_i, argmax p_i) over samples of confidence above the threshold; None if there are none."""
    confidence, label = F.softmax(logits.detach(), dim=1).max(dim=1)
    confident = confidence > threshold
    if not bool(confident.any()):
        return None
    return F.cross_entropy(logits, label, reduction="none")[confident].mean()


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return cos(a_i, b_j) of the rows of a (N, D) and b (C, D); norms are clamped at 1e-12."""
    return F.normalize(a, p=2, dim=1, eps=1e-12) @ F.normalize(b, p=2, dim=1, eps=1e-12).T
