"""What a user chooses at the top of a dashboard, as vLLM's own dashboards offer it."""

from typing import Any

from queries import VARIABLES

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
ANY_REQUESTS = "vllm:num_requests_running"


def link() -> dict[str, Any]:
    """Return the menu of all dashboards tagged vllm, vLLM's own among them."""
    return {
        "type": "dashboards",
        "title": "vLLM dashboards",
        "tags": ["vllm"],
        "asDropdown": True,
        "icon": "external link",
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "tooltip": "",
        "url": "",
    }


def variables() -> list[dict[str, Any]]:
    """Return the data source, the selections by label, and free filters."""
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
    }
    adhoc = {
        "name": "filters",
        "label": "Filters",
        "type": "adhoc",
        "datasource": DATASOURCE,
        "filters": [],
        "hide": 0,
    }
    return [source, *(_variable(name) for name in VARIABLES), adhoc]


def _variable(name: str) -> dict[str, Any]:
    """Return a query variable restricted by those before it."""
    before = VARIABLES[: VARIABLES.index(name)]
    chosen = ", ".join(f'{each}=~"${each}"' for each in before)
    query = f"label_values({ANY_REQUESTS}{{{chosen}}}, {name})"
    return {
        "name": name,
        "label": name.replace("_", " ").capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "allValue": ".*",
        "hide": 0,
        "includeAll": True,
        "multi": True,
        "options": [],
        "refresh": 2,
        "regex": "",
        "sort": 1,
    }
