"""Adaptive DHiSparse for vLLM: KV history in host memory, one row cache on the device."""

__version__ = "0.1.0"
