"""Accuracy without labels: estimates with standard errors, ranges, and advice on the method."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

Z = 2.0  # standard errors on either side of an estimate
LEAD = 0.01  # minimum lead over the source of a recommended method
FEWER = 0.65  # share of the source's classes in use, below which a method counts as collapsed
STRANGE = 0.2  # agreement with the source, below which a method is not recommended
LOST = 0.5  # agreement with the median method, below which the source counts as lost
APART = 0.15  # maximum difference between estimates that agree
FAR = 0.05  # possible lead of a method, below which the source counts as equally good
WIDE = 0.4  # maximum width of a useful range
WAY_OUT = "to find out, sort some images into one folder per class, so that the accuracy can be measured"
SOURCE_HELPS = "labelled source images (--source) show how reliable the estimates are"
NO_KIND = "no common estimate"


@dataclass(frozen=True)
class Score:
    """A mean over images, and its values with each image left out (jackknife)."""

    value: float
    without: Tensor

    @classmethod
    def mean(cls, x: Tensor) -> Score:
        """Average a number per image."""
        x = x.double()
        return cls(float(x.mean()), (x.sum() - x) / (len(x) - 1) if len(x) > 1 else x)


def standard_error(score: Score, other: Score | None = None) -> float:
    """Compute the jackknife standard error of a score, or of its difference from another over the same images.

    sqrt((n - 1)/n Σ (θᵢ - θ̄)² + 1/n²), with θᵢ the value without image i; for a mean, the first term is s²/n. The last
    term is an uncertainty of one image, so that a few images that all agree are not certain.
    """
    left = score.without if other is None else score.without - other.without
    n = len(left)
    return math.sqrt((n - 1) / n * float((left - left.mean()).square().sum()) + 1 / n**2)


@dataclass(frozen=True)
class MethodReport:
    """The results of one method on a stream; entropy is in nats."""

    name: str
    answers: Tensor  # predicted class of each image
    agreement: float  # share of answers equal to the source's
    entropy: float
    classes: float  # number of classes in use: exp of the entropy of the mean prediction
    confidence: Score  # mean of the highest probability, the accuracy of a calibrated model
    aetta: Score | None  # estimate by AETTA; None if an answer is not the head's (T3A, LAME)
    gde: Score | None  # estimate by generalised disagreement; None if the model has no head
    accuracy: Score | None  # the true accuracy, if there are labels
    seconds: float

    @property
    def estimates(self) -> dict[str, Score]:
        """Estimates of the accuracy; the confidence counts only if the head gave the answers."""
        own = self.confidence if self.aetta is not None or self.gde is None else None
        named = {"AETTA": self.aetta, "GDE": self.gde, "confidence": own}
        return {kind: score for kind, score in named.items() if score is not None}


Reports = Sequence[MethodReport]
"""All methods on one stream, the frozen source first."""


@dataclass(frozen=True)
class Estimate:
    """A range of a method's accuracy, or the reason why there is none."""

    range: tuple[float, float] | None
    why: str = ""


@dataclass(frozen=True)
class Advice:
    """The recommended method, or several equally good ones, with reasons."""

    take: tuple[str, ...]
    reasons: tuple[str, ...]
    certain: bool = True  # false if the data allow no advice; then the source is kept


def estimate(reports: Reports, scenes: Sequence[Reports] = ()) -> list[Estimate]:
    """Estimate the accuracy of each method as a range, or give the reason why this is not possible.

    `scenes` are the same methods on labelled source images, clean and corrupted. In each, the ratio of true to
    estimated error is r = (1 - accuracy + 1/n) / (1 - estimate + 1/n). Calibrated by r, an estimate e becomes
    c(r) = 1 - r (1 - e); without scenes r = 1. The range goes from the least c(max r) - Z se to the
    greatest c(min r) + Z se, where min and max are over scenes and Z standard errors of the accuracy there. There is
    none if the c(mean r) lie more than APART apart, if it is wider than WIDE, if an estimate is lower than in every
    scene, or if there is one estimate and no scene.

    The source has a further estimate, its agreement with the median method: correct models agree with each other. No
    method has a range if the source has none, or if that agreement is less than LOST.
    """
    found = [_range(reports, scenes, k) for k in range(len(reports))]
    lost = _source_is_lost(reports) or found[0].why
    return [Estimate(None, lost)] * len(found) if lost else found


def _source_is_lost(reports: Reports) -> str:
    """Say that adapted models rarely agree with the source; empty if they do agree."""
    peer = _peer(reports)
    if peer is not None and peer.value < LOST:
        return f"adapted models agree with the source on {peer.value:.0%} of the images, so one side is mostly wrong"
    return ""


