"""Draws a dashboard's query results; needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from panels import Dashboard
from prometheus_server import Series
from render import Result, Window

_SCALES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_SI = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def draw(dashboard: Dashboard, results: Sequence[Result], window: Window, path: Path) -> None:
    """Write one image: tiles at the top, then the rows with two graphs in a line."""
    count = len(dashboard.tiles)
    tiles, graphs = results[:count], list(results[count:])
    heights = [1.0] + [3.0 * ((len(row.panels) + 1) // 2) + 0.3 for row in dashboard.rows]
    figure = Figure(figsize=(13, sum(heights) + 0.4), layout="constrained")
    figure.suptitle(dashboard.title, x=0.01, ha="left", fontweight="bold")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights)
    _draw_tiles(parts[0], tiles)
    for part, row in zip(parts[1:], dashboard.rows, strict=True):
        part.suptitle(row.title, x=0.01, ha="left", fontsize=10, color="dimgrey")
        lines = (len(row.panels) + 1) // 2
        axes = part.subplots(lines, 2, squeeze=False).flat
        for place, _ in zip(axes, row.panels, strict=False):
            _draw_graph(place, graphs.pop(0), window)
        for place in axes:
            place.set_axis_off()
    figure.savefig(path, dpi=70)


def text_of(value: float, unit: str) -> str:
    """Return a value as Grafana shows it in this unit."""
    if unit == "percentunit":
        return f"{value:.3%}" if 0 < abs(value) < 0.001 else f"{100 * value:.3g} %"
    if unit in ("bytes", "Bps"):
        after = "/s" if unit == "Bps" else ""
        for size, name in _SCALES:
            if abs(value) >= size:
                return f"{value / size:.4g} {name}{after}"
        return f"{value:.4g} B{after}"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 or value == 0 else f"{1000 * value:.3g} ms"
    suffix = f" {unit.removeprefix('suffix:').strip()}" if unit.startswith("suffix:") else ""
    for size, name in _SI:
        if abs(value) >= size:
            return f"{value / size:.4g} {name}{suffix}"
    return f"{value:.3g}{suffix}"


def _draw_tiles(part: SubFigure, tiles: Sequence[Result]) -> None:
    for place, result in zip(part.subplots(1, len(tiles)), tiles, strict=True):
        place.set_xticks([])
        place.set_yticks([])
        place.set_title(result.panel.title, fontsize=9, loc="left")
        shown = "No traffic"
        if result.series:
            latest = max(each.times[-1] for _, each in result.series)
            now = [(name, each) for name, each in result.series if each.times[-1] == latest]
            name, series = max(now, key=lambda item: item[1].values[-1])
            shown = (
                name if result.panel.shows_name else text_of(series.values[-1], result.panel.unit)
            )
        place.text(0.5, 0.45, shown, ha="center", va="center", fontsize=15)


def _draw_graph(place: Axes, result: Result, window: Window) -> None:
    panel = result.panel
    place.set_title(panel.title, fontsize=10, loc="left")
    if panel.is_stacked:
        _stack(place, result, window)
    else:
        for name, series in result.series:
            place.plot(*_with_gaps(series, window), label=name, linewidth=1.2)
    for value, color in panel.thresholds:
        place.axhline(value, color=color, linewidth=0.8, linestyle="--")
    top = panel.maximum or place.get_ylim()[1]
    is_flat = not any(any(series.values) for _, series in result.series)
    top = 1.0 if is_flat else top
    place.set_ylim(-0.02 * top, 1.02 * top)  # lines at 0 stay visible
    place.set_xlim(0, window.end - window.start)
    place.grid(alpha=0.3)
    place.tick_params(labelsize=8)
    place.yaxis.set_major_locator(_UnitLocator(panel.unit))
    place.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text_of(value, panel.unit)))
    place.set_xlabel("seconds", fontsize=8)
    if result.series:
        place.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


class _UnitLocator(MaxNLocator):
    """Round numbers of the unit shown: bytes in powers of 1024."""

    def __init__(self, unit: str) -> None:
        super().__init__(nbins=6, steps=[1, 2, 2.5, 5, 10])
        self._is_binary = unit in ("bytes", "Bps")

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        sizes = [size for size, _ in _SCALES if vmax >= size] if self._is_binary else []
        scale = sizes[0] if sizes else 1
        return super().tick_values(vmin / scale, vmax / scale) * scale


def _with_gaps(series: Series, window: Window) -> tuple[list[float], list[float]]:
    """Return seconds and values; a time without a value ends a line."""
    seconds: list[float] = []
    values: list[float] = []
    for time, value in zip(series.times, series.values, strict=True):
        second = time - window.start
        if seconds and second - seconds[-1] > 1.5 * window.step_seconds:
            seconds.append(second)
            values.append(float("nan"))
        seconds.append(second)
        values.append(value)
    return seconds, values


def _stack(place: Axes, result: Result, window: Window) -> None:
    count = round((window.end - window.start) / window.step_seconds) + 1
    values = [[0.0] * count for _ in result.series]
    for heights, (_, series) in zip(values, result.series, strict=True):
        for time, value in zip(series.times, series.values, strict=True):
            heights[round((time - window.start) / window.step_seconds)] = value
    if values:
        seconds = [number * window.step_seconds for number in range(count)]
        names = [name for name, _ in result.series]
        place.stackplot(seconds, values, labels=names, alpha=0.7, step="post")
