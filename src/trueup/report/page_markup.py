"""Text of records inside a page: data everywhere, markup nowhere."""

import base64
import gzip
import html
import json
import math
from typing import Any


def text(value: object) -> str:
    """A value as text between tags or inside a quoted attribute."""
    # A record may hold halves of surrogate pairs, which no file can; a NUL ends the text for some readers.
    whole = str(value).encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    return html.escape(whole, quote=True)


def signed(number: str) -> str:
    """A printed number with the sign that is as wide as a plus."""
    return number.replace("-", "−")


def plural(count: int, noun: str) -> str:
    """As in 1 run, 2 runs."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def listed(words: list[str], most: int = 6) -> str:
    """As in a, b and c; of many only the first."""
    if len(words) > most:
        return f"{', '.join(words[: most - 1])} and {len(words) - most + 1} more"
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def embed(name: str, value: Any) -> str:
    """Data for the page's script. No sign is left that could end the element or a line of it."""
    blob = json.dumps(plain(value), allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        blob = blob.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="{text(name)}">{blob}</script>'


def pack(name: str, value: Any) -> str:
    """Data that is long, says the same over and over, and is rarely asked for."""
    blob = gzip.compress(json.dumps(plain(value), allow_nan=False).encode(), mtime=0)
    return f'<script type="text/plain" id="{text(name)}">{base64.b64encode(blob).decode()}</script>'


def plain(value: Any) -> Any:
    """A value that JSON can hold: NaN and the infinities become words."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
