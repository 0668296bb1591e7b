"""Tables as text for the terminal, Markdown, LaTeX or CSV."""

import csv
import io
import re
import textwrap
from collections.abc import Callable, Sequence

from trueup.report.metrics import check_name
from trueup.report.tables import Cell, Column, Table

MISSING = "–"
GAP = "  "
PLAIN = {"": "", "best": "*", "second": "°"}
STYLED = {"": "{}", "best": "\x1b[1m{}\x1b[0m", "second": "\x1b[4m{}\x1b[0m"}
MARKDOWN = {"": "{}", "best": "**{}**", "second": "<u>{}</u>"}
LATEX = {"": "{}", "best": r"\textbf{{{}}}", "second": r"\underline{{{}}}"}
LEGEND = "Best in bold, second best underlined."
PLAIN_LEGEND = "* best, ° second best."
LATEX_SIGNS = {
    "\\": r"\textbackslash{}",
    **{sign: "\\" + sign for sign in "{}$&#%_"},
    **{sign: f"${sign}$" for sign in "<>|"},
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "–": "--",
    "±": r"$\pm$",
    "×": r"$\times$",
}
LATEX_WIDE = 8  # columns that fit the width of a page


def render_table(table: Table, form: str, *, color: bool = False, width: int = 100) -> str:
    """Return a table in one of the FORMS; `color` and `width` are for the terminal."""
    check_name(form, FORMS, "form")
    return _terminal(table, color=color, width=width) if form == "terminal" else FORMS[form](table)


def has_marks(table: Table) -> bool:
    """Return True if a cell is marked as best or second best."""
    return any(cell.mark for row in table.rows for cell in row.cells if cell)


# Terminal


