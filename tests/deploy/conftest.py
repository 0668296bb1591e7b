"""What several tests of deployment start from."""

from collections.abc import Callable
from pathlib import Path

import pytest
from clinic import TSD, clinic, learner, written

from trueup.deploy import segment_folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, dict[str, bytes]]]:
    """The clinic, and its masks when nothing stops the work."""
    folder = clinic(tmp_path_factory.mktemp("clinic"))
    known: dict[str, dict[str, bytes]] = {}

    def masks(method: str) -> tuple[Path, dict[str, bytes]]:
        if method not in known:
            out = tmp_path_factory.mktemp(method) / "out"
            segment_folder(learner(method=method, hyper=TSD if method == "tsd" else {}), folder, out)
            known[method] = written(out)
        return folder, known[method]

    return masks
