"""How many requests, and how many tokens a second, the same device memory serves.

    python examples/concurrency.py --json FILE [--figure FILE.png]

Many long requests come at once: more than the device holds under residency `resident`, where
the others queue. One engine after the other gets the same prompts and the same device memory.
The model has many latent layers and few indexers, as GLM-5.x has. Needs the environment of
quickstart.sh (measured on CPU, one run; not a claim about GPUs).
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import figure_files
from figure_files import write_model
from load_step import prompt

RESIDENCIES = ("resident", "adaptive")
SAMPLED_STEPS = 4


@dataclass(frozen=True)
class Load:
    """The requests, and the device memory that they share."""

    requests: int = 12
    prompt_tokens: int = 2048
    output_tokens: int = 192
    pool_mib: int = 64
    layers: int = 16
    leaders: int = 2
    batched_tokens: int = 256


@dataclass(frozen=True)
class Result:
    """One residency.

    ``concurrency``: most requests that ran at a time; ``mean_concurrency``: over the run.
    ``output_tokens_per_s``: of the whole run, prompts included. ``full_tokens_per_s``: of the
    steps in which as many requests got a token. ``steps``: of the engine.
    """

    concurrency: int
    mean_concurrency: float
    output_tokens_per_s: float
    full_tokens_per_s: float
    preemptions: int
    steps: int
    seconds: float
    outputs_sha256: str


def measure(residency: str, model: Path, load: Load) -> Result:
    """Run all requests in an engine in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # vLLM prefers it to what an engine asks for
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model),
        attention_backend="DHISPARSE",
        additional_config={"dhisparse": {"residency": residency}},
        dtype="float32",
        max_model_len=load.prompt_tokens + load.output_tokens,
        max_num_seqs=load.requests,
        max_num_batched_tokens=load.batched_tokens,
        kv_cache_memory_bytes=load.pool_mib << 20,
        disable_log_stats=False,
    )
    engine = llm.llm_engine
    parameters = SamplingParams(temperature=0, max_tokens=load.output_tokens, ignore_eos=True)
    for number in range(load.requests):
        ids = {"prompt_token_ids": prompt(number, load.prompt_tokens)}
        engine.add_request(str(number), ids, parameters)
    tokens: dict[str, list[int]] = {}
    running: list[int] = []
    per_step: list[tuple[int, float]] = []
    while engine.has_unfinished_requests():
        start, before = time.monotonic(), sum(map(len, tokens.values()))
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        given = sum(map(len, tokens.values())) - before
        per_step.append((given, time.monotonic() - start))
        if len(per_step) % SAMPLED_STEPS == 0:
            running.append(read(llm, "vllm:num_requests_running"))
    preemptions = read(llm, "vllm:num_preemptions")
    engine.engine_core.shutdown()
    outputs = [tokens[str(number)] for number in range(load.requests)]
    return result(outputs, per_step, running, preemptions)


def read(llm: Any, name: str) -> int:
    """Return a counter or gauge of an engine."""
    return int(sum(metric.value for metric in llm.get_metrics() if metric.name == name))


def result(
    outputs: Sequence[Sequence[int]],
    per_step: Sequence[tuple[int, float]],
    running: Sequence[int],
    preemptions: int,
) -> Result:
    """Sum up a run.

    Args:
        outputs: tokens of each request.
        per_step: output tokens and seconds of each step of the engine.
        running: requests that ran, now and then.
        preemptions: in the run.

    """
    concurrency = max(running)
    seconds = sum(spent for _, spent in per_step)
    full = [(given, spent) for given, spent in per_step if given >= concurrency]
    full_seconds = sum(spent for _, spent in full)
    return Result(
        concurrency=concurrency,
        mean_concurrency=round(statistics.mean(running), 1),
        output_tokens_per_s=round(sum(map(len, outputs)) / seconds, 1),
        full_tokens_per_s=round(sum(given for given, _ in full) / full_seconds, 1) if full else 0.0,
        preemptions=preemptions,
        steps=len(per_step),
        seconds=round(seconds, 1),
        outputs_sha256=hashlib.sha256(json.dumps([*map(list, outputs)]).encode()).hexdigest(),
    )


def table(results: Mapping[str, Result]) -> str:
    """Return one line for each residency."""
    columns = [name for name in Result.__dataclass_fields__ if name != "outputs_sha256"]
    lines = [" | ".join(["residency", *columns])]
    for residency, found in results.items():
        values = [f"{getattr(found, name):,}".rjust(len(name)) for name in columns]
        lines.append(" | ".join([residency.ljust(9), *values]))
    return "\n".join(lines)


def verdict(results: Mapping[str, Result]) -> str:
    """Return what the run shows, one finding a line."""
    resident, adaptive = results["resident"], results["adaptive"]
    is_equal = resident.outputs_sha256 == adaptive.outputs_sha256
    names = {"concurrency": "concurrency", "mean_concurrency": "mean concurrency"}
    names |= {"output_tokens_per_s": "output tokens/s"}
    names["full_tokens_per_s"] = "output tokens/s of full steps"
    lines = [
        f"{text}: {getattr(adaptive, name) / getattr(resident, name):.2f} x resident's"
        for name, text in names.items()
        if getattr(resident, name)
    ]
    return "\n".join([*lines, f"output tokens identical: {'yes' if is_equal else 'NO'}"])


def draw(results: Mapping[str, Result], target: Path) -> None:
    """Write concurrency and throughput as an image; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    panels = {
        "concurrency": "requests that ran at a time",
        "output_tokens_per_s": "output tokens/s",
    }
    for axes, (name, title) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        axes.bar(list(results), [getattr(found, name) for found in results.values()], 0.6)
        axes.set_title(title)
    figure.suptitle("same prompts, same device memory; measured on CPU")
    figure.savefig(target)


def compare(model: Path, load: Load) -> dict[str, Result]:
    """Measure each residency in a process of its own: vLLM keeps one engine in a process."""
    results = {}
    for residency in RESIDENCIES:
        print(f"residency {residency} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            target, log = Path(folder, "result.json"), Path(folder, "log")
            order = json.dumps([residency, str(model), asdict(load)])
            command = [sys.executable, __file__, "--measure", order, "--json", str(target)]
            with log.open("wb") as out:
                status = subprocess.run(command, stdout=out, stderr=out).returncode
            if status:
                end = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
                raise SystemExit(f"error: residency {residency} stopped with {status}:\n{end}")
            results[residency] = Result(**json.loads(target.read_text()))
    return results


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; wrong ones end the program before anything starts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    figure_files.add_options(parser, ".cache/concurrency/model")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    for name, default in asdict(Load()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    return figure_files.parse(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    options = parse(arguments)
    if options.measure:
        residency, model, fields = json.loads(options.measure)
        found = measure(residency, Path(model), Load(**fields))
        options.json.write_text(json.dumps(asdict(found)))
        return
    load = Load(**{name: getattr(options, name) for name in asdict(Load())})
    write_model(options.model, load.layers, load.leaders)
    results = compare(options.model, load)
    print(f"\n{table(results)}\n\n{verdict(results)}")
    figures: dict[str, Any] = {"load": asdict(load)}
    figures |= {residency: asdict(found) for residency, found in results.items()}
    figure_files.finish(options, results, figures, draw)


if __name__ == "__main__":
    figure_files.run(main)
