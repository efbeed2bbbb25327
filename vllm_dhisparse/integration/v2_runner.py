"""vLLM's V2 model runner without a GPU: its Triton kernels run in Triton's interpreter.

Some speculative methods exist in the V2 runner only, and vLLM runs that one on a CPU only
beside a Triton with a CPU backend. The interpreter computes the same, slowly. What it needs
must be in place before vLLM looks for Triton, so an environment variable asks for it, which
spawned processes inherit.
"""

import logging
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm_dhisparse.integration.names import DRAFTS_WITH_CACHE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.dhisparse")

ARMED = "DHISPARSE_TRITON_INTERPRETER"
"""Set to 1 before vLLM is imported, beside TRITON_INTERPRET=1: use the interpreter."""
_SETTINGS = {ARMED: "1", "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
_set_here: set[str] = set()
"""Variables that `choose_runner` set; an engine that needs none of them clears these."""


class _InterpreterDriver:
    """Tells vLLM that this machine can run Triton kernels."""

    @staticmethod
    def is_active() -> bool:
        """Return True."""
        return True


def is_armed() -> bool:
    """Whether the environment asks for the interpreter."""
    return os.environ.get(ARMED) == "1" and os.environ.get("TRITON_INTERPRET") == "1"


def prepare_process() -> None:
    """Make Triton's interpreter pass for a CPU backend, where the environment asks for it.

    To be called before vLLM looks for Triton. torch may have imported Triton already, which
    chooses between interpreter and compiler when it is imported.
    """
    if not is_armed():
        return
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=_InterpreterDriver, compiler=None)
    _accept_any_mask()


def _accept_any_mask() -> None:
    """Let masks be of any dtype: ``int1 & int1`` gives numpy integers in Triton 3.9."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    masked_load = InterpreterBuilder.create_masked_load
    masked_store = InterpreterBuilder.create_masked_store

    def with_bools(mask: Any) -> Any:
        if mask.data.dtype != np.bool_:
            mask.data = mask.data.astype(np.bool_)
        return mask

    def load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        return masked_load(self, pointers, with_bools(mask), *others)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        return masked_store(self, pointers, value, with_bools(mask), *others)

    InterpreterBuilder.create_masked_load = load
    InterpreterBuilder.create_masked_store = store


def complete_sampler() -> None:
    """Give the rejection sampler what the interpreter lacks: CUDA's ``log1p``."""
    if not is_armed():
        return
    from vllm.triton_utils import tl
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))


def needs_v2_runner(vllm_config: "VllmConfig") -> bool:
    """Whether the drafts of an engine come from the V2 runner alone."""
    speculation = vllm_config.speculative_config
    return speculation is not None and speculation.method in DRAFTS_WITH_CACHE


def forget_runner() -> None:
    """Take back what an earlier engine's `choose_runner` set, for one that needs none of it."""
    from vllm.config import vllm as checks
    from vllm.triton_utils import HAS_TRITON

    for name in _set_here:
        os.environ.pop(name, None)
    _set_here.clear()
    checks.HAS_TRITON = HAS_TRITON


def choose_runner(vllm_config: "VllmConfig") -> None:
    """Prepare the environment that the engine's processes will inherit.

    Raises:
        ValueError: the engine would run in this process, which was not prepared.

    """
    from vllm import envs
    from vllm.config import vllm as checks
    from vllm.triton_utils import HAS_TRITON

    if not needs_v2_runner(vllm_config):
        forget_runner()
        return
    method = vllm_config.speculative_config.method
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        raise ValueError(
            f"speculative method {method} needs vLLM's V2 model runner; "
            "remove VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if not HAS_TRITON and not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        raise ValueError(
            f"speculative method {method} on a CPU runs Triton kernels in Triton's interpreter, "
            f"which must be set up before torch and vLLM are imported: set {ARMED}=1 and "
            "TRITON_INTERPRET=1 in the environment of this process, or let vLLM start the engine "
            "in a process of its own (VLLM_ENABLE_V1_MULTIPROCESSING=1)"
        )
    missing = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    if missing or not envs.VLLM_ENABLE_V1_MULTIPROCESSING:  # said once, not by each process
        logger.warning(
            "DHISPARSE: %s runs on this machine in Triton's interpreter. It is exact and very "
            "slow, meant for trying out and tests.",
            method,
        )
    os.environ.update(missing)
    _set_here.update(missing)
    # This process checks the configuration for the engine's, which will have Triton.
    checks.HAS_TRITON = True
