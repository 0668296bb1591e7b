"""Plates as figures of a page: drawn as SVG, in the colours of the page, with the values for its script beside them."""

from collections.abc import Mapping, Sequence

from trueup.report.chart_curves import bars, lines
from trueup.report.chart_fields import Images, dots, matrix, picture
from trueup.report.chart_marks import Drawing, key
from trueup.report.figure_spec import Bars, Dots, Lines, Matrix, Panel, Picture, Plate
from trueup.report.page_markup import embed, text
from trueup.report.palette import OUTLINES, Style, style

WIDTHS = {1: 760, 2: 520, 3: 360}  # units of a drawing, by panels in a row
NARROW = 280
Legend = dict[str, tuple[Style, str]]


def figure(plate: Plate, labels: Sequence[str], images: Images) -> str:
    """The plate as a `<figure>`; `labels` are those of all plates, so that a method looks the same everywhere."""
    legend = _legend(plate, labels)
    styles = {label: look for label, (look, _) in legend.items()}
    width = WIDTHS.get(plate.columns, NARROW)
    drawn = [_panel(panel, styles, width, images) for panel in plate.panels]
    name = text(f"figure-{plate.name}")
    panels = "".join(_frame(panel, drawing) for panel, drawing in zip(plate.panels, drawn, strict=True))
    values = {"labels": list(legend), "charts": [drawing.values for drawing in drawn]}
    return (
        f'<figure id="{name}" class="plate" aria-labelledby="{name}-title">'
        f'<h3 id="{name}-title">{text(plate.title)}</h3>{_keys(legend)}'
        f'<div class="panels columns-{min(max(plate.columns, 1), 4)}">{panels}</div>'
        f"<figcaption>{text(plate.caption)}</figcaption>{embed(f'figure-{plate.name}-values', values)}</figure>"
    )


def _legend(plate: Plate, labels: Sequence[str]) -> Legend:
    """The labels of a plate in the order of their numbers, each with its look and the kind of its sample."""
    kind = "line" if any(isinstance(panel, Lines) for panel in plate.panels) else "bar"
    curves = [curve.label for p in plate.panels if isinstance(p, Lines | Bars) for curve in p.curves]
    groups = [group for p in plate.panels if isinstance(p, Dots) for group in p.groups]
    regions = dict.fromkeys(name for p in plate.panels if isinstance(p, Picture) for name in p.outlines)
    found: Legend = {label: (style(label, labels), kind) for label in curves}
    found |= {group: (style(group, groups), "dot") for group in groups if group not in found}
    outlines = {name: Style(OUTLINES[i % len(OUTLINES)]) for i, name in enumerate(regions)}
    return found | {name: (look, "outline") for name, look in outlines.items() if name not in found}


def _panel(panel: Panel, styles: Mapping[str, Style], width: int, images: Images) -> Drawing:
    match panel:
        case Lines():
            return lines(panel, styles, width)
        case Bars():
            return bars(panel, styles, width)
        case Matrix():
            return matrix(panel, width)
        case Dots():
            return dots(panel, styles, width)
        case Picture():
            return picture(panel, styles, images)


def _frame(panel: Panel, drawing: Drawing) -> str:
    """A drawing between what it is called and what is along its axes; long words wrap there as they cannot inside."""
    above = getattr(getattr(panel, "y", None), "title", "")
    below = panel.note if isinstance(panel, Picture) else getattr(getattr(panel, "x", None), "title", "")
    said = ", ".join(word for word in (panel.title, f"{above} against {below}" if above and below else below) if word)
    hint = "; arrow keys read out values" if drawing.values["stops"] else ""
    wide = f' style="max-width:{drawing.width}px"' if drawing.kind == "field" else ""
    focus = ' tabindex="0"' if drawing.values["stops"] else ""
    return (
        f'<div class="panel"{wide}>'
        f"{f'<h4>{text(panel.title)}</h4>' if panel.title else ''}{f'<p>{text(above)}</p>' if above else ''}"
        f'<div class="chart {drawing.kind}"{focus} role="img" aria-label="{text(said + hint)}">'
        f'<svg viewBox="0 0 {drawing.width} {drawing.height}" aria-hidden="true">{drawing.svg}</svg></div>'
        f"{f'<p class=below>{text(below)}</p>' if below else ''}</div>"
    )


def _keys(legend: Legend) -> str:
    if not legend:
        return ""
    buttons = [
        f'<button type="button" aria-pressed="true" data-series="{i}">{key(look, kind)}{text(label)}</button>'
        for i, (label, (look, kind)) in enumerate(legend.items())
    ]
    return f'<div class="keys" role="group" aria-label="Shown in this figure">{"".join(buttons)}</div>'
