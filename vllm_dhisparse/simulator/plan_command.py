"""``vllm-dhisparse plan``: memory, requests and fetch ratio of a deployment."""

import argparse
import json
import sys
from dataclasses import asdict
from math import ceil
from typing import TYPE_CHECKING, Any

from vllm_dhisparse.options import count, size

if TYPE_CHECKING:
    from vllm_dhisparse.simulator.plan import Plan


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "plan",
        help="how much memory a deployment needs and what it will fetch",
        description="From sizes alone, and a miss curve of generated selections. Figures are "
        "for one GPU of the profile and its share of the requests.",
    )
    parser.add_argument("--profile", default="h200-pcie", help="machine: a name or a .toml file")
    parser.add_argument("--model", default="glm-5.3-4bit", help="model geometry")
    parser.add_argument("--context", type=count, default=100_000, help="tokens of a request")
    parser.add_argument("--concurrency", type=count, default=128, help="requests on all GPUs")
    parser.add_argument(
        "--spec", default="none", help="none, dflash2, dspark, or fixed:ACCEPTED,DRAFTS"
    )
    parser.add_argument("--locality", default="ordinary", help="ordinary, easy, hard, scattered")
    parser.add_argument("--host-gb", type=size, help="host memory of one GPU, for history")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; return 0, 1 where the requests do not fit, 2 for a wrong option."""
    from vllm_dhisparse.simulator.geometry import model_named
    from vllm_dhisparse.simulator.loads import Load, Phase
    from vllm_dhisparse.simulator.plan import plan
    from vllm_dhisparse.simulator.profiles import profile_named
    from vllm_dhisparse.simulator.run import Settings
    from vllm_dhisparse.simulator.speculation import speculation_named

    try:
        profile = profile_named(options.profile)
        if options.host_gb is not None:
            profile = profile.replaced(host_gb=options.host_gb)
        settings = Settings(
            profile=profile,
            model=model_named(options.model),
            load=Load((Phase(1, 1),), (options.context,), 1),
            speculation=speculation_named(options.spec),
            locality=options.locality,
        )
        found = plan(settings, options.context, options.concurrency)
    except ValueError as error:
        print(f"vllm-dhisparse plan: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({**asdict(found), "fits": found.fits}, indent=2))
    else:
        print(_text(found, options))
    return 0 if found.fits else 1


def _text(found: "Plan", options: argparse.Namespace) -> str:
    pool_gib = ceil(found.host_gb * 1e9 / 2**30)
    lines = [
        f"{options.model} on one GPU of {options.profile}, {found.requests} requests of "
        f"{options.context:,} tokens, drafts: {options.spec}",
        f"  device memory for KV       {found.kv_gb:9.1f} GB, {found.staging_gb:.2f} GB of staging "
        "beside it",
        f"  host memory needed         {found.host_gb:9.1f} GB (host_pool_gib: {pool_gib})",
        f"  draft ring of a request    {found.ring_mb:9.1f} MB",
        f"  most requests, resident    {found.most_resident:9d}",
        f"  most requests, by device   {found.most_by_device:9d}",
        f"  most requests, by host     {found.most_by_host:9d}",
        f"  device rows of a request   {found.rows_per_request:9,d} ({found.held_share:.0%} of "
        "the context)",
    ]
    if found.fetch_ratio is None:
        what = "host" if found.most_by_host < found.most_by_device else "device"
        lines.append(f"  These requests do not fit: {what} memory holds fewer.")
    else:
        lines.append(f"  fetch ratio to expect      {found.fetch_ratio:9.2%} (simulated)")
    return "\n".join(lines)
