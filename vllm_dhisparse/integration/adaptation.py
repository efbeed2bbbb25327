"""The controller's settings from the engine's, and what it did as metrics."""

from typing import TYPE_CHECKING

from vllm.utils.math_utils import cdiv

from vllm_dhisparse.config import DHiSparseConfig
from vllm_dhisparse.core.adaptation import Adaptation
from vllm_dhisparse.core.controller import ResidencyController
from vllm_dhisparse.integration.scheduler_state import SchedulerState
from vllm_dhisparse.integration.stats import DHiSparseStats
from vllm_dhisparse.metrics import (
    ADOPTED_UNITS,
    CONTROLLER_DECISIONS,
    CONTROLLER_STATE,
    CONTROLLER_STATES,
    CONTROLLER_TARGETS,
    DRAFT_LIMIT,
    KV_PRESSURE,
    RECLAIMED_BYTES,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def controller_for(
    config: DHiSparseConfig, vllm_config: "VllmConfig", state: SchedulerState
) -> ResidencyController:
    """Return the controller of an engine; by default its reserve is what one step can take.

    That is a full batch of new tokens and one more started block per request in every
    group, and one admitted request's base share and draft ring.
    """
    groups = state.ledger.num_groups
    if config.head_reserve_blocks is not None:
        return config.controller(config.head_reserve_blocks, groups)
    scheduler = vllm_config.scheduler_config
    blocks = state.growth_blocks(scheduler.max_num_batched_tokens)
    blocks += cdiv(scheduler.max_num_seqs, 64) * groups
    return config.controller(blocks + state.share_blocks(), groups)


# Named once: this is done in every step.
_DECISION = {state: CONTROLLER_DECISIONS.key(state) for state in CONTROLLER_STATES}
_ADOPTED, _RESTORED = ADOPTED_UNITS.key("empty"), ADOPTED_UNITS.key("restored")
_PRESSED, _GIVEN_UP = RECLAIMED_BYTES.key("pressure"), RECLAIMED_BYTES.key("reserve")
_PRESSURE, _DRAFTS = KV_PRESSURE.key(), DRAFT_LIMIT.key()
_ADOPT, _RESTORE = CONTROLLER_TARGETS.key("adopt"), CONTROLLER_TARGETS.key("restore")
_STATE = {
    state: {CONTROLLER_STATE.key(other): float(other == state) for other in CONTROLLER_STATES}
    for state in CONTROLLER_STATES
}


def add_adaptation(
    stats: DHiSparseStats, done: Adaptation, draft_tokens: int, unit_bytes: int
) -> None:
    """Add one step of the controller to counters and gauges."""
    targets = done.targets
    stats.add(_DECISION[targets.state], 1)
    stats.add(_ADOPTED, done.adopted_units)
    stats.add(_RESTORED, done.restored_units)
    stats.add(_PRESSED, done.reclaimed_units * unit_bytes)
    stats.add(_GIVEN_UP, done.given_up_units * unit_bytes)
    gauges = stats.data["gauges"]
    gauges[_PRESSURE] = done.pressure_ratio
    gauges[_DRAFTS] = float(draft_tokens)
    gauges[_ADOPT] = float(targets.adopt_units)
    gauges[_RESTORE] = float(targets.restore_units)
    gauges.update(_STATE[targets.state])