def _terminal(table: Table, *, color: bool = False, width: int = 100) -> str:
    columns = [_column(head, [row.cells[i] for row in table.rows], color) for i, head in enumerate(table.columns)]
    labels = [row.label for row in table.rows]
    left = max(len(label) for label in ["method", *labels])
    parts = [table.title if not color else STYLED["best"].format(table.title), ""]
    for block in _blocks(columns, max(width - left, width // 2)) if labels else []:
        top = max(len(head) for head, _, _ in block)
        for i in range(top):
            # Headers are aligned at the bottom.
            words = [(head[i - top + len(head)] if i >= top - len(head) else "").rjust(size) for head, _, size in block]
            parts.append(GAP.join([("method" if i == top - 1 else "").ljust(left), *words]).rstrip())
        parts.append("─" * (left + sum(len(GAP) + size for _, _, size in block)))
        for i, label in enumerate(labels):
            parts.append((label.ljust(left) + "".join(texts[i] for _, texts, _ in block)).rstrip())
        parts.append("")
    parts += textwrap.wrap(table.caption, width)
    parts += [LEGEND if color else PLAIN_LEGEND] if has_marks(table) else []
    for note in table.notes:
        parts += textwrap.wrap(f"• {note}", width, subsequent_indent="  ")
    return "\n".join(parts) + "\n"


def _column(column: Column, cells: Sequence[Cell | None], color: bool) -> tuple[list[str], list[str], int]:
    """Return header lines, cells with the gap to their left, and width of a column, aligned at the ±."""
    texts = [column.text(cell) if cell else (MISSING, "") for cell in cells]
    means, stds = (max((len(text[i]) for text in texts), default=0) for i in (0, 1))
    size = means + (3 + stds if stds else 0)
    head = _header(column.name, size)
    size = max(size, *(len(line) for line in head))
    lines = []
    for cell, (mean, std) in zip(cells, texts, strict=True):
        mark = cell.mark if cell else ""
        # Without colour, the mark goes into the gap and needs no width.
        text = STYLED[mark].format(mean) if color else PLAIN[mark] + mean
        seen = len(mean) if color else len(text)
        tail = f" ± {std.rjust(stds)}" if std else " " * (3 + stds if stds else 0)
        lines.append(" " * (len(GAP) + size - len(tail) - seen) + text + tail)
    return head, lines, size


def _header(name: str, size: int) -> list[str]:
    """Break a name that is longer than its cells after underscores, blanks and hyphens."""
    lines = [""]
    pieces = re.findall(r"[^_\s-]*[_\s-]*", name)
    room = max(size, *(len(piece) for piece in pieces))
    for piece in filter(None, pieces):
        if lines[-1] and len(lines[-1] + piece) > room:
            lines.append("")
        lines[-1] += piece
    return [line.strip() for line in lines]


Piece = tuple[list[str], list[str], int]


def _blocks(columns: Sequence[Piece], width: int) -> list[list[Piece]]:
    """Split columns into as few blocks as the width allows, of about equal width."""
    blocks = _fill(columns, width)
    while width > 0 and len(narrower := _fill(columns, width - 1)) == len(blocks):
        blocks, width = narrower, width - 1
    return blocks


def _fill(columns: Sequence[Piece], width: int) -> list[list[Piece]]:
    blocks: list[list[Piece]] = [[]]
    used = 0
    for column in columns:
        if blocks[-1] and used + len(GAP) + column[2] > width:
            blocks.append([])
            used = 0
        blocks[-1].append(column)
        used += len(GAP) + column[2]
    return blocks


# Markdown


def _markdown(table: Table) -> str:
    head = ["method", *(_markdown_text(column.name) for column in table.columns)]
    body = [[_markdown_text(row.label), *_texts(table, row.cells, MARKDOWN, str)] for row in table.rows]
    sizes = [max(3, *(len(line[at]) for line in [head, *body])) for at in range(len(head))]
    lines = []
    for line in [head, *body]:
        padded = [line[0].ljust(sizes[0]), *(text.rjust(size) for text, size in zip(line[1:], sizes[1:], strict=True))]
        lines.append(f"| {' | '.join(padded)} |")
    lines.insert(1, f"|{'|'.join(['-' * (sizes[0] + 2), *('-' * (size + 1) + ':' for size in sizes[1:])])}|")
    caption = _markdown_text(table.caption) + (f" {LEGEND}" if has_marks(table) else "")
    notes = [f"- {_markdown_text(note)}" for note in table.notes]
    parts = [f"**{_markdown_text(table.title)}**", "\n".join(lines), caption, "\n".join(notes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _texts(table: Table, cells: Sequence[Cell | None], marks: dict[str, str], write: Callable[[str], str]) -> list[str]:
    texts = []
    for column, cell in zip(table.columns, cells, strict=True):
        mean, std = column.text(cell) if cell else (MISSING, "")
        texts.append(marks[cell.mark if cell else ""].format(write(mean)) + (" " + write(f"± {std}") if std else ""))
    return texts


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\|*<`\[\]])", r"\\\1", " ".join(text.split()))


# LaTeX


def _latex(table: Table) -> str:
    wide = len(table.columns) > LATEX_WIDE
    body = [[_latex_text(row.label), *_texts(table, row.cells, LATEX, _latex_number)] for row in table.rows]
    caption = f"{table.title}. {table.caption}" + (f" {LEGEND}" if has_marks(table) else "")
    notes = r"\\ ".join(f"{_latex_text(note)}." for note in table.notes)
    lines = [
        f"% needs \\usepackage{{booktabs{',graphicx' if wide else ''}}}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_latex_text(caption)}}}",
        *([r"\resizebox{\linewidth}{!}{%"] if wide else []),
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        r"\toprule",
        " & ".join(["method", *(_latex_text(column.name) for column in table.columns)]) + r" \\",
        r"\midrule",
        *(" & ".join(line) + r" \\" for line in body),
        r"\bottomrule",
        r"\end{tabular}" + ("}" if wide else ""),
        *([rf"\par\footnotesize {notes}"] if notes else []),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_text(text: str) -> str:
    escaped = "".join(LATEX_SIGNS.get(sign, sign) for sign in " ".join(text.split()))
    return re.sub(r'"([^"]*)"', r"``\1''", escaped)


def _latex_number(text: str) -> str:
    return re.sub(r"^([+-])(?!-)", r"$\1$", _latex_text(text)).replace("inf", r"$\infty$")


# CSV


def _csv(table: Table) -> str:
    """Return numbers as in the records: fractions, not percent, with all digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = [f"{column.name}_{part}" for column in table.columns for part in ("mean", "std", "n")]
    writer.writerow(["label", "method", "select", *heads])
    for row in table.rows:
        numbers = [(cell.mean, cell.std, cell.n) if cell else (None, None, 0) for cell in row.cells]
        writer.writerow([row.label, row.method, row.select, *(value for cell in numbers for value in cell)])
    return out.getvalue()


FORMS: dict[str, Callable[[Table], str]] = {"terminal": _terminal, "markdown": _markdown, "latex": _latex, "csv": _csv}
