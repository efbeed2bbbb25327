"""A load step against the real server, for each residency: low, high and low again.

    python examples/load_step.py --json FILE [--figure FILE.png]

Two long requests run all the time. In the phase `high` others join them, so that the
device holds about a third of what all of them have; when those have ended, the two go
on, and `low_again` is measured from 300 steps later. All residencies get the same prompts
and the same device memory. Needs the environment of quickstart.sh (measured on CPU, one
run; not a claim about GPUs).
"""

import argparse
import asyncio
import hashlib
import json
import os
import signal
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import figure_files
from figure_files import write_model
from load_step_report import Phase, Result, bars, draw, table, verdict
from openai import AsyncOpenAI, OpenAIError
from quickstart import MODEL, READY_SECONDS, choose_port, decoded, read_metrics, total

RESIDENCIES = ("resident", "fixed", "adaptive")
LONG_REQUESTS = 2
EXTRA_REQUESTS = 16
PROMPT_TOKENS = 4200
LOW_TOKENS = 100
EXTRA_TOKENS = 96
SETTLE_TOKENS = 300
LOW_AGAIN_TOKENS = 100
COMPARED_TOKENS = LOW_TOKENS + SETTLE_TOKENS + LOW_AGAIN_TOKENS
MAX_MODEL_LEN = 8192
POOL_MIB = 176
SERVER_OPTIONS = f"""
    --host 127.0.0.1 --served-model-name {MODEL} --attention-backend DHISPARSE --dtype float32
    --max-model-len {MAX_MODEL_LEN} --max-num-seqs 32 --max-num-batched-tokens 1024
    --kv-cache-memory-bytes {POOL_MIB}M
""".split()


