"""A load step against the real server, for each residency: low, high and low again.

    python examples/load_step.py --json FILE [--figure FILE.png]

Two long requests run all the time. In the phase `high` others join them, so that the
device pool holds about a third of what all of them have; when those have ended, the
two go on. All residencies get the same prompts and the same device memory. Needs the
environment of quickstart.sh (measured on CPU, one run; not a claim about GPUs).
"""

import argparse
import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from quickstart import MODEL, choose_port, decoded, read_metrics, total, wait_until_ready

RESIDENCIES = ("resident", "fixed", "adaptive")
PHASES = ("low", "high", "low_again")
LONG_REQUESTS = 2
MAX_MODEL_LEN = 8192


@dataclass(frozen=True)
class Load:
    """Sizes of the run, in tokens but for the pool."""

    prompt_tokens: int = 4200
    low_tokens: int = 150
    extra_requests: int = 16
    extra_tokens: int = 96
    low_again_tokens: int = 500
    pool_mib: int = 144


@dataclass
class Phase:
    """What happened between two looks at /metrics."""

    fetch_ratio: float
    concurrency: int
    output_tokens_per_s: float
    preemptions: int
    optional_bytes: int


@dataclass
class Run:
    """One residency's server under the load."""

    client: AsyncOpenAI
    port: int
    load: Load
    tokens: dict[int, list[int]] = field(default_factory=dict)
    most_running: int = 0

    async def request(self, number: int, max_tokens: int) -> None:
        """Stream one request and keep its tokens."""
        self.tokens[number] = []
        self.most_running = max(self.most_running, self._running())
        stream = await self.client.completions.create(
            model=MODEL,
            prompt=prompt(number, self.load.prompt_tokens),
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        async for part in stream:
            choice: Any = part.choices[0]
            self.tokens[number] += choice.token_ids or []

    def _running(self) -> int:
        return int(total(read_metrics(self.port), "vllm:num_requests_running"))

    async def until(self, num_tokens: int) -> None:
        """Wait until each long request has that many tokens."""
        while min(len(self.tokens[n]) for n in range(LONG_REQUESTS)) < num_tokens:
            await asyncio.sleep(0.05)

    async def watch(self) -> None:
        """Remember the most requests that ran at a time."""
        while True:
            running = await asyncio.to_thread(self._running)
            self.most_running = max(self.most_running, running)
            await asyncio.sleep(0.3)


def prompt(number: int, num_tokens: int) -> list[int]:
    """Token ids that differ between requests; special tokens are below 16."""
    return [16 + (7 * i * i + 31 * number * i + 13 * number) % 480 for i in range(num_tokens)]


class Meter:
    """Differences of the server's counters between two phases."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.samples = read_metrics(port)
        self.begin = time.monotonic()

    def phase(self, run: Run) -> Phase:
        """Return what happened since the last call."""
        before, self.samples = self.samples, read_metrics(self.port)
        begin, self.begin = self.begin, time.monotonic()

        def difference(name: str) -> float:
            return total(self.samples, name) - total(before, name)

        def rows(name: str) -> int:
            return decoded(self.samples, name) - decoded(before, name)

        selected = rows("vllm:dhisparse_selected_rows_total")
        fetched = rows("vllm:dhisparse_fetched_rows_total")
        running, run.most_running = run.most_running, 0
        optional = total(self.samples, "vllm:dhisparse_residency_bytes", residency_class="optional")
        return Phase(
            fetch_ratio=round(fetched / selected, 4) if selected else 0.0,
            concurrency=running,
            output_tokens_per_s=round(
                difference("vllm:generation_tokens_total") / (self.begin - begin), 1
            ),
            preemptions=int(difference("vllm:num_preemptions_total")),
            optional_bytes=int(optional),
        )


async def drive(port: int, load: Load) -> dict[str, Any]:
    """Run the three phases against one server."""
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    run, meter = Run(client, port, load), Meter(port)
    # The long requests outlast the others whatever these take.
    extra_steps = 4 * load.extra_tokens
    long_tokens = load.low_tokens + extra_steps + load.low_again_tokens
    long = [asyncio.create_task(run.request(n, long_tokens)) for n in range(LONG_REQUESTS)]
    watcher = asyncio.create_task(run.watch())
    phases = {}
    await run.until(load.low_tokens)
    phases["low"] = meter.phase(run)
    numbers = range(LONG_REQUESTS, LONG_REQUESTS + load.extra_requests)
    await asyncio.gather(*(run.request(n, load.extra_tokens) for n in numbers))
    phases["high"] = meter.phase(run)
    await asyncio.gather(*long)
    phases["low_again"] = meter.phase(run)
    watcher.cancel()
    text = json.dumps([run.tokens[number] for number in sorted(run.tokens)])
    return {
        **{name: vars(phase) for name, phase in phases.items()},
        "outputs_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def measure(residency: str, model: Path, load: Load, log: Path) -> dict[str, Any]:
    """Start a server with a residency, drive it, stop it."""
    port = choose_port()
    command = ["vllm", "serve", str(model), "--served-model-name", MODEL, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--attention-backend", "DHISPARSE", "--dtype", "float32"]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "32"]
    command += ["--kv-cache-memory-bytes", f"{load.pool_mib}M"]
    command += ["--additional-config", json.dumps({"dhisparse": {"residency": residency}})]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "PROMETHEUS_DISABLE_CREATED_SERIES": "true"},
        )
    try:
        wait_until_ready(port, process.pid)
        return asyncio.run(drive(port, load))
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def table(results: dict[str, Any]) -> str:
    """Return all phases of all residencies as text."""
    columns = list(Phase.__dataclass_fields__)
    lines = [" | ".join(["residency".ljust(9), "phase".ljust(9), *columns])]
    for residency, result in results.items():
        for phase in PHASES:
            values = [str(result[phase][c]).rjust(len(c)) for c in columns]
            lines.append(" | ".join([residency.ljust(9), phase.ljust(9), *values]))
    return "\n".join(lines)


def bars(results: dict[str, Any], width: int = 50) -> str:
    """Return the fetch ratios as a figure of text."""
    most = max((r[p]["fetch_ratio"] for r in results.values() for p in PHASES), default=0) or 1
    lines = ["fetch ratio"]
    for phase in PHASES:
        for residency, result in results.items():
            ratio = result[phase]["fetch_ratio"]
            bar = "#" * round(width * ratio / most)
            lines.append(f"  {phase.ljust(9)} {residency.ljust(8)} {ratio:7.4f} {bar}")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--residency", choices=RESIDENCIES, action="append", help="default: all")
    parser.add_argument("--model", type=Path, default=Path(".cache/load_step/model"))
    options = parser.parse_args()
    options.model.mkdir(parents=True, exist_ok=True)
    generator = Path(__file__).with_name("make_tiny_dsa.py")
    subprocess.run([sys.executable, str(generator), str(options.model)], check=True)
    results = {}
    for residency in options.residency or RESIDENCIES:
        print(f"residency {residency} ...", flush=True)
        log = options.model.parent / f"{residency}.log"
        results[residency] = measure(residency, options.model, Load(), log)
    print(table(results), bars(results), sep="\n\n")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