def _range(reports: Reports, scenes: Sequence[Reports], k: int) -> Estimate:
    every = _estimates(reports, k)
    ratios = {kind: _ratios(scenes, k, kind) for kind in every}
    scores = {kind: score for kind, score in every.items() if ratios[kind]}
    if not scores or (len(scores) == 1 and not scenes):
        kinds = f"{', '.join(scores)} alone is not enough" if scores else "there is no estimate"
        return Estimate(None, kinds)
    for kind, score in scores.items():
        if score.value + Z * standard_error(score) < (least := min(r.estimate for r in ratios[kind])):
            short = f"{reports[k].name}: {kind} {score.value:.0%} is lower than on any source images"
            return Estimate(None, f"{short} ({least:.0%} or more), so it cannot be calibrated")
    centres = {kind: calibrate(score, _mean(ratios[kind])).value for kind, score in scores.items()}
    if max(centres.values()) - min(centres.values()) > APART:
        values = ", ".join(f"{kind} {max(0.0, value):.0%}" for kind, value in centres.items())
        return Estimate(None, f"the estimates of {reports[k].name} disagree: {values}")
    lows = [calibrate(score, max(r.high for r in ratios[kind])) for kind, score in scores.items()]
    highs = [calibrate(score, min(r.low for r in ratios[kind])) for kind, score in scores.items()]
    low = max(0.0, min(score.value - Z * standard_error(score) for score in lows))
    high = min(1.0, max(score.value + Z * standard_error(score) for score in highs))
    if high - low > WIDE:
        wide = max(s.value for s in highs) - min(s.value for s in lows) > WIDE
        why = "the estimates had such errors on source images" if wide else "too few images"
        return Estimate(None, f"{reports[k].name} may be anywhere from {low:.0%} to {high:.0%}: {why}")
    return Estimate((low, high))


def calibrate(score: Score, ratio: float) -> Score:
    """Multiply the estimated error by a ratio."""
    return Score(1 - ratio * (1 - score.value), 1 - ratio * (1 - score.without))


def _estimates(reports: Reports, k: int) -> dict[str, Score]:
    peer = _peer(reports) if k == 0 else None
    return {**reports[k].estimates, **({"agreement": peer} if peer is not None else {})}


