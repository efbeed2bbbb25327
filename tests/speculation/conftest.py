import gc
import os

import pytest

# Scheduler and worker in the test process, so that tests can look at both. vLLM reads
# these when it is imported.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    OMP_NUM_THREADS="1",
)

# In a process without the interpreter vLLM would choose the V1 runner.
collect_ignore_glob = []
if os.environ.get("DHISPARSE_TRITON_INTERPRETER") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _small_heap():
    """Keep what stands out of vLLM's collections of garbage, a dozen for each engine."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory, tiny_dsa):
    """Makes a target and drafters for it by their settings, each once."""
    from make_tiny_drafter import TinyDrafter, write

    folders = {}

    def make(target=None, **settings):
        shape = {"layers": 6, "leaders": 2} | (target or {})
        model = tiny_dsa(context_gain=2.5, **shape)
        key = model, TinyDrafter(**settings)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("drafter")
            write(key[1], model, folders[key])
        return model, folders[key]

    return make
