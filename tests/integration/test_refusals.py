"""One clear error for each thing DHISPARSE cannot do, before anything is built."""

import pytest
from transformers import Qwen3Config
from vllm import EngineArgs
from vllm.config import KVTransferConfig

from vllm_dhisparse.integration import compat, plugin
from vllm_dhisparse.integration.geometry import geometry
from vllm_dhisparse.integration.refusals import refuse_unsupported


def refused(model, **options):
    settings = {"attention_backend": "DHISPARSE", "max_model_len": 1024}
    with pytest.raises(ValueError, match=r"(?s)DHISPARSE|dhisparse") as error:
        EngineArgs(model=str(model), **(settings | options)).create_engine_config()
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 32}, "--block-size 32: a latent block holds 64 rows; remove the option"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 is not one of auto, bfloat16"),
        (
            {"kv_cache_dtype": "bfloat16", "dtype": "float32"},
            "--kv-cache-dtype bfloat16: rows keep the model's dtype, here float32",
        ),
        ({"enable_lora": True}, "LoRA on mixture-of-experts layers needs Triton kernels"),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size puts a KV connector of vLLM's in"),
        (
            {"prefill_context_parallel_size": 2},
            "--prefill-context-parallel-size 2 is not supported; set it to 1",
        ),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2 is not supported"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "--decode-context-parallel-size 2 is not supported; set it to 1",
        ),
        (
            {
                "kv_transfer_config": KVTransferConfig(
                    kv_connector="ExampleConnector", kv_role="kv_both"
                )
            },
            "KV connector ExampleConnector cannot run beside DHiSparseConnector",
        ),
        (
            {
                "kv_transfer_config": KVTransferConfig(
                    kv_connector="DHiSparseConnector", kv_role="kv_both"
                ),
                "attention_backend": None,
            },
            "KV connector DHiSparseConnector works with --attention-backend DHISPARSE only",
        ),
        (
            {"disable_hybrid_kv_cache_manager": True},
            "remove --disable-hybrid-kv-cache-manager",
        ),
        (
            {"additional_config": {"dhisparse": {"host_pol_gib": 4}}},
            "unknown setting dhisparse.host_pol_gib",
        ),
        (
            {"additional_config": {"dhisparse": {"residency": "everything"}}},
            "dhisparse.residency must be one of",
        ),
        (
            {"additional_config": {"dhisparse": {"host_pool_gib": 0.0005}}},
            "max_model_len=1024 needs 8: raise dhisparse.host_pool_gib to at least 0.0",
        ),
        (
            {
                "kv_transfer_config": KVTransferConfig(
                    kv_connector="DHiSparseConnector",
                    kv_role="kv_both",
                    kv_connector_extra_config={"dhisparse_host_pages": "many"},
                )
            },
            "dhisparse_host_pages = 'many' in --kv-transfer-config must be a whole number above 0",
        ),
        ({"runner": "pooling"}, "--runner pooling does not decode"),
        ({"hf_overrides": {"index_topk": 0}}, "the model has no index_topk, or 0"),
        (
            {"additional_config": {"dhisparse": {"staging_rows": 63}}},
            "dhisparse.staging_rows = 63 cannot hold the 64 rows that one query selects",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_configurations(tiny_dsa, options, message):
    assert message in refused(tiny_dsa(layers=2, leaders=1), **options)


def test_sleep_mode(tiny_dsa):
    # vLLM refuses it itself on this platform, so the option never gets this far.
    arguments = EngineArgs(
        model=str(tiny_dsa(layers=2, leaders=1)), attention_backend="DHISPARSE", max_model_len=1024
    )
    config = arguments.create_engine_config()
    config.model_config.enable_sleep_mode = True
    with pytest.raises(ValueError, match="sleep mode loses the device's KV cache; remove"):
        refuse_unsupported(config)


def test_a_drafter_with_a_cache(tiny_dsa, tmp_path):
    save_qwen3(tmp_path)
    drafter = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    message = refused(tiny_dsa(layers=2, leaders=1), speculative_config=drafter)
    assert "draft_model keeps draft KV that this package does not place" in message


def test_all_reasons_are_listed_at_once(tiny_dsa):
    error = refused(tiny_dsa(layers=2, leaders=1), block_size=32, kv_cache_dtype="fp8")
    assert "--block-size" in error
    assert "--kv-cache-dtype" in error


def save_qwen3(folder):
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    ).save_pretrained(folder)


def test_a_model_without_sparse_attention(tmp_path):
    save_qwen3(tmp_path)
    message = refused(tmp_path, skip_tokenizer_init=True)
    assert "Qwen3ForCausalLM is not one of GlmMoeDsaForCausalLM, DeepseekV32" in message
    assert "choose another --attention-backend" in message


def test_an_unsupported_vllm_version(tiny_dsa, monkeypatch):
    monkeypatch.setattr(compat.vllm, "__version__", "0.31.2")
    message = refused(tiny_dsa(layers=2, leaders=1))
    assert "supports vLLM" in message
    assert "found 0.31.2" in message
    monkeypatch.setenv(compat.ALLOW_UNTESTED, "1")
    EngineArgs(
        model=str(tiny_dsa(layers=2, leaders=1)), attention_backend="DHISPARSE"
    ).create_engine_config()


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.4rc1"])
def test_supported_versions(version):
    assert compat.unsupported_reason(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "0.33.0rc1", "dev"])
def test_unsupported_versions(version):
    assert version in compat.unsupported_reason(version)


def test_other_models_and_backends_keep_stock_behaviour(tiny_dsa, tmp_path):
    config = EngineArgs(
        model=str(tiny_dsa(layers=2, leaders=1)), max_model_len=1024
    ).create_engine_config()
    assert config.kv_transfer_config is None
    assert config.cache_config.block_size == 16  # what the CPU platform wants for MLA
    assert "-rotary_embedding" not in config.compilation_config.custom_ops


def test_what_the_user_chose_stays(tiny_dsa):
    chosen = {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}
    model = str(tiny_dsa(layers=2, leaders=1))
    for caching in (True, False):
        config = EngineArgs(
            model=model,
            max_model_len=1024,
            attention_backend="DHISPARSE",
            enable_prefix_caching=caching,
            **chosen,
        ).create_engine_config()
        assert config.scheduler_config.max_num_batched_tokens == 256
        assert config.scheduler_config.enable_chunked_prefill
        assert config.cache_config.enable_prefix_caching == caching
        assert config.cache_config.block_size == 64


def test_sizes_beyond_what_requests_have_are_as_good_as_all_they_have(tiny_dsa):
    huge = {"staging_rows": 10**15, "base_rows_per_request": 10**15}
    config = EngineArgs(
        model=str(tiny_dsa(layers=2, leaders=1)),
        attention_backend="DHISPARSE",
        max_model_len=1000,
        max_num_seqs=4,
        max_num_batched_tokens=1000,
        additional_config={"dhisparse": huge},
    ).create_engine_config()
    sizes = geometry(config)
    assert (sizes.staging_rows, sizes.base_units) == (4 * 1000, 16)


def test_register_never_raises(monkeypatch, caplog):
    def fail():
        raise RuntimeError("vLLM has changed")

    monkeypatch.setattr(plugin, "_register", fail)
    plugin.register()
    assert "could not be set up: vLLM has changed" in caplog.text


def test_register_on_an_unsupported_version_warns_once_and_clearly(monkeypatch, caplog):
    monkeypatch.setattr(compat.vllm, "__version__", "0.99.0")
    plugin.register()
    assert "supports vLLM" in caplog.text
