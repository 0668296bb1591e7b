"""Programs in processes of their own that are forked from one which has imported torch: nobody waits for it again.

Only libraries of others are imported beforehand, so that a program that forgets an import of ours still fails.
"""

import atexit
import importlib
import json
import os
import runpy
import select
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run `script.py`, `-c code` or `-m module`, with arguments, and return what it prints; warnings are errors.

    Raises CalledProcessError, with both outputs in its notes, if the program fails.
    """
    done = call(*command, cwd=cwd)
    if done.returncode:
        error = subprocess.CalledProcessError(done.returncode, done.args, done.stdout, done.stderr)
        error.add_note(f"{error.output}\n{error.stderr}")
        raise error
    return done.stdout


def call(
    *command: str | Path, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a program as `run` does, with further variables of the environment; return its status and outputs."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        _server().start(*command, cwd=cwd or Path.cwd(), environment=environment or {}, out=out, err=err)
        code = _server().result()
        return subprocess.CompletedProcess([str(word) for word in command], code, out.read_text(), err.read_text())


class Server:
    """A process with libraries loaded that others are forked from, one at a time; it ends when its input does."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, *flags, __file__]
        self.process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.child = 0

    def start(
        self, *command: str | Path, cwd: Path, environment: Mapping[str, str], out: Path, err: Path | None = None
    ) -> None:
        """Start a program in a session of its own; `child` is its process."""
        job = {"command": [str(word) for word in command], "cwd": str(cwd), "environment": dict(environment)}
        line = json.dumps({**job, "out": str(out), "err": str(err or out)}) + "\n"
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode())
        self.child = self._read()

    def ended(self, seconds: float) -> bool:
        """Wait for the program; return False if it still runs after these seconds."""
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def result(self) -> int:
        """Return the exit status of the program that was started."""
        return self._read()

    def close(self) -> None:
        """End the process."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait()

    def _read(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@cache
def _server() -> Server:
    """Return the server of this process, whose programs have warnings as errors."""
    server = Server("-W", "error")
    atexit.register(server.close)
    return server


def _serve() -> dict[str, Any]:
    """Fork for each job that comes in; return the job in the child, and end the parent with its input."""
    for line in sys.stdin:
        if not (child := os.fork()):
            os.setsid()
            return json.loads(line)
        print(child, flush=True)  # noqa: T201
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201
    os._exit(0)


def _redirect(job: dict[str, Any]) -> None:
    """Give the program an empty input and files for its outputs."""
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, job["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, job["err"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (the old one has read ahead)


def _become(job: dict[str, Any]) -> None:
    """Run the program as python would."""
    os.chdir(job["cwd"])
    os.environ |= job["environment"]
    sys.path[1:1] = filter(None, job["environment"].get("PYTHONPATH", "").split(os.pathsep))
    first, *rest = job["command"]
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv, sys.path[0] = rest, job["cwd"]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    for name in (
        "torch",
        "torchvision",
        "timm",
        "scipy.ndimage",
        "sklearn.metrics",
        "pydantic",
        "matplotlib.pyplot",
        "torch._dynamo",
    ):
        importlib.import_module(name)
    work = _serve()
    _redirect(work)
    _become(work)
