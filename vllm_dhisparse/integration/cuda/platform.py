"""vLLM's CUDA platform with what DSA models under DHISPARSE need; loaded on CUDA only."""

from typing import Any

from vllm.platforms import cuda

from vllm_dhisparse.integration.cuda.hooks import CudaHooks

_StockPlatform: Any = cuda.CudaPlatform  # by NVML or without it, as vLLM found it


class DHiSparseCudaPlatform(CudaHooks, _StockPlatform):
    """vLLM's CUDA platform; DHISPARSE needs its connector beside the backend."""
