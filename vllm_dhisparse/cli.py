"""The command ``vllm-dhisparse``, also ``python -m vllm_dhisparse``.

A command is a module with ``add_parser(subparsers)``, which adds one parser with the
default ``run``: a function of the options that returns the exit status. Importing it takes
no torch, numba or vLLM, since ``doctor`` must run where they are broken.
"""

import argparse
from collections.abc import Sequence

from vllm_dhisparse import __version__
from vllm_dhisparse.doctor import command as doctor
from vllm_dhisparse.simulator import plan_command, simulate_command

COMMANDS = (doctor, simulate_command, plan_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; bad options exit with 2."""
    parser = argparse.ArgumentParser(
        prog="vllm-dhisparse", description="Adaptive DHiSparse for vLLM."
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    options = parser.parse_args(arguments)
    return int(options.run(options))
