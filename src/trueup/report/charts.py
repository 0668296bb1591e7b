"""Figures of the page: SVG in the page's colours, with the values for its script."""

from collections.abc import Mapping, Sequence

from trueup.report.chart_curves import draw_bars, draw_lines
from trueup.report.chart_fields import ImageStore, draw_image, draw_matrix, draw_scatter
from trueup.report.chart_marks import Drawing, legend_sample
from trueup.report.figure_spec import (
    BarPanel,
    CurvePanel,
    FigureSpec,
    ImagePanel,
    LinePanel,
    MatrixPanel,
    Panel,
    ScatterPanel,
)
from trueup.report.page_markup import embed_json, escape
from trueup.report.palette import OUTLINES, Style, style

WIDTHS = {1: 760, 2: 520, 3: 360}  # units of a drawing, by panels in a row
NARROW = 280
Legend = dict[str, tuple[Style, str]]


def figure_html(spec: FigureSpec, labels: Sequence[str], images: ImageStore) -> str:
    """Return a `<figure>`; `labels` are those of all figures, so that a method looks the same in each."""
    legend = _legend(spec, labels)
    styles = {label: look for label, (look, _) in legend.items()}
    width = WIDTHS.get(spec.columns, NARROW)
    drawn = [_draw(panel, styles, width, images) for panel in spec.panels]
    name = escape(f"figure-{spec.name}")
    panels = "".join(_panel(panel, drawing) for panel, drawing in zip(spec.panels, drawn, strict=True))
    values = {"labels": list(legend), "charts": [drawing.values for drawing in drawn]}
    return (
        f'<figure id="{name}" class="figure" aria-labelledby="{name}-title">'
        f'<h3 id="{name}-title">{escape(spec.title)}</h3>{_keys(legend)}'
        f'<div class="panels columns-{min(max(spec.columns, 1), 4)}">{panels}</div>'
        f"<figcaption>{escape(spec.caption)}</figcaption>{embed_json(f'figure-{spec.name}-values', values)}</figure>"
    )


def _legend(spec: FigureSpec, labels: Sequence[str]) -> Legend:
    """Return the labels in the order of their numbers, each with its style and the kind of its sample."""
    kind = "line" if any(isinstance(panel, LinePanel) for panel in spec.panels) else "bar"
    curves = [curve.label for p in spec.panels if isinstance(p, CurvePanel) for curve in p.curves]
    groups = [group for p in spec.panels if isinstance(p, ScatterPanel) for group in p.groups]
    regions = dict.fromkeys(name for p in spec.panels if isinstance(p, ImagePanel) for name in p.outlines)
    found: Legend = {label: (style(label, labels), kind) for label in curves}
    found |= {group: (style(group, groups), "dot") for group in groups if group not in found}
    outlines = {name: Style(OUTLINES[i % len(OUTLINES)]) for i, name in enumerate(regions)}
    return found | {name: (look, "outline") for name, look in outlines.items() if name not in found}


def _draw(panel: Panel, styles: Mapping[str, Style], width: int, images: ImageStore) -> Drawing:
    match panel:
        case LinePanel():
            return draw_lines(panel, styles, width)
        case BarPanel():
            return draw_bars(panel, styles, width)
        case MatrixPanel():
            return draw_matrix(panel, width)
        case ScatterPanel():
            return draw_scatter(panel, styles, width)
        case ImagePanel():
            return draw_image(panel, styles, images)


def _panel(panel: Panel, drawing: Drawing) -> str:
    """Return a drawing with its titles as HTML, because text in SVG does not wrap."""
    above = getattr(getattr(panel, "y", None), "title", "")
    below = panel.note if isinstance(panel, ImagePanel) else getattr(getattr(panel, "x", None), "title", "")
    words = ", ".join(word for word in (panel.title, f"{above} against {below}" if above and below else below) if word)
    hint = "; arrow keys read out values" if drawing.values["stops"] else ""
    wide = f' style="max-width:{drawing.width}px"' if drawing.kind == "field" else ""
    focus = ' tabindex="0"' if drawing.values["stops"] else ""
    return (
        f'<div class="panel"{wide}>'
        f"{f'<h4>{escape(panel.title)}</h4>' if panel.title else ''}{f'<p>{escape(above)}</p>' if above else ''}"
        f'<div class="chart {drawing.kind}"{focus} role="img" aria-label="{escape(words + hint)}">'
        f'<svg viewBox="0 0 {drawing.width} {drawing.height}" aria-hidden="true">{drawing.svg}</svg></div>'
        f"{f'<p class=below>{escape(below)}</p>' if below else ''}</div>"
    )


def _keys(legend: Legend) -> str:
    if not legend:
        return ""
    buttons = [
        f'<button type="button" aria-pressed="true" data-series="{i}">{legend_sample(*sample)}{escape(label)}</button>'
        for i, (label, sample) in enumerate(legend.items())
    ]
    return f'<div class="keys" role="group" aria-label="Shown in this figure">{"".join(buttons)}</div>'
