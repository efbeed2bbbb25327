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


def adaptation_stats(done: Adaptation, draft_tokens: int, unit_bytes: int) -> DHiSparseStats:
    """Return one step of the controller as counters and gauges."""
    stats = DHiSparseStats()
    state, targets = done.targets.state, done.targets
    stats.add(CONTROLLER_DECISIONS.key(state), 1)
    stats.add(ADOPTED_UNITS.key("empty"), done.adopted_units)
    stats.add(ADOPTED_UNITS.key("restored"), done.restored_units)
    stats.add(RECLAIMED_BYTES.key("pressure"), done.reclaimed_units * unit_bytes)
    stats.add(RECLAIMED_BYTES.key("reserve"), done.given_up_units * unit_bytes)
    gauges = stats.data["gauges"]
    gauges[KV_PRESSURE.key()] = done.pressure_ratio
    gauges[DRAFT_LIMIT.key()] = float(draft_tokens)
    gauges[CONTROLLER_TARGETS.key("adopt")] = float(targets.adopt_units)
    gauges[CONTROLLER_TARGETS.key("restore")] = float(targets.restore_units)
    for other in CONTROLLER_STATES:
        gauges[CONTROLLER_STATE.key(other)] = float(other == state)
    return stats
