"""Rows: where they were found, what was fetched, what crossed the host link."""

import figures
from figures import ROWS_PER_SECOND
from panels import Dashboard, Panel, Row, Target
from queries import GENERATING, level, mean, quantile, rate, ratio

from vllm_dhisparse.metrics import (
    EXTRA_PASSES,
    FETCHED_ROWS,
    HOST_POOL_PAGES,
    HOST_POOL_WAITS,
    RETRIEVAL_SECONDS,
    SAMPLED_HITS,
    SELECTED_ROWS,
    STAGING_ACQUIRES,
    TRANSFER_BYTES,
    UNION_ROWS,
)

FOUND_ON_DEVICE = rate(SELECTED_ROWS, phase=GENERATING, tier=("tail", "required", "optional"))
TO_DEVICE = rate(TRANSFER_BYTES, direction="host_to_device")

TIERS = Row(
    "Where selected rows were found",
    (
        Panel(
            "Generating",
            (Target(rate(SELECTED_ROWS, "tier", phase=GENERATING), "{{tier}}"),),
            ROWS_PER_SECOND,
            "Tail: newest rows. Required and optional: row cache. Host: had to be fetched.",
            is_stacked=True,
        ),
        Panel(
            "Prompts",
            (Target(rate(SELECTED_ROWS, "tier", phase="prefill"), "{{tier}}"),),
            ROWS_PER_SECOND,
            "Prompts read the row cache but do not flush it.",
            is_stacked=True,
        ),
    ),
)
FETCHES = Row(
    "Fetches",
    (
        Panel(
            "Fetch ratio by phase",
            (
                Target(
                    ratio(rate(FETCHED_ROWS, "phase"), rate(SELECTED_ROWS, "phase")), "{{phase}}"
                ),
            ),
            "percentunit",
            "Fetched / selected rows.",
        ),
        Panel(
            "Sharing gain by phase",
            (
                Target(
                    ratio(rate(SELECTED_ROWS, "phase", tier="host"), rate(FETCHED_ROWS, "phase")),
                    "{{phase}}",
                ),
            ),
            "suffix: x",
            "Selections that were not on the device / rows fetched for them: queries and requests "
            "of a step share what they miss.",
        ),
    ),
)
LOCALITY = Row(
    "Locality, sampled",
    (
        Panel(
            "Rows that a request reads in a step",
            (
                *(Target(quantile(q, UNION_ROWS), f"p{round(100 * q)}") for q in (0.5, 0.95)),
                Target(mean(UNION_ROWS), "mean"),
            ),
            "suffix: rows",
            "Distinct rows of one index group; the queries of a step share them.",
        ),
        Panel(
            "Hits by age",
            (Target(rate(SAMPLED_HITS, "age"), "age {{age}}"),),
            "suffix: hits/s",
            "3 = used since the hand of the CLOCK last passed, 0 = about to go or new. Many young "
            "hits mean that a smaller row cache would do.",
            is_stacked=True,
        ),
    ),
)
LINK = Row(
    "Host link",
    (
        Panel(
            "Transfers",
            (Target(rate(TRANSFER_BYTES, "direction"), "{{direction}}"),),
            "Bps",
            "Every row is copied to the host once, when it is written; fetches come back.",
        ),
        Panel(
            "To the device for each output token",
            (Target(ratio(TO_DEVICE, rate("vllm:generation_tokens_total")), "bytes"),),
            "bytes",
            "All layers, restored history included.",
        ),
    ),
)
TIME = Row(
    "Time",
    (
        Panel(
            "Time in retrieval by phase",
            (Target(rate(RETRIEVAL_SECONDS, "phase"), "{{phase}}"),),
            "percentunit",
            "Share of the time in which workers resolved selections and brought rows to staging.",
        ),
        Panel(
            "Time for each pass of a layer",
            (
                Target(
                    ratio(rate(RETRIEVAL_SECONDS, "phase"), rate(STAGING_ACQUIRES, "phase")),
                    "{{phase}}",
                ),
            ),
            "s",
            "Resolving is counted where it happens, in the leader's layer.",
        ),
    ),
)
POOL = Row(
    "Host pool",
    (
        figures.host_pool(),
        Panel(
            "Waits for host pages",
            (Target(rate(HOST_POOL_WAITS), "waits"),),
            "suffix: /s",
            "Requests that had to wait, or were preempted, because host pages were missing.",
        ),
    ),
)

DASHBOARD = Dashboard(
    "vllm-dhisparse-retrieval",
    "vLLM / DHiSparse / Retrieval",
    "Where selected rows were found, what was fetched, and what crossed the host link.",
    (
        figures.fetch_ratio_tile(),
        Panel(
            "Found on the device",
            (Target(ratio(FOUND_ON_DEVICE, figures.SELECTED_GENERATING), "share"),),
            "percentunit",
            "Share of the selections that needed no fetch.",
        ),
        Panel(
            "Selected",
            (Target(figures.SELECTED_GENERATING, "selected"),),
            ROWS_PER_SECOND,
            "While decoding and verifying.",
        ),
        Panel("To the device", (Target(TO_DEVICE, "fetched"),), "Bps", "Fetched and restored."),
        Panel(
            "Host pool in use",
            (
                Target(
                    ratio(level(HOST_POOL_PAGES, state=("held", "idle")), level(HOST_POOL_PAGES)),
                    "share",
                ),
            ),
            "percentunit",
            "Held by running requests or kept for prefix hits; idle pages are given up on demand.",
        ),
        Panel(
            "Extra passes",
            (Target(rate(EXTRA_PASSES), "passes"),),
            "suffix: /s",
            "Passes because the rows of a step were more than staging holds; raise staging_rows.",
        ),
    ),
    (TIERS, FETCHES, LOCALITY, LINK, TIME, POOL),
)