def _peer(reports: Reports) -> Score | None:
    """Return the source's agreement with the median method; None if all others have collapsed."""
    source, *others = reports
    fit = sorted((f for f in others if f.classes >= FEWER * source.classes), key=lambda f: f.agreement)
    return Score.mean(fit[(len(fit) - 1) // 2].answers == source.answers) if fit else None


@dataclass(frozen=True)
class Ratio:
    """Ratio of true to estimated error in a scene, with Z standard errors of the truth on either side."""

    estimate: float
    low: float
    value: float
    high: float


UNCALIBRATED = Ratio(0.0, 1.0, 1.0, 1.0)


def _ratio(scene: Reports, k: int, kind: str) -> Ratio | None:
    truth, score, one = scene[k].accuracy, _estimates(scene, k).get(kind), 1 / len(scene[k].answers)
    if truth is None or score is None:
        return None
    doubt = Z * standard_error(truth)
    wrong = [max(0.0, 1 - truth.value + sign * doubt) + one for sign in (-1, 0, 1)]
    return Ratio(score.value, *(error / (1 - score.value + one) for error in wrong))


def _ratios(scenes: Sequence[Reports], k: int, kind: str) -> list[Ratio]:
    return [r for scene in scenes if (r := _ratio(scene, k, kind)) is not None] if scenes else [UNCALIBRATED]


def _mean(ratios: Sequence[Ratio]) -> float:
    return statistics.mean(r.value for r in ratios)


def _collapse(report: MethodReport, source: MethodReport) -> str | None:
    if report.classes < FEWER * source.classes:
        return f"{report.name} uses {report.classes:.1f} classes where the source uses {source.classes:.1f}"
    if report.agreement < STRANGE:
        return f"{report.name} agrees with the source in only {report.agreement:.0%} of its answers"
    return None


def advise(reports: Reports, scenes: Sequence[Reports] = ()) -> Advice:
    """Recommend the method with the largest lead over the source, and those that are not clearly behind it.

    With labels, by accuracy; else by estimates, among methods that have one and show no collapse. The source is kept if
    nothing can be estimated, or if the lead is within its uncertainty (see `Lead`).
    """
    source, *others = reports
    found = estimate(reports, scenes)
    lost = _lost(reports, found)
    if not others:
        return Advice((source.name,), ("no other method was tried", *lost))
    if source.accuracy is not None:
        best = _choose(reports, (), range(1, len(reports)), "accuracy")
        return replace(best, reasons=(*best.reasons, *lost))
    if found[0].range is None:
        # Calibration does not help if adapted models rarely agree with the source.
        hints = [WAY_OUT] if scenes or _source_is_lost(reports) else [SOURCE_HELPS, WAY_OUT]
        return Advice((source.name,), (*lost, *hints), certain=False)
    refused = {f.name: words for f in others if (words := _collapse(f, source))}
    fit = [k for k, f in enumerate(reports) if k and found[k].range and f.name not in refused]
    if not fit:
        reasons = ("no other method can be recommended", *lost, *refused.values())
        return Advice((source.name,), reasons, certain=len(refused) == len(others))
    best = _choose(reports, scenes, fit, None)
    return replace(best, reasons=(*best.reasons, *lost, *refused.values()))


def _lost(reports: Reports, found: Sequence[Estimate]) -> list[str]:
    """Say which accuracies cannot be estimated and why, once if the reason is the same for all."""
    if len({e.why for e in found}) == 1:
        return [f"the accuracy cannot be estimated on this data: {found[0].why}"] if found[0].why else []
    names = zip(reports, found, strict=True)
    return [f"the accuracy of {f.name} cannot be estimated on this data: {e.why}" for f, e in names if e.why]


@dataclass(frozen=True)
class Lead:
    """Lead of one method over another, by accuracy or by a common estimate.

    In each scene d = c₁(r₁) - c₂(r₂), the difference calibrated by this scene; the lead uses the mean ratios.
    """

    kind: str
    value: float
    doubt: float  # Z standard errors of the difference over the same images
    off: float  # the lead minus the smallest d

    @property
    def certain(self) -> bool:
        """True if the lead is larger than its uncertainty."""
        return self.value - self.off - self.doubt > 0


def lead(reports: Reports, scenes: Sequence[Reports], i: int, j: int, kind: str | None = None) -> Lead:
    """Return the lead of method i over method j, by `kind` or the first common estimate."""
    for name in ("AETTA", "GDE", "confidence") if kind is None else (kind,):
        one, two = _score(reports[i], name), _score(reports[j], name)
        known = [(_ratio(scene, i, name), _ratio(scene, j, name)) for scene in scenes]
        both = (
            [(a, b) for a, b in known if a is not None and b is not None] if scenes else [(UNCALIBRATED, UNCALIBRATED)]
        )
        if one is None or two is None or not both:
            continue
        each = [calibrate(one, a.value).value - calibrate(two, b.value).value for a, b in both]
        first, second = calibrate(one, _mean([a for a, _ in both])), calibrate(two, _mean([b for _, b in both]))
        value = first.value - second.value
        return Lead(name, value, Z * standard_error(first, second), value - min(each))
    return Lead(NO_KIND, 0.0, 1.0, 0.0)


def _score(report: MethodReport, kind: str) -> Score | None:
    return report.accuracy if kind == "accuracy" else report.estimates.get(kind)


def _choose(reports: Reports, scenes: Sequence[Reports], fit: Sequence[int], kind: str | None) -> Advice:
    """Pick the method with the largest lead, and those certainly ahead of the source but not certainly behind it."""
    source = reports[0]
    leads = {k: lead(reports, scenes, k, 0, kind) for k in fit}
    top = max(leads, key=lambda k: leads[k].value)
    best, ahead = reports[top], leads[top]
    words = f"{100 * ahead.value:.1f} ± {100 * ahead.doubt:.1f} points by {ahead.kind}"
    most = ahead.value + ahead.doubt
    if ahead.kind == NO_KIND:
        return Advice((source.name,), (f"{best.name} cannot be compared with it: there is {NO_KIND}",), certain=False)
    if ahead.value < LEAD and most < FAR:
        bound = "a point" if most < LEAD else f"{100 * FAR:.0f} points"
        return Advice((source.name,), (f"no other method is ahead of it by {bound}: {best.name} is by {words}",))
    if ahead.value < LEAD:
        needed = math.ceil(len(best.answers) * (ahead.doubt / (FAR - ahead.value)) ** 2)  # so that most < FAR
        more = f"too few images: {best.name} may be ahead of it, by {words}; about {needed} images would show it"
        return Advice((source.name,), (more,), certain=False)
    if ahead.value <= ahead.doubt:
        needed = math.ceil(len(best.answers) * (ahead.doubt / ahead.value) ** 2)
        more = f"too few images: {best.name} is ahead of it by {words}; about {needed} images would show it"
        return Advice((source.name,), (more,), certain=False)
    if not ahead.certain:
        wrong = f"{best.name} is ahead of it by {words}, but such a lead was wrong on source images"
        return Advice((source.name,), (wrong,), certain=False)
    ties = [k for k in fit if leads[k].certain and k != top and not lead(reports, scenes, top, k, kind).certain]
    reasons = [
        f"{best.name} is ahead of the source by {words}",
        f"it uses {best.classes:.1f} classes (source {source.classes:.1f})",
        f"it agrees with the source in {best.agreement:.0%} of its answers",
    ]
    if ties:
        names = ", ".join(reports[k].name for k in ties)
        reasons.append(f"{len(best.answers)} images do not separate it from {names}")
    return Advice((best.name, *(reports[k].name for k in ties)), tuple(reasons))
