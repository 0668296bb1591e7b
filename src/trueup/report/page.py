"""The report as one HTML file, without network, fonts or other files."""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from string import Template

from trueup.report.chart_marks import hatch_patterns
from trueup.report.charts import ImageStore, figure_html
from trueup.report.figure_spec import FigureSpec
from trueup.report.metrics import METRICS
from trueup.report.page_compare import comparison_html, difference_tables, pair_runs
from trueup.report.page_headline import headline, warnings
from trueup.report.page_markup import embed_gzip, embed_json, escape, plural
from trueup.report.page_tables import (
    TableGroup,
    Views,
    packed_views,
    run_columns,
    runs_table,
    table_groups,
    tables_html,
)
from trueup.report.palette import curve_labels
from trueup.report.runs import Record, is_finished, latest_runs, target_of

OPEN = 6  # tables; further ones are folded


def render_page(
    records: Sequence[Record],
    figures: Sequence[FigureSpec],
    *,
    title: str,
    against: Sequence[Record] = (),
    names: tuple[str, str] = ("this", "other"),
) -> str:
    """Return the document. With `against`, the records of another sweep, it compares the two, called `names`."""
    if not records:
        raise ValueError("no records to show; run `trueup bench` first")
    every = latest_runs(records)
    groups = table_groups(every)
    pairing = pair_runs(every, against) if against else None
    results: Views = {str(i): (group.title, group.tables) for i, group in enumerate(groups)}
    compared: Views = {f"c{i}": view for i, view in enumerate(difference_tables(pairing, names) if pairing else [])}
    sections = {
        "Results": _results(groups, results),
        "Comparison": _heading("Comparison") + comparison_html(pairing, compared, names) if pairing else "",
        "Figures": _figures(figures),
        "Runs": _runs(every),
    }
    there = {name: inside for name, inside in sections.items() if inside}
    top = f'<header class="top"><h1>{escape(title)}</h1><div class="lede">{headline(every, groups)}</div></header>'
    body = top + warnings(every, groups)
    for name, inside in there.items():
        body += f'<section id="{name.lower()}" aria-labelledby="{name.lower()}-title">{inside}</section>'
    data = embed_json("runs-data", run_columns(every)) + embed_gzip("views-data", packed_views({**results, **compared}))
    return _document(title, list(there), body, data, max(str(record.get("finished") or "") for record in every))


def _heading(name: str) -> str:
    return f'<h2 id="{name.lower()}-title">{name}</h2>'


def _results(groups: Sequence[TableGroup], views: Views) -> str:
    if not groups:
        return f"{_heading('Results')}<p>No run has finished, so there are no tables.</p>"
    targets = list(dict.fromkeys(target_of(record) for group in groups for record in group.records))
    metrics = [name for name in METRICS if any(name in group.tables for group in groups)]
    usual = list(dict.fromkeys(group.default.metric.name for group in groups))
    options = [("", f"usual: {' and '.join(usual)}")] if len(usual) > 1 else []
    options += [(name, METRICS[name].title) for name in sorted(metrics, key=lambda name: name not in usual)]
    choices = _select("metric", "Metric", options)
    choices += _select("target", "Target", [("", "all targets"), *((name, name) for name in targets)])
    if len(groups) > 1:
        settings = [("", f"all tables ({len(groups)})"), *((str(i), group.title) for i, group in enumerate(groups))]
        choices += _select("settings", "Table", settings)
    search = _search("filter-methods", "Methods", "filter by name")
    parts = [tables_html(number, title, tables) for number, (title, tables) in views.items()]
    more = f'<details class="more"><summary>{plural(len(parts) - OPEN, "more table")}</summary>'
    folded = f"{more}{''.join(parts[OPEN:])}</details>" if len(parts) > OPEN else ""
    return (
        f'<div class="tools">{_heading("Results")}{choices}{search}</div>'
        f'<div class="blocks">{"".join(parts[:OPEN])}{folded}</div>'
        '<p class="empty" hidden>Nothing matches; choose another target or clear the filter.</p>'
    )


def _select(name: str, label: str, options: Sequence[tuple[str, str]]) -> str:
    inside = "".join(f'<option value="{escape(value)}">{escape(words)}</option>' for value, words in options)
    return f'<label class="tool">{label}<select id="choose-{name}" autocomplete="off">{inside}</select></label>'


def _search(name: str, label: str, hint: str) -> str:
    field = f'<input id="{name}" type="search" placeholder="{hint}" autocomplete="off" spellcheck="false">'
    return f'<label class="tool">{label}{field}</label>'


def _figures(figures: Sequence[FigureSpec]) -> str:
    labels, images = curve_labels(figures), ImageStore()
    drawn = "".join(figure_html(spec, labels, images) for spec in figures)
    return f"{_heading('Figures')}{hatch_patterns()}{drawn}" if figures else ""


def _runs(records: Sequence[Record]) -> str:
    count = f'<span id="count" role="status">{plural(len(records), "run")}</span>'
    failed = sum(not is_finished(record) for record in records)
    hint = "method, target, seed, failed …" if failed else "method, target, seed …"
    search = _search("filter-runs", "Filter", hint)
    return f'<div class="tools">{_heading("Runs")}{count}{search}</div>{runs_table(records)}'


def _document(title: str, sections: Sequence[str], body: str, data: str, finished: str) -> str:
    assets = files("trueup.report") / "assets"
    names = ("page.html", "page.css", "page.js", "charts.js")
    page, style, *scripts = ((assets / name).read_text(encoding="utf-8") for name in names)
    script = f'"use strict";\n(() => {{\n{"".join(scripts)}}})();\n'
    return Template(page).substitute(
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        title=escape(title),
        style=style,
        links="".join(f'<a href="#{name.lower()}">{name}</a>' for name in sections),
        body=body,
        ended=escape(f", the last of which ended at {finished}") if finished else "",
        data=data,
        script=script,
    )
