"""Writes what follows from the code: the dashboards and the README's table of metrics.

    python grafana/generate.py [--check]

With --check nothing is written; the exit status is 1 where a file is not up to date.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import controller
import metrics_table
import overview
import retrieval
import speculation
from panels import document

ROOT = Path(__file__).parents[1]
DASHBOARDS = tuple(each.DASHBOARD for each in (overview, controller, retrieval, speculation))


def wanted(root: Path = ROOT) -> dict[Path, str]:
    """Return every generated file with its text."""
    readme = root / "README.md"
    files = {readme: metrics_table.replaced(readme.read_text())}
    for each in DASHBOARDS:
        path = root / "grafana" / "dashboards" / f"{each.uid.removeprefix('vllm-')}.json"
        files[path] = json.dumps(document(each), indent=2) + "\n"
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args(arguments)
    stale = {
        path: text
        for path, text in wanted().items()
        if not path.exists() or path.read_text() != text
    }
    for path, text in stale.items():
        if options.check:
            print(f"{path.relative_to(ROOT)} is not up to date: run python grafana/generate.py")
        else:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
