"""Text and data of records inside a page, escaped so that nothing becomes markup."""

import base64
import gzip
import html
import json
import math
from collections.abc import Callable
from typing import Any


def escape(value: object) -> str:
    """Return a value as text for use between tags or inside a quoted attribute."""
    # Lone surrogates cannot be written to a file; a NUL ends the text for some readers.
    clean = str(value).encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    return html.escape(clean, quote=True)


def boxed(label: str, table: str) -> str:
    """Return a table in a box that scrolls, also with the keyboard."""
    return f'<div class="box" tabindex="0" role="region" aria-label="{escape(label)}">{table}</div>'


def sort_button(name: str, attributes: str = "") -> str:
    """Return the head of a column that a table can be sorted by."""
    return f'<th scope="col" aria-sort="none"{attributes}><button type="button">{escape(name)}</button></th>'


def minus_sign(number: str) -> str:
    """Replace the hyphen of a printed number by a minus sign, which is as wide as a plus."""
    return number.replace("-", "−")


def plural(count: int, noun: str) -> str:
    """Return "1 run" or "2 runs"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def join_words(words: list[str], most: int = 6) -> str:
    """Return "a, b and c", or the first of many words and the number of the others."""
    if len(words) > most:
        return f"{', '.join(words[: most - 1])} and {len(words) - most + 1} more"
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def upper_first(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[:1].upper() + text[1:]


def embed_json(name: str, value: Any) -> str:
    """Return data for the page's script, without characters that could end the element."""
    blob = json.dumps(jsonable(value), allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        blob = blob.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="{escape(name)}">{blob}</script>'


def embed_gzip(name: str, value: Any) -> str:
    """Return compressed data for the page's script: for long, repetitive and rarely used data."""
    blob = gzip.compress(json.dumps(jsonable(value), allow_nan=False).encode(), mtime=0)
    return f'<script type="text/plain" id="{escape(name)}">{base64.b64encode(blob).decode()}</script>'


def jsonable(value: Any, unfit: Callable[[float], Any] = str) -> Any:
    """Return a value that strict JSON can hold: NaN and infinities become what `unfit` returns."""
    if isinstance(value, dict):
        return {str(key): jsonable(inner, unfit) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(inner, unfit) for inner in value]
    return unfit(value) if isinstance(value, float) and not math.isfinite(value) else value
