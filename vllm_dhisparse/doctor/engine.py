"""vLLM itself: whether it loads the plugin, also in the processes that it spawns."""

from typing import Any

from vllm_dhisparse.doctor.finding import Finding, error, ok
from vllm_dhisparse.doctor.programs import ProgramError, run_json_program

CHECK = "vLLM loads the plugin"


def check_engine() -> Finding:
    """Start vLLM's plugin loading in a process of its own, which spawns another."""
    try:
        return judge(run_json_program("vllm_dhisparse.integration.probe"))
    except ProgramError as failure:
        return error(
            CHECK,
            f"it ended with: {failure}",
            "python -c 'import vllm' must work first; then see the warnings of `vllm serve --help`",
        )


def judge(seen: dict[str, Any]) -> Finding:
    """Judge what the probe printed."""
    vllm = f"vLLM {seen['vllm']} on {seen['platform']}"
    for place in ("here", "spawned"):
        found = seen[place]
        where = "the API server's process" if place == "here" else "a spawned process"
        if found is None or found["backend"] is None:
            return error(
                CHECK,
                f"{vllm}: DHISPARSE is unknown in {where}",
                "see the warnings of `vllm serve --help`, and install vllm-dhisparse again",
            )
        if found["refusal"]:
            return error(CHECK, f"{vllm}: {found['refusal']}", "see the reason given")
        if not found["connector"]:
            return error(
                CHECK,
                f"{vllm}: the KV connector is unknown in {where}",
                "install vllm-dhisparse again",
            )
    return ok(CHECK, f"{vllm}, {seen['here']['backend']}, also in a spawned process")
