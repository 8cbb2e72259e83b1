"""The notebooks of examples/: executed from the first cell to the last, each ending in a figure."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def read(path: Path):
    import json

    return json.loads(path.read_text())


def test_they_are_there():
    assert [p.stem for p in NOTEBOOKS] == ["distilling_a_mechanism", "families_and_blocking", "first_circuit", "your_own_transcripts"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_they_are_kept_without_output_and_say_what_they_do(path):
    cells = read(path)["cells"]
    assert cells[0]["cell_type"] == "markdown" and "".join(cells[0]["source"]).startswith("# ")
    for cell in cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.notebooks
@pytest.mark.filterwarnings("default")  # of the client; the kernel's own are its own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_they_run_and_end_in_a_figure(path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, 4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1].outputs[-1]["data"]["application/vnd.plotly.v1+json"]
    assert last["data"] and last["layout"]["title"]["text"]
