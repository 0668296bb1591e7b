"""The embedded benchmarks with masks: what is promised of them, and that they are always the same."""

from itertools import pairwise

import numpy as np
import pytest
from scipy import ndimage

from trueup.data.datasets import phantoms
from trueup.data.datasets.phantoms import DOMAINS, painting, render_phantom
from trueup.data.datasets.phantoms import hearts as cardiac
from trueup.data.slices import Volume

ALL = [(dataset, domain) for dataset, domains in DOMAINS.items() for domain in domains]
SHAPES = {"fundus-sim": (1, 128, 128, 3), "cardiac-sim": (8, 96, 96, 1), "prostate-sim": (8, 96, 96, 1)}
SPACINGS = {"fundus-sim": (1.0, 1.0, 1.0), "cardiac-sim": (8.0, 1.8, 1.8), "prostate-sim": (3.5, 1.2, 1.2)}
CLASSES = {"fundus-sim": 3, "cardiac-sim": 4, "prostate-sim": 2}


def pictures(dataset: str, domain: str, count: int = 8) -> list[Volume]:
    return [case.read() for case in phantoms.phantom_cases(dataset, domain)[:count]]


def grown(mask: np.ndarray) -> np.ndarray:
    """With the neighbours of each pixel in the plane."""
    return ndimage.binary_dilation(mask, ndimage.generate_binary_structure(2, 1)[None])


def light(volume: Volume) -> np.ndarray:
    return volume.image.mean(axis=3)


@pytest.mark.parametrize(("dataset", "domain"), ALL)
def test_shapes_and_codes(dataset: str, domain: str) -> None:
    for volume in pictures(dataset, domain, 4):
        assert volume.image.shape == SHAPES[dataset]
        assert volume.image.dtype == np.uint8
        assert volume.mask.shape == volume.image.shape[:3]
        assert volume.mask.dtype == np.uint8
        assert np.array_equal(np.unique(volume.mask), np.arange(CLASSES[dataset]))
        assert volume.spacing == SPACINGS[dataset]
        assert volume.box == (0, 0, *volume.image.shape[1:3])
        assert volume.image.std() > 10
        assert not volume.image.flags.writeable
        assert not volume.mask.flags.writeable


@pytest.mark.parametrize(("dataset", "domain"), ALL)
def test_cases_are_counted_and_named(dataset: str, domain: str) -> None:
    cases = phantoms.phantom_cases(dataset, domain)
    assert len(cases) == (160 if dataset == "fundus-sim" else 24)
    assert len({case.name for case in cases}) == len(cases)
    assert all(case.slices == SHAPES[dataset][0] and not case.patient for case in cases)
    cases.clear()
    assert phantoms.phantom_cases(dataset, domain), "nobody else's list was emptied"


@pytest.mark.parametrize(("dataset", "domain"), ALL)
def test_no_case_depends_on_those_before(dataset: str, domain: str) -> None:
    first = [render_phantom(dataset, domain, n) for n in (0, 1)]
    for n in (1, 1, 0):
        again = render_phantom(dataset, domain, n)
        assert np.array_equal(first[n].image, again.image)
        assert np.array_equal(first[n].mask, again.mask)


@pytest.mark.parametrize("dataset", DOMAINS)
def test_one_anatomy_in_all_domains(dataset: str) -> None:
    for number in (0, 3, phantoms.CASES[dataset] + 2):  # the last of them is at home in the second domain
        first, *others = (render_phantom(dataset, domain, number) for domain in DOMAINS[dataset])
        for other in others:
            assert np.array_equal(first.mask, other.mask)
            assert np.abs(first.image.astype(float) - other.image).mean() > 8


@pytest.mark.parametrize("dataset", DOMAINS)
def test_domains_share_no_patient(dataset: str) -> None:
    masks = [v.mask.tobytes() for domain in DOMAINS[dataset] for v in pictures(dataset, domain, 6)]
    assert len(set(masks)) == len(masks)
    second = DOMAINS[dataset][1]
    own = phantoms.phantom_cases(dataset, second)[2].read()
    assert np.array_equal(own.image, render_phantom(dataset, second, phantoms.CASES[dataset] + 2).image)


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"no phantom 'lung-sim'; there are: fundus-sim, cardiac-sim, prostate-sim"):
        phantoms.phantom_cases("lung-sim", "clinic")
    with pytest.raises(ValueError, match=r"cardiac-sim has no domain 'clinic'; there are: cine, lge"):
        phantoms.phantom_cases("cardiac-sim", "clinic")
    for number in (-1, 48):
        with pytest.raises(ValueError, match=rf"patients 0 to 47, not {number}"):
            render_phantom("cardiac-sim", "cine", number)


# Eyes.


def test_the_cup_lies_inside_the_disc() -> None:
    ratios = []
    for volume in pictures("fundus-sim", "clinic", 30):
        disc, cup = volume.mask > 0, volume.mask == 2
        assert not (grown(cup) & ~disc).any()
        assert ndimage.label(disc)[1] == ndimage.label(cup)[1] == 1
        assert not disc[:, [0, -1]].any()
        assert not disc[:, :, [0, -1]].any()
        ratios.append(np.sqrt(cup.sum() / disc.sum()))
    assert 0.25 < min(ratios) < 0.4
    assert 0.65 < max(ratios) < 0.85


