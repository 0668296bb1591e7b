"""The command line: `trueup VERB`. Each verb parses, calls one function, and prints."""

from __future__ import annotations

import sys

from trueup.startup import interruptible


def main() -> None:
    """Run the command line."""
    with interruptible(True):
        try:
            import pydantic
            import rich
            import typer
            import yaml
        except ImportError as error:
            sys.exit(f"the command line needs {error.name}: pip install 'trueup[bench]'")
        del pydantic, rich, typer, yaml
        from trueup.cli.app import start
    start()
