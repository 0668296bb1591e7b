"""Accuracy without labels as a range: standard errors, calibration and leads by hand, and what is not estimated."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trueup.core.registry import make_method
from trueup.deploy import estimates
from trueup.deploy.compare_methods import Trial, compare_methods
from trueup.deploy.estimates import MethodReport, Score, advise, calibrate, estimate, lead, standard_error
from trueup.testing import convnet, images

N = 400


def share(part: float, n: int = N) -> Tensor:
    """So many ones, then zeros."""
    return (torch.arange(n) < round(part * n)).double()


def made(
    name: str, *, aetta: float | None = 0.8, gde: float | None = 0.82, confidence: float = 0.8, agreement: float = 0.8,
    accuracy: float | None = None, classes: float = 9.0, n: int = N,
) -> MethodReport:  # fmt: skip
    """A finding whose numbers are shares of n images; the source answers 1 to all."""
    parts = {"aetta": aetta, "gde": gde, "accuracy": accuracy}
    scores = {key: None if part is None else Score.mean(share(part, n)) for key, part in parts.items()}
    sure = Score.mean(share(confidence, n))
    return MethodReport(name, share(agreement, n).long(), agreement, 0.8, classes, sure, **scores, seconds=1.0)


SOURCE = made("source", agreement=1.0)


def se(part: float, n: int = N) -> float:
    """Of a share by the textbook, and the doubt of one image."""
    return math.sqrt(part * (1 - part) / (n - 1) + 1 / n**2)


def test_standard_errors_by_hand() -> None:
    score = Score.mean(torch.tensor([1, 1, 0, 1]))
    assert score.value == 0.75
    assert score.without.tolist() == pytest.approx([2 / 3, 2 / 3, 1, 2 / 3])
    assert standard_error(score) == pytest.approx(math.sqrt(0.25 / 4 + 1 / 16))  # s² = 1/4
    other = Score.mean(torch.tensor([1, 0, 0, 0]))
    assert standard_error(score, other) == pytest.approx(math.sqrt((1 / 3) / 4 + 1 / 16))  # differences 0, 1, 0, 1
    assert standard_error(score, score) == pytest.approx(1 / 4)
    assert standard_error(Score.mean(torch.ones(1))) == 1


def test_the_range_holds_all_estimates_with_two_standard_errors() -> None:
    source = made("source", aetta=0.85, gde=0.8, confidence=0.9, agreement=1.0)
    for found in estimate([source])[0], estimate([source, made("bn", agreement=0.83)])[0]:
        assert found.range == pytest.approx((0.8 - 2 * se(0.8), 0.9 + 2 * se(0.9)))
    lower = estimate([source, made("bn", agreement=0.76)])[0]
    assert lower.range == pytest.approx((0.76 - 2 * se(0.76), 0.9 + 2 * se(0.9)))
    sure = estimate([made("source", aetta=1.0, gde=1.0, confidence=1.0)])[0]
    assert sure.range == pytest.approx((1 - 2 / N, 1.0))


def test_estimates_that_disagree_are_none() -> None:
    wrong = made("source", aetta=0.76, gde=0.91, confidence=0.53, agreement=1.0)
    (found,) = estimate([wrong])
    assert found.range is None
    assert found.why == "the estimates of source disagree: AETTA 76%, GDE 91%, confidence 53%"
    advice = advise([wrong, made("tent", aetta=0.99, gde=0.99, confidence=0.99)])
    assert advice.take == ("source",)
    assert "the accuracy cannot be estimated on this data: the estimates of source disagree" in advice.reasons[0]
    assert not advice.certain
    assert "--source" in advice.reasons[1]
    assert "one folder per class" in advice.reasons[2]


def test_a_source_that_adapted_models_seldom_agree_with_is_not_believed() -> None:
    """All its estimates say 86 to 87 %, as on sketches; adapted models agree on 55 %: one of them must be wrong."""
    source = made("source", aetta=0.86, gde=0.87, confidence=0.86, agreement=1.0)
    good, low = (made(name, aetta=0.87, gde=0.87, agreement=share) for name, share in (("t3a", 0.95), ("bn", 0.55)))
    assert estimate([source, good])[0].range is not None
    assert "agreement 55%" in estimate([source, good, low])[0].why  # of two methods the lower
    assert estimate([source, good, good, low])[0].range is not None  # of three the middle one
    assert estimate([source, replace(low, classes=3.0)])[0].range is not None  # it has collapsed: no witness
    assert [e.range for e in estimate([source, good, low])] == [None] * 3


def test_a_source_at_sea_is_said_to_be() -> None:
    lost = made("source", aetta=0.5, gde=0.5, confidence=0.5, agreement=1.0)
    for share in (0.1, 0.45):
        adapted = made("bn", aetta=0.9, gde=0.9, confidence=0.9, agreement=share)
        found = estimate([lost, adapted])
        assert [e.range for e in found] == [None, None]
        assert f"agree with the source on {share:.0%} of the images" in found[0].why
        advice = advise([lost, adapted])
        assert advice.take == ("source",)
        assert not advice.certain
        assert "one folder per class" in advice.reasons[-1]
        assert not any("--source" in reason for reason in advice.reasons)  # it could not help


def test_one_estimate_is_none_unless_it_is_calibrated() -> None:
    lame = made("lame", aetta=None, gde=0.9, confidence=0.3)
    found = estimate([SOURCE, lame])
    assert found[0].range is not None
    assert found[1].why == "GDE alone is not enough"  # its confidence is not a head's
    said = advise([SOURCE, lame]).reasons
    assert "the accuracy of lame cannot be estimated on this data: GDE alone is not enough" in said
    scene = [replace(f, accuracy=f.gde) for f in (SOURCE, lame)]
    low, high = estimate([SOURCE, lame], [scene])[1].range or (0, 0)
    assert low < 0.9 - 2 * se(0.9) < 0.9 + 2 * se(0.9) < high


def test_errors_are_calibrated_by_the_ratio_of_true_to_estimated_ones() -> None:
    score = calibrate(Score.mean(share(0.9)), 2.5)
    assert score.value == pytest.approx(0.75)
    assert score.without.tolist() == pytest.approx((1 - 2.5 * (1 - Score.mean(share(0.9)).without)).tolist())
    same = {"aetta": 0.9, "gde": 0.9, "confidence": 0.9}
    source = made("source", **same, agreement=1.0)
    scenes = [[made("source", **same, accuracy=truth, agreement=1.0)] for truth in (0.9, 0.8)]
    # Two standard errors of the accuracy there: of 80 % below, of 90 % above.
    most, least = ((e + 1 / N) / (0.1 + 1 / N) for e in (0.2 + 2 * se(0.8), 0.1 - 2 * se(0.9)))
    doubts = [2 * math.sqrt(r**2 * 0.09 / (N - 1) + 1 / N**2) for r in (most, least)]
    (found,) = estimate([source], scenes)
    assert found.range == pytest.approx((1 - 0.1 * most - doubts[0], 1 - 0.1 * least + doubts[1]))


def test_an_estimate_below_that_of_every_scene_is_not_calibrated() -> None:
    scenes = [[made("source", gde=part, accuracy=0.8, agreement=1.0)] for part in (0.9, 0.88)]
    assert estimate([made("source", gde=0.85, agreement=1.0)], scenes)[0].range is not None  # by chance
    (found,) = estimate([made("source", gde=0.8, agreement=1.0)], scenes)
    assert found.range is None
    assert "GDE 80% is lower than on any source images (88% or more)" in found.why


def test_calibration_brings_estimates_together_that_disagree() -> None:
    said = {"aetta": 0.9, "gde": 0.95, "confidence": 0.7}
    source = made("source", **said, agreement=1.0)
    assert estimate([source])[0].range is None
    (found,) = estimate([source], [[replace(source, accuracy=Score.mean(share(0.7)))]])
    ends = []
    for sign, pick in ((1, min), (-1, max)):  # the greatest ratio gives the low end
        each = []
        for e in said.values():
            ratio = (0.3 + sign * 2 * se(0.7) + 1 / N) / (1 - e + 1 / N)
            doubt = 2 * math.sqrt(ratio**2 * e * (1 - e) / (N - 1) + 1 / N**2)
            each.append(1 - ratio * (1 - e) - sign * doubt)
        ends.append(pick(each))
    assert found.range == pytest.approx(tuple(ends))


def test_too_wide_a_range_is_none_and_says_why() -> None:
    few = made("source", aetta=0.5, gde=0.5, confidence=0.5, agreement=1.0, n=12)
    assert "too few images" in estimate([few])[0].why
    scenes = [[made("source", accuracy=truth, agreement=1.0)] for truth in (0.9, 0.3)]
    assert "the estimates had such errors on source images" in estimate([SOURCE], scenes)[0].why


def test_the_best_estimate_is_recommended_with_those_that_cannot_be_told_from_it() -> None:
    tent, tsd = made("tent", aetta=0.85), made("tsd", aetta=0.9)
    advice = advise([SOURCE, tent, tsd])
    assert advice.take == ("tsd",)
    # Ten of a hundred differ; the doubt is two standard errors.
    assert f"10.0 ± {200 * se(0.1):.1f} points by AETTA" in advice.reasons[0]
    assert advise([SOURCE, made("bn", aetta=0.897), tsd]).take == ("tsd", "bn")
    assert f"{N} images do not separate it from bn" in advise([SOURCE, made("bn", aetta=0.897), tsd]).reasons


def test_a_lead_of_less_than_two_standard_errors_is_too_few_images() -> None:
    methods = [made("source", agreement=1.0, n=50), made("tent", aetta=0.86, n=50)]
    advice = advise(methods)
    assert advice.take == ("source",)
    doubt, needed = 2 * se(0.06, 50), math.ceil(50 * (2 * se(0.06, 50) / 0.06) ** 2)
    told = f"too few images: tent is ahead of it by 6.0 ± {100 * doubt:.1f} points by AETTA; about {needed} images"
    assert advice.reasons[0].startswith(told)
    assert advise([SOURCE, made("tent", aetta=0.86)]).take == ("tent",)


def test_a_lead_near_0_with_a_huge_error_is_too_few_images() -> None:
    """Eight images, of which each method has four, not the same ones: 0 ± 75.6 points."""
    right = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0])
    for other, value in ((1 - right, 0.0), (torch.tensor([0, 0, 1, 1, 1, 0, 0, 0]), -0.125)):
        both = [replace(made(name, n=8), accuracy=Score.mean(x)) for name, x in (("source", right), ("bn", other))]
        advice = advise(both)
        assert advice.take == ("source",)
        assert not advice.certain
        doubt = 2 * math.sqrt(float((other - right).double().var()) / 8 + 1 / 64)
        needed = math.ceil(8 * (doubt / (0.05 - value)) ** 2)
        told = f"by {100 * value:.1f} ± {100 * doubt:.1f} points by accuracy; about {needed} images would show it"
        assert advice.reasons[0] == f"too few images: bn may be ahead of it, {told}"


@pytest.mark.parametrize(("n", "says"), [(39, "too few images"), (41, "by 5 points"), (201, "by a point")])
def test_that_nothing_is_ahead_is_said_as_far_as_it_is_known(n: int, says: str) -> None:
    """Methods that are right on the same images differ by 0 ± 2/n."""
    advice = advise([made("source", accuracy=0.6, agreement=1.0, n=n), made("bn", accuracy=0.6, n=n)])
    assert says in advice.reasons[0]
    assert advice.certain == (n > 40)


def test_where_nothing_can_be_told_the_advice_is_none() -> None:
    assert not advise([made("source", agreement=1.0, n=50), made("tent", aetta=0.86, n=50)]).certain  # too few
    source, tent = made("source", aetta=0.8, agreement=1.0), made("tent", aetta=0.9)
    sure = made("tent", aetta=0.95)
    scenes = [[replace(source, accuracy=source.aetta), made("tent", aetta=0.95, accuracy=x)] for x in (0.95, 0.8)]
    advice = advise([source, sure], scenes)
    assert not advice.certain
    assert "such a lead was wrong on source images" in advice.reasons[0]
    assert advise([source, tent]).certain
    lame = made("lame", aetta=None, gde=0.9, confidence=0.3)
    assert not advise([source, lame]).certain  # nobody knows how good it is
    assert advise([source, made("tent", aetta=0.9, classes=3.0)]).certain  # it has collapsed
    assert advise([source]).certain


def test_leads_are_calibrated_by_what_they_were_worth_in_each_scene() -> None:
    source, tent = made("source", aetta=0.8, agreement=1.0), made("tent", aetta=0.9)
    scenes = [[replace(source, accuracy=source.aetta), made("tent", aetta=0.9, accuracy=part)] for part in (0.9, 0.7)]
    ratio = (0.3 + 1 / N) / (0.1 + 1 / N)
    found = lead([source, tent], scenes, 1, 0)
    assert found.kind == "AETTA"
    assert found.value == pytest.approx((1 - 0.1 * (1 + ratio) / 2) - 0.8)
    assert found.off == pytest.approx(found.value - (1 - 0.1 * ratio - 0.8))
    assert not found.certain
    assert lead([source, tent], scenes[:1], 1, 0).certain
    assert lead([source, tent], [], 1, 0).certain
    lame = made("lame", aetta=None, gde=0.9)
    assert lead([source, lame], [], 1, 0).kind == "GDE"


def test_labels_decide_where_there_are_any() -> None:
    source = made("source", accuracy=0.72, agreement=1.0)
    tent, tsd = made("tent", aetta=0.95, accuracy=0.47), made("tsd", aetta=0.1, classes=3.0, accuracy=0.78)
    assert advise([source, tent]).take == ("source",)
    assert "no other method is ahead of it by a point: tent is by -25.0" in advise([source, tent]).reasons[0]
    assert advise([source, tent, tsd]).take == ("tsd",)
    assert "points by accuracy" in advise([source, tent, tsd]).reasons[0]
    slight = made("tsd", accuracy=0.735)
    assert "too few images" not in advise([source, slight]).reasons[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"classes": 3.0}, "uses 3.0 classes"), ({"agreement": 0.1}, "agrees with the source in only 10%")],
)
def test_what_looks_collapsed_is_not_recommended(change: dict[str, float], reason: str) -> None:
    bad = made("tent", aetta=0.9, confidence=0.9, **change)
    tsd = made("tsd", aetta=0.85)
    advice = advise([SOURCE, bad, tsd, tsd])
    assert advice.take[0] == "tsd"
    assert reason in advice.reasons[-1]
    assert advise([SOURCE, replace(bad, agreement=0.8, classes=3.0)]).take == ("source",)


def test_without_a_lead_nothing_is_changed() -> None:
    assert advise([SOURCE, made("tent", aetta=0.805)]).take == ("source",)
    assert advise([SOURCE]).reasons == ("no other method was tried",)


def takes(seed: int) -> list[tuple[str, ...]]:
    """Advice by 32 images and by all 160; half of each image's luck is its own with each method."""
    random = torch.Generator().manual_seed(seed)
    draw = torch.rand(160, generator=random)
    right = {}
    for name, part in {"source": 0.70, "bn": 0.81, "tent": 0.83, "tsd": 0.85}.items():
        luck = draw + torch.rand(160, generator=random)
        right[name] = luck < luck.quantile(part)
    streams = ([replace(made(name, n=n), accuracy=Score.mean(r[:n])) for name, r in right.items()] for n in (32, 160))
    return [advise(stream).take for stream in streams]


