"""Dataset cards: classes, domains, numbers of images, licence, source and layout."""

from __future__ import annotations

from dataclasses import dataclass, field

from trueup.data.corruptions import CORRUPTIONS


@dataclass(frozen=True)
class Card:
    """A dataset's card: `domains` counts the images of each domain, `counts` those of each class in it."""

    name: str
    title: str
    kind: str
    """"domains" (leave one out), "corruptions" (trained on clean images), "masks" (cases with masks), "embedded"."""
    classes: int
    domains: dict[str, int]
    licence: str
    home: str
    layout: str = "ROOT/domain/class/image, or list files ROOT/domain*.txt with lines `path number`"
    class_names: tuple[str, ...] = ()
    counts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    range: tuple[float, float] | None = None
    """The values of black and white, for files of more than 8 bits that do not declare them."""

    @property
    def images(self) -> int:
        """Count the images of all domains."""
        return sum(self.domains.values())


_DIGITS = tuple("0123456789")
_FUNDUS = ("background", "rim", "cup")
_CARDIAC = ("background", "right ventricle", "myocardium", "left ventricle")
_PROSTATE = ("background", "prostate")
_UCI = "handwriting: UCI, CC BY 4.0"


def _embedded(
    name: str, title: str, class_names: tuple[str, ...], images: int, domains: tuple[str, ...],
    licence: str = "ours", home: str = "made by this library",
) -> Card:  # fmt: skip
    counts, layout = dict.fromkeys(domains, images), "none: made in memory"
    return Card(name, title, "embedded", len(class_names), counts, licence, home, layout, class_names)


