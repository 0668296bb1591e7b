"""The command line: `trueup VERB`. Each verb parses, calls one function, and prints."""

from __future__ import annotations

import importlib
import sys

from trueup.startup import interruptible


def main() -> None:
    """Run the command line."""
    with interruptible(True):
        try:
            for name in ("pydantic", "rich", "typer", "yaml"):
                importlib.import_module(name)
        except ImportError as error:
            sys.exit(f"the command line needs {error.name}: pip install 'trueup[bench]'")
        from trueup.cli.app import start
    start()
