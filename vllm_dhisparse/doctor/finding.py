"""What one check of the environment found."""

from typing import Literal, NamedTuple, TypeAlias

Status: TypeAlias = Literal["ok", "warning", "error", "skipped"]


class Finding(NamedTuple):
    """``check``: its name. ``detail``: what was seen. ``fix``: what to do, empty when ok.

    An ``error`` keeps DHISPARSE from working; a ``warning`` may hurt later; ``skipped``
    says why the check could not be made.
    """

    check: str
    status: Status
    detail: str
    fix: str = ""


def ok(check: str, detail: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check, "ok", detail)


def error(check: str, detail: str, fix: str) -> Finding:
    """DHISPARSE cannot work."""
    return Finding(check, "error", detail, fix)


def warning(check: str, detail: str, fix: str) -> Finding:
    """DHISPARSE works, but something may hurt later."""
    return Finding(check, "warning", detail, fix)
