"""`trueup data unpack`, as its users type it."""

import hashlib
import io
import re
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trueup.cli import main
from trueup.cli.app import app


def invoke(*words: object) -> str:
    result = CliRunner().invoke(app, ["data", "unpack", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a folder of its own, away from where the user is."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with tarfile.open(tmp_path / "pacs [1].tar.gz", "w:gz") as file:
        for name, content in (("photo/dog/1.png", b"12345"), ("photo/cat/2.png", b"1" * 2000)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return tmp_path / "pacs [1].tar.gz"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_into_a_folder_by_its_name_here(archive: Path) -> None:
    text = invoke(archive, "--sha256", digest(archive).upper())
    assert "pacs [1]: 2 files, 2,005 bytes" in text
    assert "✓ its SHA-256 matches" in text
    assert "verified" not in text
    assert Path("pacs [1]/photo/dog/1.png").read_bytes() == b"12345"
    assert [path.name for path in Path().iterdir()] == ["pacs [1]"]


def test_into_a_folder_of_choice(archive: Path) -> None:
    assert "there: 2 files" in invoke(archive, "--sha256", digest(archive), "--out", "there")
    assert Path("there/photo/cat/2.png").stat().st_size == 2000
    assert [path.name for path in Path().iterdir()] == ["there"]


def test_without_a_hash_it_says_so_and_says_the_hash(archive: Path) -> None:
    text = invoke(archive, "--unverified")
    assert "not verified" in text
    assert digest(archive) in text
    assert "✓" not in text


@pytest.mark.parametrize("words", [(), ("--sha256", "0" * 64, "--unverified")])
def test_either_a_hash_or_the_word_that_there_is_none(words: tuple[str, ...], archive: Path) -> None:
    with pytest.raises(ValueError, match=r"either --sha256 HEX, .* or --unverified"):
        invoke(archive, *words)
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--sha256", "0" * 64), r"pacs \[1\].tar.gz: its SHA-256 is .*; nothing was unpacked"),
        (("--sha256", "12"), "'12' is not a SHA-256"),
        (("--unverified", "--out", "no/where"), "there is no folder"),
    ],
)
def test_refusals_leave_nothing(words: tuple[str, ...], match: str, archive: Path) -> None:
    with pytest.raises(ValueError, match=match):
        invoke(archive, *words)
    assert not list(Path().iterdir())


def test_a_name_that_names_no_folder(archive: Path) -> None:
    plain = archive.rename(archive.with_name("pacs"))
    with pytest.raises(ValueError, match="give --out"):
        invoke(plain, "--unverified")
    invoke(plain, "--unverified", "--out", "x")


def test_an_error_is_one_sentence_and_a_status(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A member tries to write elsewhere."""
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("../../canary", "evil")
    words = ["data", "unpack", str(archive), "--sha256", digest(archive), "--out", "x"]
    monkeypatch.setattr(sys, "argv", ["trueup", *words])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 2
    said = "Error: pacs [1].tar.gz: member '../../canary' leaves the folder; nothing was unpacked"
    assert " ".join(capsys.readouterr().err.split()) == said
    assert not list(archive.parent.rglob("canary"))
    assert not (archive.parent.parent / "canary").exists()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a signal that cannot be caught")
def test_a_killed_process_leaves_no_folder_and_the_next_one_tidies_up(archive: Path) -> None:
    code = "import os, signal, sys; from trueup.data.archives import unpack_archive\n"
    code += (
        "unpack_archive(sys.argv[1], 'x', progress=lambda done, of: done == 5 and os.kill(os.getpid(), signal.SIGKILL))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(archive)])
    assert done.returncode == -signal.SIGKILL
    (left,) = Path().iterdir()
    assert re.fullmatch(r"\.x\.\d+\.partial", left.name)
    assert (left / "photo/dog/1.png").exists()
    invoke(archive, "--unverified", "--out", "x")
    assert [path.name for path in Path().iterdir()] == ["x"]
