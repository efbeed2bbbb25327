"""The notebooks as they are committed: executed, without a fault, labelled, and still true.

They are executed again; those of the simulator must print the same. The quickstart's questions
are made of text that comes with Python, so other versions of it print other figures.
"""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
LABELS = ("simulated", "measured on cpu", "published")


def read(name):
    return nbformat.read(EXAMPLES / name, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_all_are_here():
    assert [file.name[:2] for file in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("name", [file.name for file in NOTEBOOKS])
def test_it_was_executed_in_order_without_a_fault(name):
    notebook = read(name)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [output.output_type for cell in cells for output in cell.outputs]
    assert "error" not in kinds
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)


@pytest.mark.parametrize("name", [file.name for file in NOTEBOOKS])
def test_it_asserts_what_it_says_and_labels_its_figures(name):
    notebook = read(name)
    source = "\n".join(cell.source for cell in code_cells(notebook))
    asserts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    assert len(asserts) >= 3
    text = notebook.cells[0].source.lower()
    assert any(label in text for label in LABELS)
    for figure in source.split("plt.show()")[:-1]:
        assert re.search(r"LABEL|simulated|measured on CPU|published", figure)


@pytest.mark.parametrize("name", [file.name for file in NOTEBOOKS])
def test_it_names_no_place_of_this_machine(name):
    text = (EXAMPLES / name).read_text()
    assert not re.search(r"/(work|home|root|tmp|usr)/", text)


@pytest.mark.parametrize("name", [file.name for file in NOTEBOOKS])
def test_it_is_still_true(name):
    notebook = read(name)
    before = printed(notebook)
    resources = {"metadata": {"path": str(EXAMPLES)}}
    NotebookClient(notebook, timeout=400, resources=resources).execute()
    if name != NOTEBOOKS[0].name:
        assert printed(notebook) == before, "its figures changed: execute it again and look"


def printed(notebook):
    """All text on standard output."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")
