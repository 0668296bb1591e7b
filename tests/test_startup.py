"""The start of the command: `python -m trueup`, Ctrl-C while torch is imported, and missing extras."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trueup
from trueup.startup import is_command

SOURCE = Path(__file__).parent.parent / "src"
INTERRUPT = "import signal; signal.raise_signal(signal.SIGINT)"


def start(*command: str, shadow: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command with the modules in a folder in place of installed ones."""
    path = os.pathsep.join([str(shadow), str(SOURCE)])
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})


@pytest.fixture
def shadow(tmp_path: Path) -> Path:
    """A folder whose `torch` is interrupted while it is imported, and a script as installers write it."""
    (tmp_path / "torch.py").write_text(INTERRUPT)
    (tmp_path / "trueup").write_text("import sys\nfrom trueup.cli import main\nsys.exit(main())\n")
    return tmp_path


@pytest.mark.parametrize("words", [["-m", "trueup"], ["trueup"]], ids=["module", "script"])
def test_ctrl_c_while_torch_is_imported_ends_the_command_in_one_line(words: list[str], shadow: Path) -> None:
    words = [str(shadow / word) if word == "trueup" and len(words) == 1 else word for word in words]
    done = start(sys.executable, *words, "list", shadow=shadow)
    assert (done.returncode, done.stderr, done.stdout) == (130, "Stopped before anything was done.\n", "")


def test_ctrl_c_while_a_program_imports_trueup_is_the_programs_own(shadow: Path) -> None:
    done = start(sys.executable, "-c", "import trueup", shadow=shadow)
    assert "KeyboardInterrupt" in done.stderr
    assert "Stopped" not in done.stderr


def test_ctrl_c_while_the_verbs_are_imported(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text(INTERRUPT)
    done = start(sys.executable, "-m", "trueup", "--version", shadow=tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (130, "Stopped before anything was done.\n", "")


def test_python_m_is_the_command(tmp_path: Path) -> None:
    done = start(sys.executable, "-m", "trueup", "--version", shadow=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"trueup {trueup.__version__}\n"), done.stderr


def test_a_program_that_imports_trueup_is_not_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_command()
    monkeypatch.setattr(sys, "argv", ["/usr/local/bin/trueup", "list"])
    assert is_command()


def test_run_without_its_extra_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.startswith(("trueup.bench", "trueup.data", "trueup.source"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(ImportError, match=r"trueup.run needs pydantic: pip install 'trueup\[bench\]'") as caught:
        _ = trueup.run
    assert type(caught.value) is ImportError
