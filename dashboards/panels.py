"""The few kinds of panels that the dashboards are made of, so that all look and read alike.

Responsible for: one data source and one choice of job for everything (template variables), a unit and a description on
every panel, colours that mean the same everywhere, and a layout that follows from the order of the panels. Refuses to know
any metric.

Source: Grafana's best practices for dashboards (a row a question, the answer first).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import bargauge, dashboard, prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders import common as shared
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
JOB = 'atoll_job=~"$job"'
RATE = "$__rate_interval"
RESTARTS = f"sum by (atoll_job, island) (increase(atoll_island_restarts_total{{{JOB}}}[{RATE}])) > 0"
"""Marked on every dashboard: most of what bends a curve is an island that went or came back."""
PAGE = "Where the service's page is, for links from jobs to it."
RUNBOOK = "Where deploy/RUNBOOK.md can be read, for links from alerts to it."
WIDTH = 24
GOOD, WARN, BAD, CALM, DULL = "green", "orange", "red", "blue", "text"
NOTHING = "none"
"""Shown by a panel that has no data, which is the usual case for failures, losses of islands, and the like."""
TOKENS, STEPS, MERGES = "si: tok/s", "suffix: steps/s", "suffix: merges/s"
ISLANDS_MAX = 10
"""Lines of single islands in a panel. More cannot be told apart."""


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, and how its series are named: a legend with {{label}}."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: the values of ``expression``, or, without one, of the label ``name``.

    A column without a title is not shown; its query brings labels for others. ``steps`` colour the cell from their value
    on. ``words`` are shown in place of the values 0 and 1. ``link`` is where a click leads.
    """

    title: str
    expression: str = ""
    unit: str = "none"
    name: str = ""
    steps: Sequence[tuple[float | None, str]] = ()
    words: tuple[str, str] | None = None
    link: str = ""


Panel = Any
"""Any of the library's panel builders; they share methods, not a base class."""


def board(uid: str, title: str, description: str, rows: Sequence[tuple[str, Sequence[Panel]]]) -> dashboard.Dashboard:
    """A dashboard of these rows. Panels fill each row from the left, in lines of 24 columns."""
    built = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["atoll"])
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .refresh("15s")
        .time("now-1h", "now")
        .timezone("browser")
        .link(
            dashboard.DashboardLink("atoll")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["atoll"])
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("job")
            .label("Job")
            .datasource(SOURCE)
            .query("label_values(atoll_job_phase, atoll_job)")
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".+")
        )
        .with_variable(
            dashboard.TextBoxVariable("page").label("Page").description(PAGE).default_value("https://127.0.0.1:8470")
        )
        .with_variable(
            dashboard.TextBoxVariable("runbook")
            .label("Runbook")
            .description(RUNBOOK)
            .default_value("deploy/RUNBOOK.md")
        )
    )
    built = built.annotation(
        dashboard.AnnotationQuery().name("Restarts").datasource(SOURCE).enable(True).icon_color(WARN).expr(RESTARTS)
    )
    number = 0
    for name, panels in rows:
        number += 1
        built = built.with_row(dashboard.Row(name).id(number))
        for panel in panels:
            number += 1
            built = built.with_panel(panel.id(number))
    return built


def figure(
    title: str,
    description: str,
    unit: str,
    query: Query,
    *,
    steps: Sequence[tuple[float | None, str]] = ((None, CALM),),
) -> Panel:
    """One number, with its recent course behind it. ``steps`` colour it from their value on."""
    return _common(
        stat.Panel()
        .graph_mode(common.BigValueGraphMode.AREA)
        .color_mode(common.BigValueColorMode.VALUE)
        .reduce_options(shared.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_thresholds(steps))
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS)),
        *(title, description, unit, [query]),
        *(4, 4),
    )


def curves(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    stacked: bool = False,
    width: int = 12,
    colours: dict[str, str] | None = None,
    log: bool = False,
) -> Panel:
    """Values over time. Stacked ones are parts of a whole; ``colours`` are by the name of the series."""
    panel = (
        timeseries.Panel()
        .fill_opacity(60 if stacked else 8)
        .line_width(1)
        .show_points(common.VisibilityMode.NEVER)
        .legend(
            shared.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
        )
        .tooltip(shared.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
    )
    if stacked:
        panel = panel.stacking(shared.StackingConfig().mode(common.StackingMode.NORMAL))
    if log:
        panel = panel.scale_distribution(shared.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10))
    else:
        panel = panel.axis_soft_min(0)
    for name, colour in (colours or {}).items():
        fixed = {"mode": "fixed", "fixedColor": colour}
        panel = panel.override_by_name(name, [models.DynamicConfigValue(id_val="color", value=fixed)])
    return _common(panel, title, description, unit, queries, width, 8)


