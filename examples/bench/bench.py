"""`vllm bench serve`, and what DHISPARSE did meanwhile.

    python examples/bench/bench.py [options of vllm bench serve]

Reads the server's /metrics before and after, prints the difference, and adds it to the
result file where the options ask for one (--save-result with --result-dir and
--result-filename), so that `vllm bench sweep` puts it in its tables. Other traffic on the
server in that time counts too.
"""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "vllm:dhisparse_"
GENERATING = ("decode", "verify")
Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


def option(arguments: Sequence[str], *names: str) -> str | None:
    """Return the last value given for one of the names, as ``--name value`` or ``--name=value``."""
    value = None
    for number, argument in enumerate(arguments):
        name, equals, given = argument.partition("=")
        if name in names:
            value = given if equals else next(iter(arguments[number + 1 : number + 2]), None)
    return value


def metrics_url(arguments: Sequence[str]) -> str:
    """Return where the benchmarked server has its metrics."""
    base = option(arguments, "--base-url")
    if base is None:
        host = option(arguments, "--host") or "127.0.0.1"
        base = f"http://{host}:{option(arguments, '--port') or 8000}"
    return f"{base.rstrip('/')}/metrics"


def parse(text: str) -> Samples:
    """Return the package's samples of a /metrics text, and what vLLM preempted."""
    wanted = (PREFIX, "vllm:num_preemptions_total", "vllm:generation_tokens_total")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(wanted)
    }


def report(before: Samples, after: Samples) -> dict[str, float | str]:
    """Return the differences of counters as figures; empty without DHISPARSE.

    ``dhisparse_fetch_ratio``: fetched / selected rows over decode and verify;
    ``dhisparse_sharing_gain``: selections not on the device / rows fetched for them;
    ``dhisparse_host_to_device_bytes_per_token``: for each output token, restores included;
    ``dhisparse_found_TIER``: share of the selections found there;
    ``dhisparse_optional_bytes``: device memory of optional rows at the end.
    """
    residency = {dict(labels)["residency"] for name, labels in after if name.endswith("mode_info")}
    if not residency:
        return {}

    def grown(name: str, **wanted: Sequence[str]) -> float:
        return sum(
            value - before.get((name, labels), 0)
            for (name_, labels), value in after.items()
            if name_ == name and all(dict(labels).get(k) in v for k, v in wanted.items())
        )

    def rows(name: str, **wanted: Sequence[str]) -> float:
        return grown(f"{PREFIX}{name}_rows_total", phase=GENERATING, **wanted)

    selected, fetched = rows("selected"), rows("fetched")
    moved = grown(f"{PREFIX}transfer_bytes_total", direction=("host_to_device",))
    tokens = grown("vllm:generation_tokens_total")
    found: dict[str, float | str] = {
        "dhisparse_residency": ", ".join(sorted(residency)),
        "dhisparse_selected_rows": selected,
        "dhisparse_fetched_rows": fetched,
        "dhisparse_fetch_ratio": fetched / selected if selected else 0.0,
        "dhisparse_sharing_gain": rows("selected", tier=("host",)) / fetched if fetched else 1.0,
        "dhisparse_host_to_device_bytes_per_token": moved / tokens if tokens else 0.0,
        "dhisparse_preemptions": grown("vllm:num_preemptions_total"),
        "dhisparse_host_pool_waits": grown(f"{PREFIX}host_pool_waits_total"),
        "dhisparse_optional_bytes": sum(
            value
            for (name, labels), value in after.items()
            if name == f"{PREFIX}residency_bytes" and dict(labels)["residency_class"] == "optional"
        ),
    }
    for tier in ("tail", "required", "optional", "host"):
        share = rows("selected", tier=(tier,)) / selected if selected else 0.0
        found[f"dhisparse_found_{tier}"] = share
    return found


def table(figures: Mapping[str, float | str]) -> str:
    """Return the figures, one a line."""
    lines = [" DHISPARSE ".center(50, "=")]
    for name, value in figures.items():
        shown = value if isinstance(value, str) else f"{value:,.4g}"
        if not isinstance(value, str) and value == int(value):
            shown = f"{value:,.0f}"
        lines.append(f"{name.removeprefix('dhisparse_').replace('_', ' '):36}{shown:>14}")
    return "\n".join(lines)


def read(url: str) -> Samples:
    """Read a server's metrics.

    Raises:
        SystemExit: nobody answers there.

    """
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return parse(reply.read().decode())
    except OSError as error:
        raise SystemExit(f"error: no metrics at {url}: {error}") from error


def main(arguments: Sequence[str]) -> int:
    """Benchmark, then report; returns the benchmark's exit status."""
    url = metrics_url(arguments)
    before = read(url)
    status = subprocess.run(["vllm", "bench", "serve", *arguments]).returncode
    if status:
        return status
    figures = report(before, read(url))
    print(table(figures) if figures else f"no DHISPARSE metrics at {url}")
    folder, name = option(arguments, "--result-dir"), option(arguments, "--result-filename")
    if name is not None:
        path = Path(folder or ".") / name
        path.write_text(json.dumps(json.loads(path.read_text()) | figures) + "\n")
    return 0


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
    else:
        sys.exit(main(sys.argv[1:]))
