"""``python -m vllm_dhisparse`` is the command ``vllm-dhisparse``."""

import sys

from vllm_dhisparse.cli import main

sys.exit(main())
