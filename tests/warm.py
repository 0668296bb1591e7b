"""Programs in processes of their own that are forked from one which has imported torch: nobody waits for it again.

Only libraries of others are imported beforehand, so that a program that forgets an import of ours still fails.
"""

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import types
from functools import cache
from pathlib import Path
from typing import Any


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run `script.py arguments...` or `-c code` with warnings as errors and return what it prints.

    Raises CalledProcessError, with both outputs in its notes, if the program fails.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        job = {"command": [str(c) for c in command], "cwd": str(cwd or Path.cwd()), "out": str(out), "err": str(err)}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        if code:
            error = subprocess.CalledProcessError(code, job["command"], out.read_text(), err.read_text())
            error.add_note(f"{error.output}\n{error.stderr}")
            raise error
        return out.read_text()


@cache
def _server() -> "subprocess.Popen[str]":
    """Start the process that others are forked from; it ends when its input does."""
    command = [sys.executable, "-W", "error", __file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _serve() -> dict[str, Any]:
    """Fork for each job that comes in; return the job in the child, and end the parent with its input."""
    for line in sys.stdin:
        if not (child := os.fork()):
            return json.loads(line)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201
    os._exit(0)


def _redirect(job: dict[str, Any]) -> None:
    """Give the program an empty input and files for its outputs."""
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, job["out"], os.O_WRONLY | os.O_CREAT),
        (2, job["err"], os.O_WRONLY | os.O_CREAT),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (the old one has read ahead)


def _become(job: dict[str, Any]) -> None:
    """Run the program as python would."""
    os.chdir(job["cwd"])
    first, *rest = job["command"]
    if first == "-c":
        sys.argv, sys.path[0] = ["-c"], ""
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    for name in ("torch", "torchvision", "timm", "scipy.ndimage", "sklearn.metrics", "pydantic", "matplotlib.pyplot"):
        importlib.import_module(name)
    work = _serve()
    _redirect(work)
    _become(work)
