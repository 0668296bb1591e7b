"""Accuracy without labels: estimates with their errors, ranges, signs that they are wrong, and which method to take."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

Z = 2.0  # standard errors on either side of a number
LEAD = 0.01  # by which a method must be ahead of the source to be worth the trouble
FEWER = 0.65  # of the source's classes in use, below which a method counts as collapsed
STRANGE = 0.2  # agreement with the source below which something is wrong with one of the two
AT_SEA = 0.5  # agreement with the usual method below which the source is at sea
APART = 0.15  # between estimates of one accuracy, above which they disagree
FAR = 0.05  # lead that a method must be known not to have, for the source to be as good
WIDE = 0.4  # width of a range above which it says nothing
WAY_OUT = "to find out, sort some images into one folder per class: then the accuracy itself is measured"
SOURCE_HELPS = "labelled source images (--source) show what the estimates are worth"
NO_KIND = "no estimate that both have"


@dataclass(frozen=True)
class Score:
    """A share over images: its value, and its values with one image left out each time."""

    value: float
    without: Tensor

    @classmethod
    def mean(cls, x: Tensor) -> Score:
        """Average a number per image."""
        x = x.double()
        return cls(float(x.mean()), (x.sum() - x) / (len(x) - 1) if len(x) > 1 else x)


def standard_error(score: Score, other: Score | None = None) -> float:
    """Compute the jackknife standard error of a score, or of its difference from another over the same images.

    sqrt((n - 1)/n Σ (θᵢ - θ̄)² + 1/n²), with θᵢ the value without image i: for a mean, s²/n under the root. The last
    term is the doubt of one image: a handful of images that all agree is not certain.
    """
    left = score.without if other is None else score.without - other.without
    n = len(left)
    return math.sqrt((n - 1) / n * float((left - left.mean()).square().sum()) + 1 / n**2)


@dataclass(frozen=True)
class MethodReport:
    """The results of one method on a stream; entropy is in nats."""

    name: str
    answers: Tensor
    """The class of each image."""
    agreement: float
    """Answers that are the source's."""
    entropy: float
    classes: float
    """In use: exp of the entropy of the mean prediction."""
    confidence: Score
    """Mean of the highest probability: what a calibrated model's accuracy would be."""
    aetta: Score | None
    """Estimate of the accuracy by AETTA; None where an answer is not the head's: T3A, LAME."""
    gde: Score | None
    """Estimate by generalised disagreement, for any answer; None where the model has no head."""
    accuracy: Score | None
    """Known if there are labels."""
    seconds: float

    @property
    def estimates(self) -> dict[str, Score]:
        """Estimates of the accuracy; probabilities count where they are the head's, which was trained to give them."""
        own = self.confidence if self.aetta is not None or self.gde is None else None
        named = {"AETTA": self.aetta, "GDE": self.gde, "confidence": own}
        return {kind: score for kind, score in named.items() if score is not None}


Findings = Sequence[MethodReport]
"""Of all methods on one stream; the frozen source is the first."""


@dataclass(frozen=True)
class Estimate:
    """A range of the accuracy of a method, or the reason why there is none."""

    range: tuple[float, float] | None
    why: str = ""


@dataclass(frozen=True)
class Advice:
    """Which method to take, or which ones if they cannot be told apart, and why."""

    take: tuple[str, ...]
    reasons: tuple[str, ...]
    certain: bool = True
    """False if nothing can be told: then it is no advice, and the source is kept for want of a reason to change."""


def estimate(findings: Findings, scenes: Sequence[Findings] = ()) -> list[Estimate]:
    """Estimate the accuracy of each method as a range, or say why it cannot be estimated on this data.

    `scenes` are the same methods on labelled source images, clean and corrupted. In each, estimate k was off by the
    factor r = (1 - accuracy + 1/n) / (1 - estimate + 1/n), for errors are missed in proportion. Calibrated by r, an
    estimate e is c(r) = 1 - r (1 - e); without scenes r = 1. The range goes from the least c(max r) - Z se to the
    greatest c(min r) + Z se, where min and max are over scenes and Z standard errors of the accuracy there. There is
    none if the c(mean r) lie more than APART apart, if it is wider than WIDE, if an estimate is lower than in every
    scene, or if there is one estimate and no scene.

    The source has a further estimate: how often the usual method agrees with it, for versions of one network that are
    all right answer alike. No method has a range if the source has none, or if that agreement is less than AT_SEA.
    """
    found = [_range(findings, scenes, k) for k in range(len(findings))]
    lost = _at_sea(findings) or found[0].why
    return [Estimate(None, lost)] * len(found) if lost else found


def _at_sea(findings: Findings) -> str:
    """Say that adapted models seldom agree with the source, if so."""
    peer = _peer(findings)
    if peer is not None and peer.value < AT_SEA:
        return f"adapted models agree with the source on {peer.value:.0%} of the images, so one side is mostly wrong"
    return ""


