"""``vllm-dhisparse simulate``: policies side by side in virtual time."""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dhisparse.options import count, counts, new_file, size

if TYPE_CHECKING:
    from vllm_dhisparse.simulator.engine import Step
    from vllm_dhisparse.simulator.loads import Load
    from vllm_dhisparse.simulator.run import Settings

_DEFAULT_POLICIES = "resident,fixed,adaptive"


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "simulate",
        help="compare residency policies in virtual time",
        description="Runs the package's own controller, ledger and row cache in virtual time. "
        "Times come from a model that is calibrated to published ratios, not measured: compare "
        "runs of one profile with each other, and quote no absolute figure.",
    )
    parser.add_argument("--profile", default="h200-pcie", help="machine: a name or a .toml file")
    parser.add_argument("--model", default="glm-5.3-4bit", help="model geometry")
    parser.add_argument("--workload", default="constant", help="a name or a .toml file")
    parser.add_argument("--policy", default=_DEFAULT_POLICIES, help="one or more, with commas")
    parser.add_argument(
        "--spec", default="none", help="none, dflash2, dspark, or fixed:ACCEPTED,DRAFTS"
    )
    parser.add_argument(
        "--trace",
        default="ordinary",
        help="locality of selections: ordinary, easy, hard, scattered, or .npz files with commas",
    )
    parser.add_argument("--fidelity", choices=("rows", "fluid"), default="fluid")
    parser.add_argument(
        "--concurrency",
        type=counts,
        help="in all phases, instead of the workload's; more than one, with commas, are a sweep",
    )
    parser.add_argument("--context", type=count, help="tokens, instead of the workload's")
    parser.add_argument("--kv-gb", type=size, help="device memory for KV, instead of what is left")
    parser.add_argument("--host-gb", type=size, help="host memory of one GPU, for history")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="check the books in every step")
    parser.add_argument("--out", type=new_file, metavar="FILE", help="write all figures as JSON")
    parser.add_argument("--plot", type=new_file, metavar="FILE", help="draw the runs over time")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; return 0, or 2 where an option is wrong."""
    try:
        return _run(options)
    except ValueError as error:
        print(f"vllm-dhisparse simulate: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    # Here, so that other commands start without numba.
    from vllm_dhisparse.simulator.report import draw, provenance, table, to_json
    from vllm_dhisparse.simulator.run import build
    from vllm_dhisparse.simulator.summary import Summary, summarize

    begin = time.perf_counter()
    wanted = [settings_from(options, number) for number in options.concurrency or [None]]
    settings = wanted[0]
    runs: dict[str, list[Step]] = {}
    results: dict[str, list[Summary]] = {}
    for policy in policies(options.policy):
        for number, each in enumerate(wanted):
            name = policy if len(wanted) == 1 else f"{policy}, {options.concurrency[number]}"
            engine = build(replace(each, policy=policy))
            steps: list[Step] = []
            for step in engine.run():
                steps.append(step)
                _show(name, len(steps), each.load.steps)
            runs[name] = steps
            row_bytes = each.model.token_bytes * engine.scale
            results[name] = [
                summarize([step for step in steps if step.phase == phase], row_bytes)
                for phase in range(len(each.load.phases))
            ]
    title = (
        f"{settings.model.name}, {settings.speculation.name}, {options.workload}, "
        f"{settings.fidelity}"
    )
    print(f"{title}\n{table(results)}\n{provenance(settings.profile)}")
    seconds = time.perf_counter() - begin
    print(f"{sum(map(len, runs.values()))} steps, simulated in {seconds:.1f} s")
    if options.out:
        named = {key: str(value) for key, value in vars(options).items() if key != "run"}
        document = to_json(named, settings.profile, results)
        options.out.write_text(json.dumps(document, indent=2) + "\n")
    if options.plot:
        draw(runs, title, options.plot)
    return 0


def policies(text: str) -> list[Any]:
    """Return the policies of an option.

    Raises:
        ValueError: one is unknown.

    """
    from vllm_dhisparse.simulator.memory import POLICIES

    named = text.split(",")
    for name in named:
        if name not in POLICIES:
            raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return named


def settings_from(options: argparse.Namespace, concurrency: int | None) -> "Settings":
    """Return the settings that the options say, for one concurrency or the workload's.

    Raises:
        ValueError: an option is wrong; the message says which.

    """
    from vllm_dhisparse.simulator.geometry import model_named
    from vllm_dhisparse.simulator.profiles import profile_named
    from vllm_dhisparse.simulator.run import Settings
    from vllm_dhisparse.simulator.speculation import speculation_named
    from vllm_dhisparse.simulator.workload_files import share_of_gpu

    profile = profile_named(options.profile)
    if options.host_gb is not None:
        profile = profile.replaced(host_gb=options.host_gb)
    is_file = options.trace.endswith(".npz")
    return Settings(
        profile=profile,
        model=model_named(options.model),
        load=share_of_gpu(_load(options, concurrency), int(profile["gpus"])),
        speculation=speculation_named(options.spec),
        fidelity=options.fidelity,
        locality="ordinary" if is_file else options.trace,
        traces=tuple(map(Path, options.trace.split(","))) if is_file else (),
        kv_gb=options.kv_gb,
        seed=options.seed,
        checks=options.check,
    )


def _load(options: argparse.Namespace, concurrency: int | None) -> "Load":
    from vllm_dhisparse.simulator.workload_files import load_named

    load = load_named(options.workload)
    if concurrency is not None:
        phases = tuple(phase._replace(concurrency=concurrency) for phase in load.phases)
        load = replace(load, phases=phases)
    if options.context is not None:
        load = replace(load, contexts=(options.context,))
    return load


def _show(name: str, done: int, of: int) -> None:
    if sys.stderr.isatty() and (done % 10 == 0 or done == of):
        bar = "#" * round(30 * done / of)
        end = "\n" if done == of else ""
        print(f"\r{name:>15} [{bar:<30}] {done}/{of}", end=end, file=sys.stderr, flush=True)
