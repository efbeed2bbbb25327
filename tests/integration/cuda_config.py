"""What the CUDA path reads of vLLM's configuration."""

from types import SimpleNamespace

import torch
from fake_flash_mla import LATENT, ROW

from vllm_dhisparse.integration.names import HOST_PAGES

MAX_TOKENS = 512
MAX_REQUESTS = 16


def engine_config(setup, cache_dtype, residency, num_layers, whole_graphs=False):
    """What the CUDA path reads of a VllmConfig, for a model of the real row sizes."""
    hf_config = SimpleNamespace(
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROW - LATENT,
        index_topk=setup.top_k,
        index_head_dim=128,
        num_hidden_layers=num_layers,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=hf_config, dtype=torch.bfloat16, max_model_len=100_000
        ),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        device_config=SimpleNamespace(device_type="cuda"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_REQUESTS
        ),
        compilation_config=SimpleNamespace(
            max_cudagraph_capture_size=MAX_REQUESTS * 4,
            static_forward_context={},
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: whole_graphs),
        ),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=setup.num_drafts,
            method="ngram",
            enable_adaptive_verification=True,  # the link is measured
        ),
        kv_transfer_config=SimpleNamespace(
            kv_connector="DHiSparseConnector",
            kv_connector_extra_config={HOST_PAGES: setup.num_pages},
            is_kv_transfer_instance=True,
        ),
        additional_config={
            "dhisparse": {
                "residency": residency,
                "staging_rows": setup.staging_rows,
                "huge_pages": False,
            }
        },
    )
