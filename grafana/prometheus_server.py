"""A real Prometheus for a while: start it on a server's metrics, and ask it."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

DOWNLOADED = Path(__file__).parents[1] / ".cache" / "prometheus" / "usr" / "bin"
"""Where get_prometheus.sh puts it."""
READY_SECONDS = 60


class Series(NamedTuple):
    """One line of a graph: labels, times in seconds since the epoch, and values."""

    labels: dict[str, str]
    times: list[float]
    values: list[float]


def find(name: str) -> Path | None:
    """Return the path of ``prometheus`` or ``promtool``, None where it is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), str(DOWNLOADED)])
    found = shutil.which(name, path=path)
    return None if found is None else Path(found)


@contextmanager
def scraping(
    prometheus: Path, targets: list[str], folder: Path, interval_seconds: int = 1
) -> Iterator[str]:
    """Scrape ``host:port`` targets while the context lasts; yields the address to ask.

    Args:
        prometheus: the program.
        targets: servers with /metrics.
        folder: for its configuration, data and log.
        interval_seconds: between two scrapes.

    """
    listed = json.dumps(targets)
    (folder / "prometheus.yaml").write_text(
        f"global: {{scrape_interval: {interval_seconds}s, scrape_timeout: {interval_seconds}s}}\n"
        f"scrape_configs: [{{job_name: vllm, static_configs: [{{targets: {listed}}}]}}]\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [str(prometheus), f"--config.file={folder / 'prometheus.yaml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait(f"http://{address}", process, folder / "prometheus.log")
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def query_range(
    address: str, expr: str, start: float, end: float, step_seconds: float
) -> list[Series]:
    """Return the series of a range query; places without a number are left out.

    Raises:
        ValueError: Prometheus refuses the query; the message is its own.

    """
    asked = {"query": expr, "start": start, "end": end, "step": step_seconds}
    url = f"{address}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            found = json.load(reply)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise ValueError(json.load(error)["error"]) from error
    series = []
    for each in found:
        points = [(time_, float(value)) for time_, value in each["values"]]
        points = [(time_, value) for time_, value in points if value == value]
        if points:
            series.append(Series(each["metric"], *map(list, zip(*points, strict=True))))
    return series


def _wait(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/-/ready", timeout=2)
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("Prometheus does not answer:\n" + log.read_text(errors="replace")[-2000:])
