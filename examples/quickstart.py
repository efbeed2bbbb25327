"""The client side of quickstart.sh: find a port, wait, ask, report."""

import asyncio
import hashlib
import json
import os
import socket
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families
from tiny_dsa.questions import questions

MODEL = "tiny-dsa"
PROMPT_TOKENS = 4000
OUTPUT_TOKENS = 64
READY_SECONDS = 240
Samples = list[tuple[str, dict[str, str], float]]  # name, labels, value


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


def read_metrics(port: int) -> Samples:
    """Return all samples of the server's /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    families = text_string_to_metric_families(text)
    return [(s.name, s.labels, s.value) for family in families for s in family.samples]


def total(samples: Samples, name: str, **labels: str) -> float:
    """Return the sum of a metric's series that carry ``labels``."""
    return sum(
        value
        for sample, found, value in samples
        if sample == name and all(found.get(k) == v for k, v in labels.items())
    )


def decoded(samples: Samples, name: str, **labels: str) -> int:
    """Return a row counter over decode and verify, which the fetch ratio is about."""
    phases = ("decode", "verify")
    return int(sum(total(samples, name, phase=phase, **labels) for phase in phases))


async def ask(port: int, count: int, target: str | None = None) -> None:
    """Send the questions at once; print answers, speed and the package's metrics."""
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    asked = questions(count, PROMPT_TOKENS)
    begin = time.monotonic()
    answers = await asyncio.gather(*(complete(client, question.prompt) for question in asked))
    seconds = time.monotonic() - begin
    samples = read_metrics(port)

    right = 0
    for number, (question, (text, *tokens)) in enumerate(zip(asked, answers, strict=True)):
        is_right = text.startswith(question.answer)
        right += is_right
        print(
            f"  request {number}: {tokens[0]:,} + {tokens[1]} tokens;{question.name}?{text[:3]}"
            f" ({'right' if is_right else 'WRONG'}, {question.distance:,} tokens back)"
        )
    output_tokens = sum(answer[2] for answer in answers)
    report = report_rows(samples) | {
        "requests": count,
        "right_answers": right,
        "output_tokens": output_tokens,
        "output_tokens_per_s": round(output_tokens / seconds, 2),
        "outputs_sha256": hashlib.sha256("\0".join(a[0] for a in answers).encode()).hexdigest(),
    }
    print(f"\n{right} of {count} answers right")
    print(f"{output_tokens} output tokens in {seconds:.1f} s, prompts included (CPU)")
    print_metrics(samples)
    print_rows(samples, report)
    if drafts := report_drafts(samples, report["fetched_rows"]):
        print_drafts(drafts)
    if target:
        Path(target).write_text(json.dumps(report | drafts, indent=2) + "\n")


def report_rows(samples: Samples) -> dict[str, Any]:
    """Return what the server's counters say of rows while it decoded."""
    selected = decoded(samples, "vllm:dhisparse_selected_rows_total")
    fetched = decoded(samples, "vllm:dhisparse_fetched_rows_total")
    info = next(labels for name, labels, _ in samples if name == "vllm:dhisparse_mode_info")
    return {
        "residency": info["residency"],
        "selected_rows": selected,
        "fetched_rows": fetched,
        "fetch_ratio": round(fetched / selected, 4) if selected else 0.0,
        "preemptions": int(total(samples, "vllm:num_preemptions_total")),
    }


def report_drafts(samples: Samples, fetched: int) -> dict[str, Any]:
    """Return what the server's counters say of drafts; nothing where there were none."""
    name = "vllm:spec_decode_num_"
    steps = total(samples, f"{name}drafts_total")
    if not steps:
        return {}
    accepted = total(samples, f"{name}accepted_tokens_total")
    by_position = {
        int(labels["position"]): value / steps
        for sample, labels, value in samples
        if sample == f"{name}accepted_tokens_per_pos_total"
    }
    missing = decoded(samples, "vllm:dhisparse_selected_rows_total", tier="host")
    return {
        "proposed_drafts": int(total(samples, f"{name}draft_tokens_total")),
        "accepted_drafts": int(accepted),
        "acceptance_by_position": [round(by_position[i], 3) for i in sorted(by_position)],
        "tokens_per_step": round(1 + accepted / steps, 2),
        "sharing_gain": round(missing / fetched, 2) if fetched else 1.0,
    }


def print_metrics(samples: Samples) -> None:
    """Print the package's series."""
    print("on /metrics (only series that are not zero):")
    for name, labels, value in samples:
        if name.startswith("vllm:dhisparse_") and value:
            shown = {k: v for k, v in labels.items() if k not in ("engine", "model_name")}
            number = f"{value:,.0f}" if value.is_integer() else f"{value:,.3f}"
            print(f"  {name} {shown} {number}")


def print_rows(samples: Samples, report: Mapping[str, Any]) -> None:
    """Print where rows were found."""
    places = ", ".join(
        f"{decoded(samples, 'vllm:dhisparse_selected_rows_total', tier=tier):,} {tier}"
        for tier in ("tail", "required", "optional", "host")
    )
    print(f"\nwhile decoding, residency {report['residency']}:")
    print(f"  {report['selected_rows']:,} rows selected, found in: {places}")
    print(
        f"  {report['fetched_rows']:,} rows fetched from host memory; "
        f"fetch ratio {report['fetch_ratio']}"
    )


def print_drafts(drafts: Mapping[str, Any]) -> None:
    """Print how many drafts were accepted."""
    accepted, proposed = drafts["accepted_drafts"], drafts["proposed_drafts"]
    shares = " ".join(f"{share:.0%}" for share in drafts["acceptance_by_position"])
    print(f"  {accepted:,} of {proposed:,} draft tokens accepted; by position: {shares}")
    print(f"  {drafts['tokens_per_step']} tokens per step, with the target's own token")
    print(f"  each fetched row served {drafts['sharing_gain']} selections of missing rows")


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