def test_cup_rim_and_retina_differ_in_light() -> None:
    for volume in pictures("fundus-sim", "clinic", 20):
        green = volume.image[..., 1]
        retina, rim, cup = (np.percentile(green[volume.mask == k], 75) for k in range(3))  # vessels are dark
        assert cup > rim > retina


def test_cameras_differ() -> None:
    clinic, screening, handheld = (pictures("fundus-sim", domain, 12) for domain in DOMAINS["fundus-sim"])

    def red(volumes: list[Volume]) -> float:
        return float(np.mean([v.image[..., 0].mean() / v.image[..., 1].mean() for v in volumes]))

    def uneven(volumes: list[Volume]) -> float:
        """How much the corners differ, against the whole."""
        corners = [light(v)[0].reshape(8, 16, 8, 16).mean(axis=(1, 3))[::7, ::7] for v in volumes]
        return float(np.mean([np.ptp(c) / light(v).mean() for c, v in zip(corners, volumes, strict=True)]))

    def rough(volumes: list[Volume]) -> float:
        return float(np.mean([np.abs(np.diff(light(v)[0, :12], axis=1)).mean() / light(v).mean() for v in volumes]))

    assert red(clinic) > 1.4 * red(screening)
    assert np.mean([light(v).mean() for v in clinic]) > 1.5 * np.mean([light(v).mean() for v in handheld])
    assert uneven(handheld) > 2 * uneven(clinic)
    assert min(rough(screening), rough(handheld)) > rough(clinic)


# Hearts.


@pytest.mark.parametrize("domain", DOMAINS["cardiac-sim"])
def test_the_wall_closes_around_the_cavity_and_the_heart_tapers(domain: str) -> None:
    for volume in pictures("cardiac-sim", domain, 12):
        right, wall, left = (volume.mask == k for k in (1, 2, 3))
        assert not (grown(left) & ~(left | wall)).any()
        areas = left.sum(axis=(1, 2))
        assert all(a >= b for a, b in pairwise(areas))
        assert areas[-1] < 0.4 * areas[0]
        assert right[:6].any(axis=(1, 2)).all()
        assert not right[-1].any()
        assert wall[-1].any()
        assert (grown(right) & wall)[:6].any(axis=(1, 2)).all(), "both lean on the septum"
        columns = [np.nonzero(part[0])[1].mean() for part in (right, left)]
        assert columns[0] < columns[1], "the right ventricle is on the left"


def test_sequences_differ() -> None:
    def muscle(volume: Volume) -> float:
        """How bright the wall is, from 0 as the lungs to 1 as blood."""
        lungs, wall = (np.percentile(values, 30) for values in (light(volume), light(volume)[volume.mask == 2]))
        return float((wall - lungs) / (np.median(light(volume)[volume.mask == 3]) - lungs))

    cine, lge = (pictures("cardiac-sim", domain, 12) for domain in DOMAINS["cardiac-sim"])
    assert min(muscle(v) for v in cine) > 0.2
    assert max(muscle(v) for v in lge) < 0.12, "it is nulled"


def test_scars_are_bright_where_muscle_is_dark() -> None:
    hearts = [cardiac.make_heart(np.random.default_rng(n)) for n in range(12)]
    scarred = [heart for heart in hearts if (heart.scar > 0.9).sum() > 50]
    assert 0 < len(scarred) < 12, "not everybody has one"
    for heart in scarred[:4]:
        assert not ((heart.scar > 0.6) & (heart.mask != 2)).any()
        ratios = []
        for domain in DOMAINS["cardiac-sim"]:
            values = light(cardiac.scan_heart(heart, domain, np.random.default_rng(1)))
            healthy = np.median(values[(heart.mask == 2) & (heart.scar == 0)])
            ratios.append(np.median(values[heart.scar > 0.9]) / healthy)
        assert ratios[0] < 1.5
        assert ratios[1] > 2.5


# Prostates.


@pytest.mark.parametrize("domain", DOMAINS["prostate-sim"])
def test_the_gland_ends_within_the_stack(domain: str) -> None:
    ends = []
    for volume in pictures("prostate-sim", domain, 16):
        areas = volume.mask.sum(axis=(1, 2), dtype=int)
        assert (areas[1:-1] > 50).all()
        assert max(areas[0], areas[-1]) < 0.12 * areas.max()
        ends += [areas[0], areas[-1]]
        assert all(ndimage.label(part)[1] <= 1 for part in volume.mask)
    assert np.mean(np.equal(ends, 0)) > 0.7


def test_the_peripheral_zone_is_bright_and_the_bladder_comes_last() -> None:
    for volume in pictures("prostate-sim", "body-coil", 12):
        rows, columns = np.nonzero(ndimage.binary_erosion(volume.mask[4], iterations=2))
        values, middle = light(volume)[4][rows, columns], np.median(rows)
        assert np.median(values[rows > middle + 4]) > 1.15 * np.median(values[rows < middle])
        bright = (light(volume) > 235)[:, :45].sum(axis=(1, 2))
        assert bright[-1] > 300
        assert bright[-1] > 5 * bright[:4].max()