def _range(findings: Findings, scenes: Sequence[Findings], k: int) -> Estimate:
    every = _estimates(findings, k)
    ratios = {kind: _ratios(scenes, k, kind) for kind in every}
    scores = {kind: score for kind, score in every.items() if ratios[kind]}
    if not scores or (len(scores) == 1 and not scenes):
        kinds = f"{', '.join(scores)} alone is no estimate" if scores else "nothing estimates it"
        return Estimate(None, kinds)
    for kind, score in scores.items():
        if score.value + Z * standard_error(score) < (least := min(r.said for r in ratios[kind])):
            short = f"{findings[k].name}: {kind} {score.value:.0%} is less than on any source images"
            return Estimate(None, f"{short} ({least:.0%} and more), so nothing calibrates it")
    centres = {kind: calibrate(score, _mean(ratios[kind])).value for kind, score in scores.items()}
    if max(centres.values()) - min(centres.values()) > APART:
        said = ", ".join(f"{kind} {max(0.0, value):.0%}" for kind, value in centres.items())
        return Estimate(None, f"the estimates of {findings[k].name} disagree: {said}")
    lows = [calibrate(score, max(r.high for r in ratios[kind])) for kind, score in scores.items()]
    highs = [calibrate(score, min(r.low for r in ratios[kind])) for kind, score in scores.items()]
    low = max(0.0, min(score.value - Z * standard_error(score) for score in lows))
    high = min(1.0, max(score.value + Z * standard_error(score) for score in highs))
    if high - low > WIDE:
        wide = max(s.value for s in highs) - min(s.value for s in lows) > WIDE
        why = "on source images the estimates were off by as much" if wide else "too few images"
        return Estimate(None, f"{findings[k].name} may lie between {low:.0%} and {high:.0%}: {why}")
    return Estimate((low, high))


def calibrate(score: Score, ratio: float) -> Score:
    """Multiply the estimated error."""
    return Score(1 - ratio * (1 - score.value), 1 - ratio * (1 - score.without))


def _estimates(findings: Findings, k: int) -> dict[str, Score]:
    peer = _peer(findings) if k == 0 else None
    return {**findings[k].estimates, **({"agreement": peer} if peer is not None else {})}