def ranking(title: str, description: str, unit: str, query: Query, *, width: int = 12) -> Panel:
    """The largest values, as bars."""
    return _common(
        bargauge.Panel()
        .orientation(common.VizOrientation.HORIZONTAL)
        .display_mode(common.BarGaugeDisplayMode.BASIC)
        .reduce_options(shared.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_thresholds(((None, WARN),)))
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .min(0),
        *(title, description, unit, [query]),
        *(width, 8),
    )


def listing(title: str, description: str, key: str, columns: Sequence[Column], *, width: int = WIDTH) -> Panel:
    """A table with one row for each value of the label ``key``. Each column with an expression has one query."""
    asked = [column for column in columns if column.expression]
    shown = [column for column in columns if column.title]
    panel = table.Panel()
    # Grafana numbers the values only if there are several queries
    values = [f"Value #{chr(ord('A') + n)}" for n in range(len(asked))] if len(asked) > 1 else ["Value"]
    fields = [column.name or values[asked.index(column)] for column in shown]
    transformations: list[tuple[str, dict[str, Any]]] = [
        ("filterFieldsByName", {"include": {"names": fields}}),
        (
            "organize",
            {
                "indexByName": {field: number for number, field in enumerate(fields)},
                "renameByName": {field: column.title for field, column in zip(fields, shown, strict=True)},
            },
        ),
    ]
    if len(asked) > 1:
        transformations.insert(0, ("joinByField", {"byField": key, "mode": "outer"}))
    for name, options in transformations:
        panel = panel.with_transformation(models.DataTransformerConfig(id_val=name, options=options))
    for column in shown:
        panel = panel.override_by_name(column.title, list(_properties(column)))
    for number, column in enumerate(asked):
        target = prometheus.Dataquery().expr(column.expression).ref_id(chr(ord("A") + number))
        panel = panel.with_target(target.datasource(SOURCE).instant().format(PromQueryFormat.TABLE))
    return _common(panel, title, description, "none", (), width, 8)


def _properties(column: Column) -> Iterator[models.DynamicConfigValue]:
    yield models.DynamicConfigValue(id_val="unit", value=column.unit)
    if column.steps:
        yield models.DynamicConfigValue(id_val="thresholds", value=_thresholds(column.steps).build())
        yield models.DynamicConfigValue(id_val="color", value={"mode": "thresholds"})
        yield models.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"})
    if column.words:
        options = {str(value): {"text": word, "index": value} for value, word in enumerate(column.words)}
        yield models.DynamicConfigValue(id_val="mappings", value=[{"type": "value", "options": options}])
    if column.link:
        link = {"title": "Open", "url": column.link, "targetBlank": True}
        yield models.DynamicConfigValue(id_val="links", value=[link])


def most(expression: str) -> str:
    """Return the query for the islands with the largest values."""
    return f"topk({ISLANDS_MAX}, {expression})"


def least(expression: str) -> str:
    """Return the query for the islands with the smallest values."""
    return f"bottomk({ISLANDS_MAX}, {expression})"


def timeline(title: str, description: str, query: Query, states: Sequence[tuple[str, str]]) -> Panel:
    """A line for each series, coloured by its state; the values are the states' numbers, counted from 1."""
    options = {
        str(number): models.ValueMappingResult(text=name, color=colour, index=number)
        for number, (name, colour) in enumerate(states, start=1)
    }
    return _common(
        statetimeline.Panel()
        .mappings([models.ValueMap(options=options)])
        .merge_values(True)
        .show_value(common.VisibilityMode.NEVER)
        .row_height(0.8)
        .fill_opacity(80)
        .line_width(0)
        .legend(
            shared.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
        ),
        *(title, description, "none", [query]),
        *(WIDTH, 8),
    )


def quantiles(metric: str, by: str = "", *, of: Sequence[float] = (0.5, 0.95)) -> list[Query]:
    """Quantiles of a histogram of the chosen jobs: each quantile, for each value of the label ``by`` if there is one."""
    group, name = (f"le, {by}", f"{{{{{by}}}}} ") if by else ("le", "")
    rate = f"sum by ({group}) (rate({metric}_bucket{{{JOB}}}[{RATE}]))"
    return [Query(f"histogram_quantile({q:g}, {rate})", f"{name}p{q * 100:g}") for q in of]


def _common(
    panel: Panel, title: str, description: str, unit: str, queries: Sequence[Query], width: int, height: int
) -> Panel:
    panel = panel.title(title).description(description).unit(unit).no_value(NOTHING).datasource(SOURCE)
    panel = panel.span(width).height(height)
    for number, query in enumerate(queries):
        target = (
            prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(chr(ord("A") + number))
        )
        panel = panel.with_target(target.datasource(SOURCE).range())
    return panel


def _thresholds(steps: Sequence[tuple[float | None, str]]) -> dashboard.ThresholdsConfig:
    thresholds = [models.Threshold(value=value, color=colour) for value, colour in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(thresholds)
