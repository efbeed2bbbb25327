"""Serves a load step under a real Prometheus, and draws all dashboards from it.

    python grafana/record.py [--out FOLDER]

Needs the environment of examples/quickstart.sh and Prometheus (get_prometheus.sh). The
load is that of examples/load_step.py in residency `adaptive`, with `ngram` drafts, so
that every panel has data (measured on CPU, one run; not a claim about GPUs).
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from prometheus_server import find, scraping
from render import Window, render

EXAMPLES = Path(__file__).parents[1] / "examples"
MODEL = Path(".cache/load_step/model")
SETTLE_TOKENS = 1200  # long enough to see the fetch ratio come back
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def record(prometheus: Path, out: Path, folder: Path) -> int:
    """Run the load and draw; returns the exit status of ``render``."""
    sys.path.append(str(EXAMPLES))
    from load_step import drive, serving

    options = ("--speculative-config", json.dumps(DRAFTS))
    with (
        serving(MODEL, "adaptive", folder / "server.log", *options) as port,
        scraping(prometheus, [f"127.0.0.1:{port}"], folder) as address,
    ):
        time.sleep(5)  # zeros before the first request
        start = time.time() - 4
        asyncio.run(drive(port, settle_tokens=SETTLE_TOKENS))
        time.sleep(3)
        return render(address, Window(start, time.time()), out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    pictures = Path(__file__).parent / "pictures"
    parser.add_argument("--out", type=Path, default=pictures, metavar="FOLDER")
    options = parser.parse_args(arguments)
    prometheus = find("prometheus")
    if prometheus is None:
        parser.error("Prometheus is not installed; bash grafana/get_prometheus.sh")
    shape = ["--layers", "8", "--leaders", "2"]
    command = [sys.executable, str(EXAMPLES / "make_tiny_dsa.py"), str(MODEL), *shape]
    subprocess.run(command, check=True)
    with tempfile.TemporaryDirectory() as folder:
        return record(prometheus, options.out, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
