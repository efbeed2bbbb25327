"""Speculative decoding: vLLM's acceptance beside what verifying costs in rows."""

from figures import ROWS_PER_SECOND
from panels import Dashboard, Panel, Row, Target
from queries import level, rate, ratio, series

from vllm_dhisparse.metrics import (
    DRAFT_LIMIT,
    DRAFT_RING_ROWS,
    DRAFT_RING_WRAPS,
    FETCHED_ROWS,
    RESIDENCY_BYTES,
    RETRIEVAL_SECONDS,
    SELECTED_ROWS,
    STAGING_ACQUIRES,
)

DRAFTS = rate("vllm:spec_decode_num_drafts_total")
DRAFTED = rate("vllm:spec_decode_num_draft_tokens_total")
ACCEPTED = rate("vllm:spec_decode_num_accepted_tokens_total")
BY_POSITION = rate("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
LENGTH = f"1 + {ratio(ACCEPTED, DRAFTS)}"
VERIFY_RATIO = ratio(rate(FETCHED_ROWS, phase="verify"), rate(SELECTED_ROWS, phase="verify"))
VERIFY_GAIN = ratio(
    rate(SELECTED_ROWS, phase="verify", tier="host"), rate(FETCHED_ROWS, phase="verify")
)

ACCEPTANCE = Row(
    "Acceptance",
    (
        Panel(
            "Accepted by position",
            (Target(f"{BY_POSITION} / on () group_left () ({DRAFTS} > 0)", "{{position}}"),),
            "percentunit",
            "Share of the drafts whose token at this place was accepted.",
        ),
        Panel(
            "Draft tokens",
            (Target(DRAFTED, "drafted"), Target(ACCEPTED, "accepted")),
            "suffix: tokens/s",
            "What lies between them was computed and thrown away.",
        ),
    ),
)
VERIFICATION = Row(
    "Verification",
    (
        Panel(
            "Where selected rows were found",
            (Target(rate(SELECTED_ROWS, "tier", phase="verify"), "{{tier}}"),),
            ROWS_PER_SECOND,
            "In steps that verify drafts.",
            is_stacked=True,
        ),
        Panel(
            "Fetch ratio by phase",
            (
                Target(
                    ratio(
                        rate(FETCHED_ROWS, "phase", phase=("decode", "verify")),
                        rate(SELECTED_ROWS, "phase", phase=("decode", "verify")),
                    ),
                    "{{phase}}",
                ),
            ),
            "percentunit",
            "Queries of a request select much the same rows, so verifying fetches less for each.",
        ),
    ),
)
LOAD = Row(
    "Load",
    (
        Panel(
            "Draft limit",
            (Target(level(DRAFT_LIMIT, "engine"), "engine {{engine}}"),),
            "short",
            "Draft tokens that a request may have in a step; fewer where memory is short.",
        ),
        Panel(
            "Staging by phase",
            (Target(rate(STAGING_ACQUIRES, "phase"), "{{phase}}"),),
            "suffix: /s",
            "Times that a layer took the one staging area for a pass over the rows of a step.",
            is_stacked=True,
        ),
    ),
)
RINGS = Row(
    "Draft KV",
    (
        Panel(
            "Draft memory",
            (Target(level(RESIDENCY_BYTES, residency_class="draft_ring"), "draft KV"),),
            "bytes",
            "Device memory of the drafter; with rings it does not grow with the context.",
        ),
        Panel(
            "Rows of draft rings",
            (Target(level(DRAFT_RING_ROWS, "state"), "{{state}}"),),
            "suffix: rows",
            "Held by running requests, and written: of them with tokens. In one layer.",
        ),
        Panel(
            "Wraps of draft rings",
            (Target(rate(DRAFT_RING_WRAPS), "wraps"),),
            "suffix: /s",
            "Times that a request's ring came back to its first block: its context is longer.",
        ),
        Panel(
            "Time in retrieval by phase",
            (Target(rate(RETRIEVAL_SECONDS, "phase"), "{{phase}}"),),
            "percentunit",
            "Share of the time in which workers resolved selections and brought rows to staging.",
        ),
    ),
)

DASHBOARD = Dashboard(
    "vllm-dhisparse-speculation",
    "vLLM / DHiSparse / Speculation",
    "Acceptance, and what verifying costs in rows; empty without --speculative-config.",
    (
        Panel(
            "Acceptance rate",
            (Target(ratio(ACCEPTED, DRAFTED), "accepted / drafted"),),
            "percentunit",
            "Accepted / drafted tokens.",
        ),
        Panel(
            "Acceptance length",
            (Target(LENGTH, "tokens"),),
            "suffix: tokens",
            "Tokens that a request gains in a step that verifies: 1 + accepted / drafts.",
        ),
        Panel("Drafts", (Target(DRAFTS, "drafts"),), "suffix: /s", "Verified in a second."),
        Panel(
            "Fetch ratio",
            (Target(VERIFY_RATIO, "fetched / selected"),),
            "percentunit",
            "Of steps that verify.",
        ),
        Panel(
            "Sharing gain",
            (Target(VERIFY_GAIN, "selected / fetched"),),
            "suffix: x",
            "Missing selections / fetched rows, of steps that verify.",
        ),
        Panel(
            "Draft limit",
            (Target(f"min ({series(DRAFT_LIMIT)})", "drafts"),),
            "short",
            "Draft tokens per request; lowered before a request is refused.",
        ),
    ),
    (ACCEPTANCE, VERIFICATION, LOAD, RINGS),
)
