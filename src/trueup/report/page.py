"""A report as one HTML file that needs nothing else: no network, no fonts, no other file."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files

from trueup.report.chart_fields import Images
from trueup.report.chart_marks import hatches
from trueup.report.charts import figure
from trueup.report.figure_spec import Plate
from trueup.report.metrics import METRICS
from trueup.report.page_compare import Pairing, differences, failures, named, pair, verdict
from trueup.report.page_headline import headline, warnings
from trueup.report.page_markup import embed, pack, plural, text
from trueup.report.page_runs import columns, runs
from trueup.report.page_tables import Block, block, blocks, latest, packed
from trueup.report.palette import labels_of
from trueup.report.record_rows import Record, done, target_of
from trueup.report.tables import Table

Views = Mapping[str, tuple[str, Mapping[str, Table]]]
OPEN = 6  # tables; of more, those behind stay folded


def page(
    records: Sequence[Record],
    plates: Sequence[Plate],
    *,
    title: str,
    against: Sequence[Record] = (),
    names: tuple[str, str] = ("this", "other"),
) -> str:
    """The document. With `against`, the records of another sweep, it compares the two, which are called `names`."""
    if not records:
        raise ValueError("no records to show; run `trueup bench` first")
    every = latest(records)
    made = blocks(every)
    pairing = pair(every, against) if against else None
    views: dict[str, tuple[str, Mapping[str, Table]]] = {str(i): (b.title, b.tables) for i, b in enumerate(made)}
    compared = differences(pairing, names) if pairing else []
    views |= {f"c{i}": each for i, each in enumerate(compared)}
    sections = {
        "Results": _results(made, {n: v for n, v in views.items() if not n.startswith("c")}),
        "Comparison": _comparison(pairing, {n: v for n, v in views.items() if n.startswith("c")}, names),
        "Figures": _figures(plates),
        "Runs": _runs(every),
    }
    there = {name: inside for name, inside in sections.items() if inside}
    top = f'<header class="top"><h1>{text(title)}</h1><div class="lede">{headline(every, made)}</div></header>'
    body = top + warnings(every, made) + "".join(_section(name, inside) for name, inside in there.items())
    data = embed("runs-data", columns(every)) + pack("views-data", packed(views))
    return _document(title, list(there), body, data, max(str(record.get("finished") or "") for record in every))


def _section(name: str, inside: str) -> str:
    return f'<section id="{name.lower()}" aria-labelledby="{name.lower()}-title">{inside}</section>'


def _heading(name: str) -> str:
    return f'<h2 id="{name.lower()}-title">{name}</h2>'


def _results(made: Sequence[Block], views: Views) -> str:
    if not made:
        return f"{_heading('Results')}<p>No run has finished, so there are no tables.</p>"
    targets = list(dict.fromkeys(target_of(record) for each in made for record in each.records))
    metrics = [name for name in METRICS if any(name in each.tables for each in made)]
    usual = list(dict.fromkeys(each.usual.metric.name for each in made))
    options = [("", f"usual: {' and '.join(usual)}")] if len(usual) > 1 else []
    options += [(name, METRICS[name].title) for name in sorted(metrics, key=lambda name: name not in usual)]
    choices = _select("metric", "Metric", options)
    choices += _select("target", "Target", [("", "all targets"), *((name, name) for name in targets)])
    if len(made) > 1:
        settings = [("", f"all tables ({len(made)})"), *((str(i), each.title) for i, each in enumerate(made))]
        choices += _select("settings", "Table", settings)
    search = _search("filter-methods", "Methods", "filter by name")
    parts = [_block(number, title, tables) for number, (title, tables) in views.items()]
    return (
        f'<div class="tools">{_heading("Results")}{choices}{search}</div>'
        f'<div class="blocks">{"".join(parts[:OPEN])}{_folded(parts[OPEN:])}</div>'
        '<p class="empty" hidden>Nothing matches; choose another target or clear the filter.</p>'
    )


def _block(number: str, title: str, tables: Mapping[str, Table]) -> str:
    return block(number, title, next(iter(tables.values())), metrics=list(tables))


def _folded(parts: Sequence[str]) -> str:
    if not parts:
        return ""
    return f'<details class="more"><summary>{plural(len(parts), "more table")}</summary>{"".join(parts)}</details>'


def _select(name: str, label: str, options: Sequence[tuple[str, str]]) -> str:
    inside = "".join(f'<option value="{text(value)}">{text(said)}</option>' for value, said in options)
    return f'<label class="tool">{label}<select id="choose-{name}" autocomplete="off">{inside}</select></label>'


def _search(name: str, label: str, hint: str) -> str:
    field = f'<input id="{name}" type="search" placeholder="{hint}" autocomplete="off" spellcheck="false">'
    return f'<label class="tool">{label}{field}</label>'


def _comparison(pairing: Pairing | None, views: Views, names: tuple[str, str]) -> str:
    if pairing is None:
        return ""
    parts = [_heading("Comparison"), f'<p class="verdict">{text(verdict(pairing, names))}</p>']
    parts += [_block(number, title, tables) for number, (title, tables) in views.items()]
    lists: list[tuple[str, Sequence[Record]]] = [(f"in {names[0]} only", pairing.only)]
    lists += [(f"in {names[1]} only", pairing.other)]
    lists += [(f"in both, but failed in {where}", some) for where, some in failures(pairing, names)]
    for said, some in lists:
        if some:
            items = "".join(f"<li>{text(name)}</li>" for name in named(some))
            summary = f"<summary><strong>{plural(len(some), 'run')}</strong> {text(said)}</summary>"
            parts.append(f"<details>{summary}<ul class=runs-list>{items}</ul></details>")
    return "".join(parts)


def _figures(plates: Sequence[Plate]) -> str:
    labels, images = labels_of(plates), Images()
    drawn = "".join(figure(plate, labels, images) for plate in plates)
    return f"{_heading('Figures')}{hatches()}{drawn}" if plates else ""


def _runs(records: Sequence[Record]) -> str:
    count = f'<span id="count" role="status">{plural(len(records), "run")}</span>'
    failed = sum(not done(record) for record in records)
    hint = "method, target, seed, failed …" if failed else "method, target, seed …"
    return f'<div class="tools">{_heading("Runs")}{count}{_search("filter-runs", "Filter", hint)}</div>{runs(records)}'


def _document(title: str, sections: Sequence[str], body: str, data: str, finished: str) -> str:
    assets = files("trueup.report") / "assets"
    style, *scripts = ((assets / name).read_text(encoding="utf-8") for name in ("page.css", "page.js", "charts.js"))
    script = f'"use strict";\n(() => {{\n{"".join(scripts)}}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    ended = f", the last of which ended at {finished}" if finished else ""
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name in sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f'<link rel="icon" href="data:,">\n<title>{text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n'
        f'<a class="skip" href="#main">Skip to the results</a>\n'
        f'<div class="bar"><nav aria-label="Sections">{links}</nav>'
        '<button type="button" id="theme">Dark</button></div>\n'
        f'<main id="main" tabindex="-1">{body}</main>\n'
        f"<footer>Made by Trueup from the records of its runs{text(ended)}.</footer>\n"
        '<div id="tip" hidden></div><div id="said" class="unseen" aria-live="polite"></div>\n'
        f"{data}\n<script>{script}</script>\n</body>\n</html>\n"
    )
