"""What a server does at a glance: load, memory, retrieval, latency, health."""

import figures
from figures import ROWS_PER_SECOND
from panels import Dashboard, Panel, Row, Target
from queries import GENERATING, level, rate, ratio

from vllm_dhisparse.metrics import (
    EXTRA_PASSES,
    FETCHED_ROWS,
    HOST_POOL_WAITS,
    MODE_INFO,
)

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
OUTPUT, PROMPT = "vllm:generation_tokens_total", "vllm:prompt_tokens_total"
TOKENS_PER_SECOND = "suffix: tokens/s"

LOAD = Row(
    "Load",
    (
        Panel(
            "Requests",
            (Target(level(RUNNING), "running"), Target(level(WAITING), "waiting")),
            "short",
            "Requests that run, and that wait for memory or a place in the batch.",
        ),
        Panel(
            "Tokens",
            (Target(rate(OUTPUT), "output"), Target(rate(PROMPT), "prompt")),
            TOKENS_PER_SECOND,
            "Tokens made, and prompt tokens taken in.",
        ),
    ),
)
MEMORY = Row("Memory", (figures.device_memory(), figures.host_pool()))
RETRIEVAL = Row(
    "Retrieval",
    (
        Panel(
            "Fetch ratio and KV pressure",
            (
                Target(figures.FETCH_RATIO, "fetched / selected"),
                Target(f"max ({figures.PRESSURE})", "KV pressure"),
            ),
            "percentunit",
            "The fetch ratio follows the load: low while memory is spare, higher under pressure.",
        ),
        Panel(
            "Rows while generating",
            (
                Target(figures.SELECTED_GENERATING, "selected"),
                Target(rate(FETCHED_ROWS, phase=GENERATING), "fetched"),
            ),
            ROWS_PER_SECOND,
            "Rows that the indexer chose, and rows that crossed the host link for them.",
        ),
    ),
)
LATENCY = Row(
    "Latency",
    (
        figures.latency(
            "Time to first token",
            "vllm:time_to_first_token_seconds",
            "From arrival to the first token; contains waiting and the prompt.",
        ),
        figures.latency(
            "Time between tokens",
            "vllm:inter_token_latency_seconds",
            "Between two tokens of a request; contains the step's retrieval.",
        ),
    ),
)
HEALTH = Row(
    "Health",
    (
        Panel(
            "Should be zero",
            (
                Target(rate("vllm:num_preemptions_total"), "preemptions"),
                Target(rate(HOST_POOL_WAITS), "waits for host pages"),
                Target(rate(EXTRA_PASSES), "extra passes"),
            ),
            "suffix: /s",
            "Preempted requests, requests that found no host pages, and steps whose rows were "
            "more than staging holds.",
        ),
        Panel(
            "Prefix cache",
            (
                Target(
                    ratio(
                        rate("vllm:prefix_cache_hits_total"),
                        rate("vllm:prefix_cache_queries_total"),
                    ),
                    "hit tokens / prompt tokens",
                ),
            ),
            "percentunit",
            "Optional memory should not cost prefix hits: a part of the pool stays plain for that.",
        ),
    ),
)

DASHBOARD = Dashboard(
    "vllm-dhisparse-overview",
    "vLLM / DHiSparse / Overview",
    "Load, memory by use, fetched rows and latency of servers with DHISPARSE.",
    (
        Panel(
            "Residency",
            (Target(level(MODE_INFO, "residency"), "{{residency}}"),),
            "short",
            "How the engines run: resident, fixed or adaptive.",
            shows_name=True,
        ),
        Panel("Running requests", (Target(level(RUNNING), "running"),), "short", "All engines."),
        Panel("Output", (Target(rate(OUTPUT), "output"),), TOKENS_PER_SECOND, "All engines."),
        figures.fetch_ratio_tile(),
        figures.pressure_tile(),
        figures.optional_share_tile(),
    ),
    (LOAD, MEMORY, RETRIEVAL, LATENCY, HEALTH),
)
