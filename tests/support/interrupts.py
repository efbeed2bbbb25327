"""Child processes that an interrupt can reach."""

import signal


def heed_interrupts() -> None:
    """As ``preexec_fn``: tests that run in the background inherit an ignored signal."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
