import os

import pytest

# Scheduler and worker in the test process, so that tests can look at both. vLLM reads
# these when it is imported.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    OMP_NUM_THREADS="1",  # tiny matrices gain nothing from more, and lose on a busy machine
)


@pytest.fixture(scope="module")
def flash_mla_operators():
    """The stand-ins for FlashMLA's operators; yields what registers them."""
    from fake_flash_mla import NAMESPACE, define
    from torch.library import Library  # once the environment is set

    library = Library(NAMESPACE, "DEF")
    define(library)
    yield library
    library._destroy()
