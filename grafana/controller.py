"""The residency controller: what it sees, what it decides, what memory does."""

import figures
from panels import Dashboard, Panel, Row, Target
from queries import level, rate, series

from vllm_dhisparse.metrics import (
    ADOPTED_UNITS,
    CONTROLLER_DECISIONS,
    CONTROLLER_STATE,
    CONTROLLER_TARGETS,
    DRAFT_LIMIT,
    RECLAIMED_BYTES,
    RESIDENCY_BYTES,
    RESIDENCY_ROWS,
    WORKING_SET_ROWS,
)

INPUTS = Row(
    "Pressure and memory",
    (
        Panel(
            "KV pressure by engine",
            (Target(figures.PRESSURE, "engine {{engine}}"),),
            "percentunit",
            "Share of the device's KV memory that running and waiting requests require.",
            thresholds=((0.98, "red"),),
            maximum=1,
        ),
        figures.device_memory(),
    ),
)
DECISIONS = Row(
    "Decisions",
    (
        Panel(
            "Steps by decision",
            (Target(rate(CONTROLLER_DECISIONS, "action"), "{{action}}"),),
            "suffix: steps/s",
            "Grow: units are adopted. Shrink: the oldest are about to go. Reclaim: vLLM has taken "
            "optional memory back.",
            is_stacked=True,
        ),
        Panel(
            "State",
            (Target(level(CONTROLLER_STATE, "state"), "{{state}}"),),
            "short",
            "Engines in each state.",
            is_stacked=True,
        ),
    ),
)
TARGETS = Row(
    "Growth",
    (
        Panel(
            "Targets",
            (Target(level(CONTROLLER_TARGETS, "action"), "{{action}}"),),
            "suffix: units",
            "Units that the controller wants out of spare memory in this step, and how many of "
            "them filled at once. The pool may have fewer that cost no cached prefix.",
        ),
        Panel(
            "Working set and row cache by engine",
            (
                Target(level(WORKING_SET_ROWS, "engine"), "working set, engine {{engine}}"),
                Target(level(RESIDENCY_ROWS, "engine"), "row cache, engine {{engine}}"),
            ),
            "suffix: rows",
            "Cached rows that get all but a hundredth of the hits, and rows that there is room "
            "for, in one index group.",
        ),
    ),
)
MOVES = Row(
    "Memory on the move",
    (
        Panel(
            "Adopted units",
            (Target(rate(ADOPTED_UNITS, "content"), "{{content}}"),),
            "suffix: units/s",
            "Units of 64 rows in every latent layer, taken out of spare memory: empty ones fill by "
            "misses, restored ones are filled at once.",
        ),
        Panel(
            "Optional memory given back",
            (Target(rate(RECLAIMED_BYTES, "reason"), "{{reason}}"),),
            "Bps",
            "Pressure: vLLM took it in the step that needed it. Reserve: kept plain, so that "
            "cached prefixes are not pushed out.",
        ),
    ),
)
CONSEQUENCES = Row(
    "Consequences",
    (
        Panel(
            "Optional memory by engine",
            (
                Target(
                    level(RESIDENCY_BYTES, "engine", residency_class="optional"),
                    "engine {{engine}}",
                ),
            ),
            "bytes",
            "What each engine keeps of its history beyond what it must.",
        ),
        Panel(
            "Fetch ratio",
            (Target(figures.FETCH_RATIO, "fetched / selected"),),
            "percentunit",
            "What optional memory saves: rows that need not be fetched.",
        ),
    ),
)

DASHBOARD = Dashboard(
    "vllm-dhisparse-controller",
    "vLLM / DHiSparse / Residency controller",
    "Pressure, decisions and the memory that the residency controller moves.",
    (
        Panel(
            "State",
            (Target(f"{level(CONTROLLER_STATE, 'state')} > 0", "{{state}}"),),
            "short",
            "Of the engines chosen.",
            shows_name=True,
        ),
        figures.pressure_tile(),
        Panel(
            "Required",
            (Target(level(RESIDENCY_BYTES, residency_class="required"), "required"),),
            "bytes",
            "Row cache that running requests brought with them.",
        ),
        Panel(
            "Optional",
            (Target(level(RESIDENCY_BYTES, residency_class="optional"), "optional"),),
            "bytes",
            "Row cache in memory that is spare.",
        ),
        Panel(
            "Given back",
            (Target(rate(RECLAIMED_BYTES), "given back"),),
            "Bps",
            "Optional memory given back, for whatever reason.",
        ),
        Panel(
            "Draft limit",
            (Target(f"min ({series(DRAFT_LIMIT)})", "drafts"),),
            "short",
            "Draft tokens per request; lowered before a request is refused.",
        ),
    ),
    (INPUTS, DECISIONS, TARGETS, MOVES, CONSEQUENCES),
)
