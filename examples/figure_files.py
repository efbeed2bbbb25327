"""What the programs that compare residencies have in common: the model, options, results."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def write_model(target: Path, layers: int, leaders: int) -> None:
    """Write a tiny model with random weights of that shape."""
    generator = Path(__file__).with_name("make_tiny_dsa.py")
    shape = ["--layers", str(layers), "--leaders", str(leaders)]
    subprocess.run([sys.executable, str(generator), str(target), *shape], check=True)


def add_options(parser: argparse.ArgumentParser, model: str) -> None:
    """Add the options for files; ``model`` is the default folder of the model."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    parser.add_argument("--figure", type=Path, metavar="FILE.png", help="needs matplotlib")
    parser.add_argument("--model", type=Path, default=Path(model))


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; files that cannot be written end the program before it starts."""
    options = parser.parse_args(arguments)
    for target in (options.json, options.figure):
        if target and not target.absolute().parent.is_dir():
            parser.error(f"no folder for {target}")
    if options.figure and not has_matplotlib():
        parser.error("--figure needs matplotlib, which is not installed: pip install matplotlib")
    return options


def has_matplotlib() -> bool:
    """Return whether a figure can be drawn."""
    return find_spec("matplotlib") is not None


def finish(
    options: argparse.Namespace,
    results: Mapping[str, Any],
    figures: Mapping[str, Any],
    draw: Callable[[Mapping[str, Any], Path], None],
) -> None:
    """Write what was asked for.

    Args:
        options: of the program.
        results: by residency, each with an ``outputs_sha256`` of its tokens.
        figures: for the file of figures.
        draw: writes the figure.

    Raises:
        SystemExit: the tokens differ between residencies.

    """
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if options.figure:
        draw(results, options.figure)
    if len({result.outputs_sha256 for result in results.values()}) > 1:
        raise SystemExit("error: the output tokens differ between residencies")


def run(main: Callable[[], None]) -> None:
    """Run a program; interrupted, it ends as the shell expects."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