_STYLES = ("hand", "type", "poster", "neon")
_FONTS = f"{_UCI}; fonts: DejaVu and STIX licences"
CARDS = {
    card.name: card
    for card in (
        _embedded(
            "digits", "Digits in four styles", _DIGITS, 2000, _STYLES, _FONTS, "ships with scikit-learn and matplotlib"
        ),
        _embedded(
            "digits-c", "Handwritten digits, corrupted", _DIGITS, 1000, CORRUPTIONS, _UCI, "ships with scikit-learn"
        ),
        Card(
            name="pacs",
            title="PACS (Li et al., 2017)",
            kind="domains",
            classes=7,
            class_names=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
            domains={"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
            counts={
                "art_painting": (379, 255, 285, 184, 201, 295, 449),
                "cartoon": (389, 457, 346, 135, 324, 288, 405),
                "photo": (189, 202, 182, 186, 199, 280, 432),
                "sketch": (772, 740, 753, 608, 816, 80, 160),
            },
            licence="for research; no licence stated by its authors",
            home="https://sketchx.eecs.qmul.ac.uk/downloads (Deeper, Broader and Artier Domain Generalization)",
        ),
        Card(
            name="officehome",
            title="Office-Home (Venkateswara et al., 2017)",
            kind="domains",
            classes=65,
            domains={"Art": 2427, "Clipart": 4365, "Product": 4439, "RealWorld": 4357},
            licence="non-commercial research only",
            home="https://www.hemanthdv.org/officeHomeDataset.html",
        ),
        Card(
            name="vlcs",
            title="VLCS (Fang et al., 2013)",
            kind="domains",
            classes=5,
            class_names=("bird", "car", "chair", "dog", "person"),
            domains={"Caltech101": 1415, "LabelMe": 2656, "SUN09": 3282, "VOC2007": 3376},
            licence="that of its four parts, each for research",
            home="https://github.com/facebookresearch/DomainBed (download script)",
        ),
        Card(
            name="domainnet",
            title="DomainNet, cleaned (Peng et al., 2019)",
            kind="domains",
            classes=345,
            domains={
                "clipart": 48129,
                "infograph": 51605,
                "painting": 72266,
                "quickdraw": 172500,
                "real": 172947,
                "sketch": 69128,
            },
            licence="non-commercial research and education only",
            home="https://ai.bu.edu/M3SDA",
            layout=f"{Card.layout}; both the _train and the _test lists are read",
        ),
        *(
            Card(
                name=f"cifar{n}-c",
                title=f"CIFAR-{n}-C (Hendrycks and Dietterich, 2019)",
                kind="corruptions",
                classes=n,
                domains=dict.fromkeys(CORRUPTIONS, 50_000),
                licence="CC BY 4.0",
                home=f"https://zenodo.org/record/{record}, and the clean set's binary version from https://www.cs.toronto.edu/~kriz/cifar.html",
                layout=f"ROOT/CORRUPTION.npy and ROOT/labels.npy (all five severities), clean images in ROOT/{clean}",
            )
            for n, record, clean in ((10, 2535967, "cifar-10-batches-bin"), (100, 3555552, "cifar-100-binary"))
        ),
        Card(
            name="imagenet-c",
            title="ImageNet-C (Hendrycks and Dietterich, 2019)",
            kind="corruptions",
            classes=1000,
            domains=dict.fromkeys(CORRUPTIONS, 250_000),
            licence="CC BY 4.0",
            home="https://zenodo.org/record/2235448",
            layout="ROOT/corruption/severity/wnid/image.JPEG (the archives' folders noise, blur, ... may stay)",
        ),
        Card(
            name="fundus",
            title="Optic disc and cup: REFUGE, Drishti-GS, RIM-ONE r3",
            kind="masks",
            classes=3,
            class_names=_FUNDUS,
            domains={"refuge": 400, "drishti-gs": 101, "rim-one-r3": 159},
            licence="each for research, after registration",
            home="https://refuge.grand-challenge.org, https://cvit.iiit.ac.in/projects/mip/drishti-gs, http://rimone.isaatc.ull.es",
            layout="below ROOT each as distributed, or the ready-cropped archive: "
            "Domain{1,2,3}/{train,test}/ROIs/{image,mask}",
        ),
        Card(
            name="cardiac",
            title="Short-axis hearts: ACDC (cine) and MS-CMRSeg 2019 (LGE)",
            kind="masks",
            classes=4,
            class_names=_CARDIAC,
            domains={"acdc": 200, "lge": 45},
            licence="each for research, after registration",
            home="https://www.creatis.insa-lyon.fr/Challenge/acdc, https://zmiclab.github.io/zxh/0/mscmrseg19",
            layout="below ROOT: training/patientXXX/patientXXX_frameFF{,_gt}.nii.gz with Info.cfg; "
            "patientN_LGE.nii.gz with patientN_LGE_manual.nii.gz",
        ),
        Card(
            name="prostate",
            title="Prostate, T2: MSD Task05 and PROMISE12",
            kind="masks",
            classes=2,
            class_names=_PROSTATE,
            domains={"msd05": 32, "promise12": 50},
            licence="MSD: CC BY-SA 4.0; PROMISE12: for research, after registration",
            home="http://medicaldecathlon.com, https://promise12.grand-challenge.org",
            layout="below ROOT: Task05_Prostate/{imagesTr,labelsTr}/prostate_XX.nii.gz; "
            "TrainingData_Part{1,2,3}/CaseXX{,_segmentation}.mhd",
        ),
        _embedded("fundus-sim", "Optic disc and cup, drawn", _FUNDUS, 160, ("clinic", "screening", "handheld")),
        _embedded("cardiac-sim", "Short-axis hearts, drawn", _CARDIAC, 24, ("cine", "lge")),
        _embedded("prostate-sim", "Prostate, drawn", _PROSTATE, 24, ("body-coil", "endorectal")),
    )
}

OWN = {"folder": "ROOT/domain/class/image", "masks": "ROOT/domain/images/NAME and ROOT/domain/masks/NAME"}
"""Names of user data, which has no card, and their layouts."""


def get_card(name: str) -> Card:
    """Return the card of a known dataset."""
    import difflib

    if name in OWN:
        raise ValueError(f"{name} has no card: it is your own data, laid out as {OWN[name]}")
    if name not in CARDS:
        near = difflib.get_close_matches(name.lower(), CARDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"no dataset is called {name!r}.{hint} There are: {', '.join(CARDS)}, and your own as folder or masks"
        )
    return CARDS[name]