def prompt(number: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    """Token ids that differ between requests; special tokens are below 16."""
    return [16 + (7 * i * i + 31 * number * i + 13 * number) % 480 for i in range(num_tokens)]


@dataclass
class Meter:
    """Differences of the server's counters between two phases, and levels seen meanwhile."""

    port: int
    levels: list[tuple[int, int]] = field(default_factory=list)
    """Running requests and optional bytes."""

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Forget what happened so far."""
        self.before = read_metrics(self.port)
        self.begin = time.monotonic()
        self.levels.clear()

    async def watch(self) -> None:
        """Look at the levels until cancelled."""
        while True:
            samples = await asyncio.to_thread(read_metrics, self.port)
            running = int(total(samples, "vllm:num_requests_running"))
            name = "vllm:dhisparse_residency_bytes"
            self.levels.append((running, int(total(samples, name, residency_class="optional"))))
            await asyncio.sleep(1)

    def take_phase(self) -> Phase:
        """Return what happened since the start, and start again."""
        before, seconds = self.before, time.monotonic() - self.begin
        running, optional = zip(*self.levels or [(0, 0)], strict=True)
        self.start()

        def rows(name: str) -> int:
            return decoded(self.before, name) - decoded(before, name)

        def difference(name: str) -> float:
            return total(self.before, name) - total(before, name)

        selected = rows("vllm:dhisparse_selected_rows_total")
        fetched = rows("vllm:dhisparse_fetched_rows_total")
        return Phase(
            fetch_ratio=round(fetched / selected, 5) if selected else 0.0,
            concurrency=max(running),
            output_tokens_per_s=round(difference("vllm:generation_tokens_total") / seconds, 1),
            preemptions=int(difference("vllm:num_preemptions_total")),
            optional_bytes=int(statistics.median(optional)),
        )


@dataclass
class Client:
    """Requests to one server, and the tokens that came back."""

    api: AsyncOpenAI
    tokens: dict[int, list[int]] = field(default_factory=dict)

    async def request(self, number: int, max_tokens: int) -> None:
        """Stream one request and keep its tokens."""
        tokens = self.tokens.setdefault(number, [])
        stream = await self.api.completions.create(
            model=MODEL,
            prompt=prompt(number),
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        async for part in stream:
            choice: Any = part.choices[0]
            tokens += choice.token_ids or []

    def long_tokens(self) -> int:
        """Return how many tokens each long request has at least: one a step."""
        return min(len(self.tokens.get(n, ())) for n in range(LONG_REQUESTS))

    async def until(self, num_tokens: int) -> None:
        """Wait until each long request has that many tokens.

        Raises:
            ValueError: the model's length ends them before.

        """
        if num_tokens > MAX_MODEL_LEN - PROMPT_TOKENS:
            raise ValueError("the phase high took more steps than the long requests have")
        while self.long_tokens() < num_tokens:
            await asyncio.sleep(0.02)

    def sha256(self) -> str:
        """Return the hash of what every residency must give."""
        compared = [self.tokens[number][:COMPARED_TOKENS] for number in sorted(self.tokens)]
        return hashlib.sha256(json.dumps(compared).encode()).hexdigest()


async def drive(port: int, settle_tokens: int = SETTLE_TOKENS) -> Result:
    """Run the three phases against one server; the long requests are aborted at the end."""
    url = f"http://127.0.0.1:{port}/v1"
    # No time is too long on a busy machine; a server that dies ends its connections.
    api = AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=None)
    async with api, asyncio.TaskGroup() as tasks:
        client, meter = Client(api), Meter(port)
        most = MAX_MODEL_LEN - PROMPT_TOKENS
        endless = [tasks.create_task(client.request(n, most)) for n in range(LONG_REQUESTS)]
        endless.append(tasks.create_task(meter.watch()))
        await client.until(1)
        meter.start()
        await client.until(LOW_TOKENS)
        low = meter.take_phase()
        numbers = range(LONG_REQUESTS, LONG_REQUESTS + EXTRA_REQUESTS)
        await asyncio.gather(*(client.request(n, EXTRA_TOKENS) for n in numbers))
        high = meter.take_phase()
        settled = client.long_tokens() + settle_tokens
        await client.until(settled)
        meter.start()
        await client.until(settled + LOW_AGAIN_TOKENS)
        low_again = meter.take_phase()
        for task in endless:
            task.cancel()
    return Result((low, high, low_again), client.sha256())


def server_environment() -> dict[str, str]:
    """Return the environment of a server that has the KV memory which it is started with."""
    environment = dict(os.environ)
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # vLLM prefers it to its own option
    return environment | {"HF_HUB_OFFLINE": "1", "PROMETHEUS_DISABLE_CREATED_SERIES": "true"}


@contextmanager
def serving(model: Path, residency: str, log: Path, *more_options: str) -> Iterator[int]:
    """Run a server and yield its port; whatever happens, no process of it stays.

    A failure inside ends the program with the end of the server's log.
    """
    port = choose_port()
    config = json.dumps({"dhisparse": {"residency": residency}})
    options = [*SERVER_OPTIONS, "--port", str(port), "--additional-config", config, *more_options]
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["vllm", "serve", str(model), *options],
            stdout=out,
            stderr=out,
            env=server_environment(),
            start_new_session=True,
        )
    try:
        wait_until_ready(port, process)
        yield port
    except (ExceptionGroup, OpenAIError, OSError, RuntimeError, ValueError) as error:
        raise failure(residency, error, log) from error
    finally:
        stop(process)


def wait_until_ready(port: int, process: "subprocess.Popen[bytes]") -> None:
    """Return when the server answers.

    Raises:
        RuntimeError: it stopped, or takes too long.

    """
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server stopped with status {process.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"no answer within {READY_SECONDS} s")


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt a server and its children, and kill what is left after 30 s."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGINT)
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def measure(residency: str, model: Path, log: Path) -> Result:
    """Start a server, drive it and stop it."""
    with serving(model, residency, log) as port:
        return asyncio.run(drive(port))


def failure(residency: str, error: Exception, log: Path) -> SystemExit:
    """Return the end of the program, with the end of a server's log."""
    reasons = error.exceptions if isinstance(error, ExceptionGroup) else [error]
    why = "; ".join(str(reason) for reason in reasons)
    end = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    return SystemExit(f"error: residency {residency}: {why}\nend of {log}:\n{end}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; wrong ones end the program before anything starts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    figure_files.add_options(parser, ".cache/load_step/model")
    parser.add_argument("--residency", choices=RESIDENCIES, action="append", help="default: all")
    return figure_files.parse(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    options = parse(arguments)
    write_model(options.model, layers=8, leaders=2)
    results = {}
    for residency in options.residency or RESIDENCIES:
        print(f"residency {residency} ...", flush=True)
        log = options.model.parent / f"{residency}.log"
        results[residency] = measure(residency, options.model, log)
    print(f"\n{table(results)}\n\n{bars(results)}\n\n{verdict(results)}")
    figures = {residency: result.to_json() for residency, result in results.items()}
    figure_files.finish(options, results, figures, draw)


if __name__ == "__main__":
    figure_files.run(main)