def test_advice_for_few_images_is_not_taken_back_with_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def flips() -> int:
        both = [takes(seed) for seed in range(60)]
        assert any(many != ("source",) for _, many in both)
        return sum(few != ("source",) and not set(few) & set(many) for few, many in both)

    assert flips() == 0
    monkeypatch.setattr(estimates, "Z", 0.0)
    assert flips() > 15


def test_calibrated_ranges_hold_the_truth_and_a_shift_that_is_too_far_is_not_estimated() -> None:
    trials = {name: Trial(make_method(name, {})) for name in ("source", "bn", "tent")}

    def found(shift: float, seed: int = 3) -> list[MethodReport]:
        x, y = images(160, seed=seed, shift=shift)
        return compare_methods(
            convnet(), trials, lambda: [(x[i : i + 32], y[i : i + 32].numpy()) for i in range(0, 160, 32)]
        )

    scenes = [found(shift, seed=4) for shift in (0.0, 0.5)]
    near, far = found(0.2), found(1.5)
    for finding, each in zip(near, estimate(near, scenes), strict=True):
        assert each.range is not None
        assert finding.accuracy is not None
        assert each.range[0] <= finding.accuracy.value <= each.range[1]
    assert [each.range for each in estimate(far, scenes)] == [None] * 3
    assert [each.range for each in estimate(far)] == [None] * 3
