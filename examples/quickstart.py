"""The client side of quickstart.sh: find a port, wait, ask, report."""

import asyncio
import hashlib
import json
import os
import socket
import sys
import time
import urllib.request
from pathlib import Path

from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

MODEL = "tiny-dsa"
PROMPT_CHARACTERS = 9_000
OUTPUT_TOKENS = 64
READY_SECONDS = 240


def choose_port(wanted: str | None = None) -> int:
    """Return the wanted port if it is free, or any free one."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", int(wanted or 0)))
        except (OSError, ValueError, OverflowError) as error:
            raise SystemExit(f"error: port {wanted} cannot be used: {error}") from error
        return int(probe.getsockname()[1])


def wait_until_ready(port: int, process: int) -> None:
    """Return when the server answers; give up when it has died."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            return
        except OSError:
            time.sleep(1)
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            raise SystemExit("error: the server stopped; the end of its log follows") from None
    raise SystemExit(f"error: no answer within {READY_SECONDS} s; the end of the log follows")


def prompts(count: int) -> list[str]:
    """Return long prompts with different beginnings, cut from the licence text."""
    text = Path("LICENSE").read_text()
    return [f"Document {i}: {(text[i * 97 :] + text)[:PROMPT_CHARACTERS]}" for i in range(count)]


async def complete(client: AsyncOpenAI, prompt: str) -> tuple[str, int, int]:
    """Return the answer and its prompt and output tokens."""
    answer = await client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=OUTPUT_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    return answer.choices[0].text, answer.usage.prompt_tokens, answer.usage.completion_tokens


def read_metrics(port: int) -> list[tuple[str, dict[str, str], float]]:
    """Return all samples of the server's /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    families = text_string_to_metric_families(text)
    return [(s.name, s.labels, s.value) for family in families for s in family.samples]


def total(samples: list[tuple[str, dict[str, str], float]], name: str, **labels: str) -> float:
    """Return the sum of a metric's series that carry ``labels``."""
    return sum(
        value
        for sample, found, value in samples
        if sample == name and all(found.get(k) == v for k, v in labels.items())
    )


def decoded(samples: list[tuple[str, dict[str, str], float]], name: str, **labels: str) -> int:
    """Return a row counter over decode and verify, which the fetch ratio is about."""
    phases = ("decode", "verify")
    return int(sum(total(samples, name, phase=phase, **labels) for phase in phases))


async def ask(port: int, count: int, target: str | None = None) -> None:
    """Send the requests at once; print answers, speed and the package's metrics."""
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    begin = time.monotonic()
    answers = await asyncio.gather(*(complete(client, prompt) for prompt in prompts(count)))
    seconds = time.monotonic() - begin
    samples = read_metrics(port)

    for number, (text, prompt_tokens, output_tokens) in enumerate(answers):
        print(f"  request {number}: {prompt_tokens} + {output_tokens} tokens: {text[:48]!r}")
    selected = decoded(samples, "vllm:dhisparse_selected_rows_total")
    fetched = decoded(samples, "vllm:dhisparse_fetched_rows_total")
    output_tokens = sum(answer[2] for answer in answers)
    residency = next(
        labels["residency"] for name, labels, _ in samples if name == "vllm:dhisparse_mode_info"
    )
    report = {
        "residency": residency,
        "requests": count,
        "output_tokens": output_tokens,
        "output_tokens_per_s": round(output_tokens / seconds, 2),
        "selected_rows": selected,
        "fetched_rows": fetched,
        "fetch_ratio": round(fetched / selected, 4) if selected else 0.0,
        "preemptions": int(total(samples, "vllm:num_preemptions_total")),
        "outputs_sha256": hashlib.sha256("\0".join(a[0] for a in answers).encode()).hexdigest(),
    }
    proposed, accepted = (
        int(total(samples, f"vllm:spec_decode_num_{kind}_tokens_total"))
        for kind in ("draft", "accepted")
    )
    if proposed:
        missing = decoded(samples, "vllm:dhisparse_selected_rows_total", tier="host")
        report |= {
            "proposed_drafts": proposed,
            "accepted_drafts": accepted,
            "sharing_gain": round(missing / fetched, 2) if fetched else 1.0,
        }
    print(f"\n{output_tokens} output tokens in {seconds:.1f} s, prompts included (CPU)")
    print("on /metrics (only series that are not zero):")
    for name, labels, value in samples:
        if name.startswith("vllm:dhisparse_") and value:
            shown = {k: v for k, v in labels.items() if k not in ("engine", "model_name")}
            number = f"{value:,.0f}" if value.is_integer() else f"{value:,.3f}"
            print(f"  {name} {shown} {number}")
    places = ", ".join(
        f"{decoded(samples, 'vllm:dhisparse_selected_rows_total', tier=tier):,} {tier}"
        for tier in ("tail", "required", "optional", "host")
    )
    print(f"\nwhile decoding, residency {residency}:")
    print(f"  {selected:,} rows selected, found in: {places}")
    print(f"  {fetched:,} rows fetched from host memory; fetch ratio {report['fetch_ratio']}")
    if proposed:
        print(f"  {accepted:,} of {proposed:,} draft tokens accepted")
        print(f"  each fetched row served {report['sharing_gain']} selections of missing rows")
    if target:
        Path(target).write_text(json.dumps(report, indent=2) + "\n")


def main(command: str, *arguments: str) -> None:
    """Run one step of the quickstart."""
    match command:
        case "port":
            print(choose_port(*arguments))
        case "wait":
            wait_until_ready(int(arguments[0]), int(arguments[1]))
        case "ask":
            asyncio.run(ask(int(arguments[0]), int(arguments[1]), *arguments[2:]))


if __name__ == "__main__":
    main(*sys.argv[1:])