def test_a_coil_presses_the_gland_and_lights_what_is_near() -> None:
    body, coil = (pictures("prostate-sim", domain, 12) for domain in DOMAINS["prostate-sim"])

    def flat(volume: Volume) -> float:
        rows, columns = np.nonzero(volume.mask[3])
        return float(np.ptp(rows) / np.ptp(columns))

    assert np.mean([flat(v) for v in coil]) < 0.75 * np.mean([flat(v) for v in body])
    for number in range(4):
        near_far = []
        for domain in DOMAINS["prostate-sim"]:
            volume = render_phantom("prostate-sim", domain, number)
            rows, columns = np.nonzero(volume.mask[4])
            bottom, middle = rows.max(), int(np.median(columns))
            behind = light(volume)[4, bottom - 4 : bottom, middle - 6 : middle + 6]
            near_far.append(behind.mean() / np.median(light(volume)[4]))
        assert near_far[1] > 1.5 * near_far[0]


# What they are drawn with.


def test_distance_to_a_circle_and_an_ellipse() -> None:
    at = painting.pixel_grid(20)
    y, x = np.mgrid[:20, :20]
    circle = painting.ellipse(at, (8.0, 11.0), (5.0, 5.0))
    far = np.hypot(y - 8, x - 11)
    assert np.allclose(circle[far > 0], (5 - far)[far > 0])
    assert circle[8, 11] >= 0
    turned = painting.ellipse(at, (8.0, 11.0), (2.0, 6.0), np.pi / 2)  # the long side now goes down
    assert turned[13, 11] == pytest.approx(1)
    assert turned[8, 14] == pytest.approx(-1)
    stack = painting.ellipse(at, (8.0, 11.0), (np.array([0.1, 3.0])[:, None, None], 4.0))
    assert (stack[0] < -100).all()
    assert stack[1, 8, 13] == pytest.approx(2)


def test_ripples_move_the_edge() -> None:
    at = painting.pixel_grid(41)
    waves = np.array([0.2, 0, 0, 0], dtype=complex)  # two waves, highest to the right and to the left
    plain, wavy = (painting.ellipse(at, (20.0, 20.0), (10.0, 10.0), 0.0, wobble) for wobble in (None, waves))
    assert (wavy - plain)[20, 32] == pytest.approx(2)
    assert (wavy - plain)[32, 20] == pytest.approx(-2)


def test_noise_is_smooth_and_scanners_add_rice() -> None:
    rng = np.random.default_rng(0)
    clouds = painting.smooth_noise(rng, (8, 64, 48), (3, 6, 5))
    assert clouds.shape == (8, 64, 48)
    assert (abs(clouds.mean()), clouds.std()) == (pytest.approx(0, abs=1e-9), pytest.approx(1))
    assert max(np.abs(np.diff(clouds, axis=axis)).max() for axis in (1, 2)) < 0.5
    dark, bright = (painting.rician(rng, np.full((200, 200), value), 0.1) for value in (0.0, 2.0))
    assert dark.mean() == pytest.approx(0.1 * np.sqrt(np.pi / 2), rel=0.02)
    assert bright.mean() == pytest.approx(np.hypot(2, 0.1 / np.sqrt(2)), rel=0.01)
    assert bright.std() == pytest.approx(0.1, rel=0.03)


def test_curves_cover_what_they_should() -> None:
    corners = np.array([[4.0, 4.0], [4.0, 10.0], [12.0, 20.0], [26.0, 26.0]])
    points = painting.bezier(corners)
    assert np.allclose(points[[0, -1]], corners[[0, -1]])
    assert np.allclose(np.einsum("ij,ij->i", painting.normals(points), np.gradient(points, axis=0)), 0, atol=1e-9)
    line = np.stack([np.full(9, 15.5), np.linspace(5, 25, 9)], axis=1)
    drawn = painting.draw_curves(32, [(line, np.full(9, 4.0))])
    assert drawn.sum() == pytest.approx(80, rel=0.1)
    assert drawn[15:17, 8:22].min() == 1
    assert drawn[:12].max() == drawn[20:].max() == 0


def test_light_and_paint() -> None:
    at = painting.pixel_grid(64)
    slope = painting.tilt(at, 0.0, 0.3)
    assert slope[:, 0] == pytest.approx(0.7)
    assert slope[:, 32] == pytest.approx(1)
    fading = painting.vignette(at, (32.0, 32.0), 0.4)
    assert (fading[32, 32], fading[32, 0]) == (1, pytest.approx(0.6))
    canvas = np.zeros((2, 2, 3))
    painting.paint(canvas, np.array([[0.0, 0.5], [1.0, 1.0]]), (1.0, 0.5, 0.25))
    assert canvas[:, :, 1].tolist() == [[0, 0.25], [0.5, 0.5]]
    assert painting.cover(np.array([-1.0, 0.0, 1.0]), 2.0).tolist() == [0, 0.5, 1]
