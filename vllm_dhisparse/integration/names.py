"""Names and sizes that several hooks must agree on. Imports nothing of vLLM."""

BACKEND = "DHISPARSE"
CONNECTOR = "DHiSparseConnector"
ARCHITECTURES = ("GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM")
HOST_PAGES = "dhisparse_host_pages"
"""Key in the connector's extra configuration that carries the number to all processes."""
KV_CACHE_DTYPES = ("auto", "bfloat16")
FP8_ROWS = "fp8_ds_mla"  # vLLM's quantised latent rows, CUDA only
DRAFTS_WITHOUT_CACHE = ("ngram", "suffix", "custom_class")
DRAFTS_WITH_CACHE = ("dflash", "dspark")