def _peer(findings: Findings) -> Score | None:
    """How often the usual method (the lower median) agrees with the source; None if all others have collapsed."""
    source, *others = findings
    fit = sorted((f for f in others if f.classes >= FEWER * source.classes), key=lambda f: f.agreement)
    return Score.mean(fit[(len(fit) - 1) // 2].answers == source.answers) if fit else None


@dataclass(frozen=True)
class Ratio:
    """The true over the estimated error in a scene, with Z standard errors of the truth on either side."""

    said: float
    """The estimate."""
    low: float
    value: float
    high: float


AS_SAID = Ratio(0.0, 1.0, 1.0, 1.0)


def _ratio(scene: Findings, k: int, kind: str) -> Ratio | None:
    truth, said, one = scene[k].accuracy, _estimates(scene, k).get(kind), 1 / len(scene[k].answers)
    if truth is None or said is None:
        return None
    doubt = Z * standard_error(truth)
    wrong = [max(0.0, 1 - truth.value + sign * doubt) + one for sign in (-1, 0, 1)]
    return Ratio(said.value, *(error / (1 - said.value + one) for error in wrong))


def _ratios(scenes: Sequence[Findings], k: int, kind: str) -> list[Ratio]:
    return [r for scene in scenes if (r := _ratio(scene, k, kind)) is not None] if scenes else [AS_SAID]


def _mean(ratios: Sequence[Ratio]) -> float:
    return statistics.mean(r.value for r in ratios)


def _collapse(finding: MethodReport, source: MethodReport) -> str | None:
    if finding.classes < FEWER * source.classes:
        return f"{finding.name} uses {finding.classes:.1f} classes where the source uses {source.classes:.1f}"
    if finding.agreement < STRANGE:
        return f"{finding.name} agrees with the source in only {finding.agreement:.0%} of its answers"
    return None


def advise(findings: Findings, scenes: Sequence[Findings] = ()) -> Advice:
    """Recommend the method that is ahead of the source, and those that cannot be told from it.

    By accuracy where there are labels; else by the estimates, among methods that have one and no sign of collapse. The
    source is kept if nothing can be estimated, and if the lead is not more than what it may be off by (see `Lead`).
    """
    source, *others = findings
    found = estimate(findings, scenes)
    lost = _lost(findings, found)
    if not others:
        return Advice((source.name,), ("no other method was tried", *lost))
    if source.accuracy is not None:
        best = _choose(findings, (), range(1, len(findings)), "accuracy")
        return replace(best, reasons=(*best.reasons, *lost))
    if found[0].range is None:
        # No calibration makes up for a source that adapted models seldom agree with.
        hints = [WAY_OUT] if scenes or _at_sea(findings) else [SOURCE_HELPS, WAY_OUT]
        return Advice((source.name,), (*lost, *hints), certain=False)
    refused = {f.name: told for f in others if (told := _collapse(f, source))}
    fit = [k for k, f in enumerate(findings) if k and found[k].range and f.name not in refused]
    if not fit:
        reasons = ("no other method can be recommended", *lost, *refused.values())
        return Advice((source.name,), reasons, certain=len(refused) == len(others))
    best = _choose(findings, scenes, fit, None)
    return replace(best, reasons=(*best.reasons, *lost, *refused.values()))


def _lost(findings: Findings, found: Sequence[Estimate]) -> list[str]:
    """Say which accuracies cannot be estimated, and why; once, if it is the same for all."""
    if len({e.why for e in found}) == 1:
        return [f"the accuracy cannot be estimated on this data: {found[0].why}"] if found[0].why else []
    names = zip(findings, found, strict=True)
    return [f"the accuracy of {f.name} cannot be estimated on this data: {e.why}" for f, e in names if e.why]


@dataclass(frozen=True)
class Lead:
    """How far one method is ahead of another by accuracy, or by an estimate that both have.

    In each scene d = c₁(r₁) - c₂(r₂), the difference as calibrated by this scene; the lead is that by the mean ratios.
    """

    kind: str
    value: float
    doubt: float
    """Z standard errors of the difference over the same images."""
    off: float
    """The lead less the least d."""

    @property
    def certain(self) -> bool:
        """True if it is more than what it may be off by."""
        return self.value - self.off - self.doubt > 0


def lead(findings: Findings, scenes: Sequence[Findings], i: int, j: int, kind: str | None = None) -> Lead:
    """Measure how far method i is ahead of method j, by the first estimate that both have unless `kind` is given."""
    for name in ("AETTA", "GDE", "confidence") if kind is None else (kind,):
        one, two = _score(findings[i], name), _score(findings[j], name)
        known = [(_ratio(scene, i, name), _ratio(scene, j, name)) for scene in scenes]
        both = [(a, b) for a, b in known if a is not None and b is not None] if scenes else [(AS_SAID, AS_SAID)]
        if one is None or two is None or not both:
            continue
        each = [calibrate(one, a.value).value - calibrate(two, b.value).value for a, b in both]
        first, second = calibrate(one, _mean([a for a, _ in both])), calibrate(two, _mean([b for _, b in both]))
        value = first.value - second.value
        return Lead(name, value, Z * standard_error(first, second), value - min(each))
    return Lead(NO_KIND, 0.0, 1.0, 0.0)


def _score(finding: MethodReport, kind: str) -> Score | None:
    return finding.accuracy if kind == "accuracy" else finding.estimates.get(kind)


def _choose(findings: Findings, scenes: Sequence[Findings], fit: Sequence[int], kind: str | None) -> Advice:
    """Pick the method with the greatest lead, and those that are certainly ahead, too, but not certainly behind it."""
    source = findings[0]
    leads = {k: lead(findings, scenes, k, 0, kind) for k in fit}
    top = max(leads, key=lambda k: leads[k].value)
    best, ahead = findings[top], leads[top]
    told = f"{100 * ahead.value:.1f} ± {100 * ahead.doubt:.1f} points by {ahead.kind}"
    if ahead.value < LEAD:
        return _keep(source, best, ahead, told)
    if ahead.value <= ahead.doubt:
        needed = math.ceil(len(best.answers) * (ahead.doubt / ahead.value) ** 2)
        more = f"too few images: {best.name} is ahead of it by {told}; some {needed} images would tell"
        return Advice((source.name,), (more,), certain=False)
    if not ahead.certain:
        wrong = f"{best.name} is ahead of it by {told}, but on source images such a lead was off by as much"
        return Advice((source.name,), (wrong,), certain=False)
    ties = [k for k in fit if leads[k].certain and k != top and not lead(findings, scenes, top, k, kind).certain]
    reasons = [
        f"{best.name} is ahead of the source by {told}",
        f"it uses {best.classes:.1f} classes (source {source.classes:.1f})",
        f"it agrees with the source in {best.agreement:.0%} of its answers",
    ]
    if ties:
        names = ", ".join(findings[k].name for k in ties)
        reasons.append(f"{len(best.answers)} images cannot tell it from {names}")
    return Advice((best.name, *(findings[k].name for k in ties)), tuple(reasons))


def _keep(source: MethodReport, best: MethodReport, ahead: Lead, told: str) -> Advice:
    """Advise the source where no method seems to be ahead, if that is certain to within FAR."""
    if ahead.kind == NO_KIND:
        return Advice((source.name,), (f"{best.name} cannot be compared with it: there is {NO_KIND}",), certain=False)
    most = ahead.value + ahead.doubt
    if most < FAR:
        bound = "a point" if most < LEAD else f"{100 * FAR:.0f} points"
        return Advice((source.name,), (f"no other method is ahead of it by {bound}: {best.name} is by {told}",))
    needed = math.ceil(len(best.answers) * (ahead.doubt / (FAR - ahead.value)) ** 2)  # so that most < FAR
    more = f"too few images: {best.name} may be ahead of it, by {told}; some {needed} images would tell"
    return Advice((source.name,), (more,), certain=False)
