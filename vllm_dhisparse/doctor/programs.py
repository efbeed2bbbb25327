"""Runs a module of this package in a process of its own, as vLLM does with its engine."""

import json
import subprocess
import sys
from typing import Any

TIMEOUT_SECONDS = 300


class ProgramError(Exception):
    """A program failed; the message is the last line that it wrote."""


def run_program(module: str, *arguments: str) -> str:
    """Return the last line of a module's output.

    Raises:
        ProgramError: it ended with a failure, or took more than five minutes.

    """
    # -P: the working folder must not be importable, as it is not for the vllm command.
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ProgramError(f"no answer within {TIMEOUT_SECONDS} s") from None
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not lines:
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        raise ProgramError(errors[-1].strip() if errors else f"exit status {done.returncode}")
    return lines[-1]


def run_json_program(module: str, *arguments: str) -> dict[str, Any]:
    """Return the JSON object that a module prints last."""
    line = run_program(module, *arguments)
    try:
        answer = json.loads(line)
    except ValueError:
        raise ProgramError(f"unexpected output: {line}") from None
    if not isinstance(answer, dict):
        raise ProgramError(f"unexpected output: {line}")
    return answer
