"""No deadlock where memory is just enough: whatever can run alone ends, in any company."""

from dataclasses import replace

import pytest

from vllm_dhisparse.runtime.tables import UNIT_ROWS

from .kv_setup import Setup
from .kv_world import World

PROMPT_TOKENS = 384
OUTPUT_TOKENS = 70
MAX_STEPS = 400


def run(world, num_requests):
    """Serve requests of one whole prompt; return how many end."""
    world.prefixes[0] = world.tokens(PROMPT_TOKENS)
    for _ in range(num_requests):
        world.add_request(0, PROMPT_TOKENS, 0, OUTPUT_TOKENS)
    for _ in range(MAX_STEPS):
        world.schedule()
        world.adopt(4, 0)
        world.check()
        if not world.running and not world.waiting:
            break
    return world.events["finished"]


@pytest.mark.parametrize("residency", ["adaptive", "fixed"])
@pytest.mark.parametrize("num_indexer_groups", [1, 2])
def test_f25_whole_prompt_hits_at_the_brim_make_progress(residency, num_indexer_groups):
    """From the smallest memory that may start, see ``max_memory_usage_bytes``, upwards."""
    num_pages = -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // UNIT_ROWS)
    for more_blocks in range(4):
        for more_pages in (0, 1, 40):
            setup = Setup(
                num_pages=num_pages + more_pages,
                block_tokens=UNIT_ROWS,
                page_tokens=UNIT_ROWS,
                residency=residency,
                num_indexer_groups=num_indexer_groups,
            )
            latent_blocks = setup.num_groups * (
                World(setup).state.max_tail_blocks + setup.base_units
            )
            page_blocks = num_indexer_groups * num_pages
            world = World(replace(setup, num_blocks=1 + latent_blocks + page_blocks + more_blocks))
            assert run(world, 3) == 3, (more_blocks, more_pages)
            world.close()
