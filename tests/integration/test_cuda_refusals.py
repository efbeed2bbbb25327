"""What DHISPARSE refuses on CUDA at start-up, and how it places a drafter's KV there."""

import re
from types import SimpleNamespace

import pytest
import torch
from vllm.platforms.interface import DeviceCapability

from vllm_dhisparse.integration.cuda.backend import CudaBackend
from vllm_dhisparse.integration.cuda.hooks import _name_fp8_rows
from vllm_dhisparse.integration.cuda.refusals import cuda_reasons
from vllm_dhisparse.integration.geometry import has_draft_rings
from vllm_dhisparse.integration.refusals import _speculation
from vllm_dhisparse.integration.speculators import placed_speculator


def engine(**changes):
    """A configuration that can work."""
    attention = SimpleNamespace(
        hisparse_config=None, resolve_indexer_kv_dtype=lambda default: default
    )
    settings = {
        "attention_config": attention,
        "model_config": SimpleNamespace(dtype=torch.bfloat16),
        "use_v2_model_runner": True,
        "parallel_config": SimpleNamespace(use_ubatching=False),
        "speculative_config": None,
        "additional_config": {},
        "device_config": SimpleNamespace(device_type="cuda"),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
    }
    return SimpleNamespace(**settings | changes)


def drafter(method="dflash", kv_cache_dtype=None):
    draft = SimpleNamespace(use_mla=False, model="drafter", hf_config=SimpleNamespace())
    return SimpleNamespace(method=method, kv_cache_dtype=kv_cache_dtype, draft_model_config=draft)


def ours(**settings):
    return {"dhisparse": settings}


REFUSED = {
    "dtype": (
        {"model_config": SimpleNamespace(dtype=torch.float16)},
        "--dtype float16: .* compute in bfloat16",
    ),
    "runner": ({"use_v2_model_runner": False}, "model runner V1 does not apply a step's commands"),
    "dbo": ({"parallel_config": SimpleNamespace(use_ubatching=True)}, "remove --enable-dbo"),
    "hisparse": (
        {
            "attention_config": SimpleNamespace(
                hisparse_config=object(), resolve_indexer_kv_dtype=lambda default: default
            )
        },
        "HiSparse moves the same rows",
    ),
    "indexer": (
        {
            "attention_config": SimpleNamespace(
                hisparse_config=None, resolve_indexer_kv_dtype=lambda default: "bfloat16"
            )
        },
        "indexer keys of another dtype than fp8",
    ),
    "traces": ({"additional_config": ours(record_traces="/folder")}, "dhisparse.record_traces"),
    "ring": (
        {"speculative_config": drafter(), "additional_config": ours(draft_kv="ring")},
        "dhisparse.draft_kv ring: .* set it to full",
    ),
    "window": (
        {"speculative_config": drafter(), "additional_config": ours(draft_window_tokens=64)},
        "dhisparse.draft_window_tokens is for draft rings",
    ),
    "draft dtype": (
        {"speculative_config": drafter("dspark", "fp8")},
        "draft KV of dtype fp8 .* remove kv_cache_dtype",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_is_refused_with_what_to_do(name):
    changes, reason = REFUSED[name]
    (found,) = cuda_reasons(engine(**changes))
    assert re.search(reason, found)


@pytest.mark.parametrize("method", ["ngram", "dflash", "dspark"])
def test_drafts_are_accepted(method):
    config = engine(speculative_config=drafter(method))
    assert cuda_reasons(config) == []
    assert _speculation(config) == []


def test_mtp_is_refused():
    (reason,) = _speculation(engine(speculative_config=drafter("mtp")))
    assert "speculative method mtp keeps draft KV that this package does not place" in reason


@pytest.mark.parametrize(("device", "rings"), [("cpu", True), ("cuda", False)])
def test_rings_are_the_default_where_they_are_wired(device, rings):
    where = SimpleNamespace(device_type=device)
    assert has_draft_rings(engine(device_config=where)) == rings
    for draft_kv in ("ring", "full"):
        config = engine(device_config=where, additional_config=ours(draft_kv=draft_kv))
        assert has_draft_rings(config) == (draft_kv == "ring")


@pytest.mark.parametrize(
    ("cache_dtype", "draft_dtype", "expected"),
    [
        ("fp8", None, ("fp8_ds_mla", "auto")),
        ("fp8_ds_mla", None, ("fp8_ds_mla", "auto")),
        ("fp8_e4m3", "bfloat16", ("fp8_ds_mla", "bfloat16")),
        ("auto", None, ("auto", None)),
    ],
)
def test_a_drafter_does_not_inherit_the_name_of_latent_rows(cache_dtype, draft_dtype, expected):
    config = engine(
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        speculative_config=drafter(kv_cache_dtype=draft_dtype),
    )
    _name_fp8_rows(config)
    assert (config.cache_config.cache_dtype, config.speculative_config.kv_cache_dtype) == expected


class Backend:
    @staticmethod
    def get_builder_cls():
        return object


class Stock:
    """In the place of a speculator of vLLM 0.33, whose hooks the rings' do not fit."""

    num_query_per_req = 8

    def __init__(self, layers):
        context = SimpleNamespace(static_forward_context=layers)
        self.vllm_config = SimpleNamespace(compilation_config=context)

    def load_draft_model(self, target_model, target_attn_layer_names):
        return "drafter"

    def prepare_context_anchor(self, num_reqs, query_start_loc, num_rejected):
        return num_reqs

    def _precompute_context_kv(self, start, end):
        return start, end


def test_without_rings_only_the_specs_of_draft_layers_change():
    layers = {name: SimpleNamespace(attn_backend=Backend) for name in ("target", "draft")}
    sizes = SimpleNamespace(plan=object())
    speculator = placed_speculator(Stock(layers), sizes, has_rings=False)
    assert speculator.load_draft_model(None, {"target"}) == "drafter"
    assert layers["target"].attn_backend is Backend
    assert issubclass(layers["draft"].attn_backend, Backend)
    for hook in ("prepare_context_anchor", "_precompute_context_kv"):
        assert getattr(type(speculator), hook) is getattr(Stock, hook)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"kv_cache_dtype": "bfloat16"}, None),
        ({"kv_cache_dtype": "fp8_ds_mla", "device_capability": DeviceCapability(10, 0)}, None),
        ({"use_adaptive_verification": True}, None),
        ({"use_kv_connector": True}, None),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"dtype": torch.float16}, "dtype not supported"),
        ({"head_size": 512}, "head_size not supported"),
        ({"device_capability": DeviceCapability(8, 0)}, "compute capability not supported"),
        ({"use_sparse": False}, "non-sparse not supported"),
        ({"use_mla": False}, "non-MLA not supported"),
        ({"has_sliding_window": True}, "sliding window not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"block_size": 32}, "block_size not supported"),
    ],
    ids=str,
)
def test_what_the_backend_accepts(changes, reason):
    stock = dict.fromkeys(
        ["has_sink", "use_mm_prefix", "use_per_head_quant_scales", "has_sliding_window"], False
    )
    settings = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": None,
        "use_mla": True,
        "use_sparse": True,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
        **stock,
    }
    found = CudaBackend.validate_configuration(**(settings | changes))
    assert found == ([] if reason is None else [reason])
