"""Runs every query of every dashboard on a Prometheus, and draws what comes back.

    python grafana/render.py --prometheus URL --minutes N --out FOLDER

A panel is drawn as Grafana would, but by matplotlib: this needs no Grafana and proves
nothing about its display. Exit status 1: a query failed, or a panel has no data.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from generate import DASHBOARDS
from panels import Dashboard, Panel
from prometheus_server import Series, query_range
from queries import VARIABLES


class Window(NamedTuple):
    """What to ask for: times in seconds since the epoch, and how finely."""

    start: float
    end: float
    step_seconds: float = 1.0
    rate_seconds: int = 10

    def filled(self, expr: str) -> str:
        """Return a query with Grafana's variables replaced; everything is chosen."""
        for name in VARIABLES:
            expr = expr.replace(f'"${name}"', '".*"')
        return expr.replace("$__rate_interval", f"{self.rate_seconds}s")


class Result(NamedTuple):
    """One panel's series with their names, and what went wrong."""

    panel: Panel
    series: tuple[tuple[str, Series], ...]
    problems: tuple[str, ...]


def panels_of(dashboard: Dashboard) -> Iterator[Panel]:
    """Yield tiles and graphs in their order."""
    yield from dashboard.tiles
    for row in dashboard.rows:
        yield from row.panels


def ask(address: str, dashboard: Dashboard, window: Window) -> list[Result]:
    """Run all queries of a dashboard."""
    return [ask_panel(address, panel, window) for panel in panels_of(dashboard)]


def ask_panel(address: str, panel: Panel, window: Window) -> Result:
    """Run the queries of one panel."""
    named, problems = [], []
    for target in panel.targets:
        expr = window.filled(target.expr)
        try:
            found = query_range(address, expr, window.start, window.end, window.step_seconds)
        except ValueError as error:
            problems.append(f"{panel.title}: {error}: {expr}")
            continue
        if not found:
            problems.append(f"{panel.title}: no data for {target.legend}: {expr}")
        named += [(_name(target.legend, each.labels), each) for each in found]
    return Result(panel, tuple(named), tuple(problems))


def _name(legend: str, labels: Mapping[str, str]) -> str:
    for label, value in labels.items():
        legend = legend.replace("{{" + label + "}}", value)
    return legend


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prometheus", default="http://localhost:9090", metavar="URL")
    parser.add_argument("--minutes", type=float, default=15, help="until now")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args(arguments)
    end = time.time()
    length = options.minutes * 60
    window = Window(end - length, end, max(length / 300, 1), max(int(length / 60), 20))
    return render(options.prometheus, window, options.out)


def render(address: str, window: Window, out: Path) -> int:
    """Ask and draw all dashboards; print problems and return the exit status."""
    from pictures import draw  # needs matplotlib

    out.mkdir(parents=True, exist_ok=True)
    status = 0
    for dashboard in DASHBOARDS:
        results = ask(address, dashboard, window)
        for problem in (problem for result in results for problem in result.problems):
            print(problem, file=sys.stderr)
            status = 1
        path = out / f"{dashboard.uid.removeprefix('vllm-')}.png"
        draw(dashboard, results, window, path)
        print(path)
    return status


if __name__ == "__main__":
    sys.exit(main())
