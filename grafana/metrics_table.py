"""The README's table of metrics, from the code that defines them."""

from vllm_dhisparse.metrics import METRICS, MODE_INFO, Metric

BEGIN = "<!-- metrics: written by grafana/generate.py -->\n"
END = "<!-- end of metrics -->\n"


def table() -> str:
    """Return one line for each family, names as on /metrics but without the prefix."""
    lines = ["| metric | labels | meaning |", "|---|---|---|"]
    lines += [_line(metric) for metric in (*METRICS, MODE_INFO)]
    return "\n".join(lines) + "\n"


def replaced(text: str) -> str:
    """Return a document with the table between its two marks up to date.

    Raises:
        ValueError: a mark is missing.

    """
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (mark and end):
        raise ValueError(f"no table between {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + table() + END + after


def _line(metric: Metric) -> str:
    name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
    labels = "; ".join(
        f"`{label}` = {', '.join(values)}" if values else f"`{label}`"
        for label, values in metric.labels
    )
    return f"| `{name}` | {labels} | {metric.documentation.rstrip('.')} |"
