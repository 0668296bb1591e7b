"""The house keeps its shape: who imports whom, what an import costs, how long files are."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import counts
import mutants
import pytest
import warm

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "trueup"
FILES = sorted(SOURCE.rglob("*.py"))

# Each room, and the rooms it may import from besides itself. Imports run one way: downwards in this table only.
ALLOWED = {
    # Foundations: torch, numpy and safetensors at most.
    "version": "",
    "atomic": "",
    "startup": "",
    "hooks": "",
    "validate": "",
    "losses": "",
    "views": "",
    "finite": "",
    # What the flow is made of.
    "norm": "finite hooks",
    "guard": "finite hooks validate norm",
    "memory": "losses",
    "model": "finite hooks norm validate views",
    # The flow, and the methods that run in it.
    "core": "version atomic finite validate views memory norm guard model",
    "methods": "core model norm memory losses views validate",
    "rules": "guard",
    "testing": "core model norm methods losses memory",
    # Data, source models and the benchmark.
    "data": "atomic",
    "source": "core model data",
    "bench": "core model norm guard data source views atomic version",
    "report": "bench.records",
    "deploy": "core model guard norm data views atomic validate",
    # Faces. Nobody imports cli or testing.
    "cli": "core model guard data source bench report deploy methods views startup version",
    "__init__": "core guard model methods rules version bench data startup",
    "__main__": "cli",
}
EXTRAS = "torchvision timm segmentation_models_pytorch nibabel SimpleITK matplotlib ray scipy sklearn pandas PIL"
EXTRAS += " pydantic yaml rich typer"
HEAVY = set(EXTRAS.split())
# Rooms that `import trueup` brings: torch, numpy, safetensors and no more.
BARE = {*ALLOWED} - {"data", "source", "bench", "report", "deploy", "cli", "__main__"}


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Parse a file, once for all tests; the module comes first."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> set[str]:
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_run_one_way(path: Path) -> None:
    here = part(path)
    for name in imports(path):
        root, *rest = name.split(".")
        assert root not in HEAVY or here not in BARE, f"{name} is not for this part of the package"
        assert root != "torch" or here != "report", "tables and figures are made of records alone"
        if root == "trueup":
            allowed = {*ALLOWED[here].split(), here}
            assert rest[0] in allowed or ".".join(rest[:2]) in allowed, f"{here} must not import {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_fit_in_the_head(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= (120 if part(path) == "methods" else 350)
    module = nodes(path)[0]
    assert isinstance(module, ast.Module)
    body = list(module.body)
    body += [inner for node in body if isinstance(node, ast.ClassDef) for inner in node.body]
    for node in body:
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 45, f"{node.name} is long"
            assert node.name.startswith("_") or ast.get_docstring(node), f"{node.name} has no docstring"
    assert ast.get_docstring(module), "no docstring"


def test_modules_keep_to_themselves() -> None:
    assert len(counts.reach_ins()) <= 10
    assert len(counts.imported_by("core/adapter.py")) <= 12
    assert counts.repeated_names() == {}
    assert len(counts.attributes_of_split_model()) <= 10
    assert len(counts.files_of_a_batch()) <= 14


def test_dim_is_always_named() -> None:
    """`normalize(z, 1)` is the L1 norm; `softmax(z, 1)` reads the same and is not."""
    guilty = []
    for path in [*FILES, *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")]:
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                method = isinstance(node.func.value, ast.Name) and node.func.value.id in ("F", "torch")
                at = 1 if method else 0
                names = ("softmax", "log_softmax", "normalize", "cosine_similarity", "argmax", "argsort", "topk")
                positional = node.args[at + (node.func.attr in ("topk", "cosine_similarity")) :]
                if node.func.attr in names and any(isinstance(a, ast.Constant) for a in positional):
                    guilty.append(f"{path.name}:{node.lineno}")
    assert guilty == []


def test_planted_bugs_still_fit_the_source() -> None:
    """`make mutants` takes minutes; that its list is up to date can be seen at once."""
    assert mutants.misfits() == []


OPENERS = {"pictures.py", "corruptions.py"}  # the latter has frost of its own
SCANNERS = {"scanning.py", "archives.py", "cifar.py", "digits.py", "imagenet.py", "run_log.py"}
SCANS = ("os.scandir", "os.walk", ".iterdir(", ".rglob(", ".glob(")


def test_one_decoder_and_one_scanner() -> None:
    """Pictures are opened, and folders of users listed, in one place; the others name files of known layouts."""
    for path in FILES:
        text = path.read_text()
        if part(path) in ("data", "deploy", "cli", "source", "bench"):
            assert path.name in OPENERS or ("Pillow.open(" not in text and "Image.open(" not in text), path
        if part(path) in ("data", "deploy", "cli"):
            assert path.name in SCANNERS or not any(word in text for word in SCANS), path


SAFELY = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False", "numpy.load": "allow_pickle=False"}


def test_no_pickle_and_no_cuda() -> None:
    for path in FILES:
        assert ".cuda(" not in path.read_text()
        if part(path) != "testing":
            assert not {name.split(".")[0] for name in imports(path)} & {
                "pickle",
                "shelve",
                "marshal",
                "joblib",
                "dill",
            }
        for node in nodes(path):
            if isinstance(node, ast.Call) and (asked := SAFELY.get(ast.unparse(node.func))):
                assert asked in [ast.unparse(k) for k in node.keywords], f"{path.name}:{node.lineno}: say {asked}"


def test_import_needs_none_of_the_extras() -> None:
    """They are blocked, with all parts that the process forked from has loaded."""
    blocked = f"import sys\nheavy = {sorted(HEAVY)!r}\n"
    blocked += "for name in [*heavy, *(m for m in sys.modules if m.split('.')[0] in heavy)]: sys.modules[name] = None\n"
    blocked += "import trueup, torch\n"
    warm.run("-c", blocked + "print(trueup.adapt(torch.nn.Linear(3, 2), 'tsd')(torch.randn(4, 3)))")


def test_import_brings_none_of_the_extras() -> None:
    command = [sys.executable, "-c", "import trueup, sys; print(*sys.modules)"]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert not HEAVY & set(loaded)
