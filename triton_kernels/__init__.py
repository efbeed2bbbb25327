"""Triton kernels of vllm-dhisparse, installed as ``vllm_dhisparse.kernels``.

Arguments that differ from step to step are not specialised: a new batch size must not
compile anything while requests wait.
"""

if __name__ == "triton_kernels":  # vLLM takes any module of that name for triton-lang's package
    raise ImportError("this folder is installed as vllm_dhisparse.kernels")
