"""The README's Python, word for word, as a newcomer would run it after the demo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from decisionheads import DecisionModel, save_transcripts, tiny

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(block: str, names: dict) -> object:
    """Execute a block as a cell of a notebook: the value of its last line is what it shows."""
    *lines, last = block.strip().splitlines()
    exec(compile("\n".join(lines), "README.md", "exec"), names)
    return eval(compile(last.split("  #")[0], "README.md", "eval"), names)


def test_the_ten_lines_are_ten():
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 10


@pytest.mark.notebooks
def test_the_readmes_blocks(tmp_path, monkeypatch):
    """The first three, one after the other, on what the demo would have written."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "decisionheads-demo"
    folder.mkdir()
    model, space = DecisionModel.from_pretrained(tiny.path("llama")), tiny.labels()
    save_transcripts(tiny.generate(model, 400, 0), folder / "transcripts.jsonl")
    (folder / "labels.csv").write_text("label,region\n" + "".join(f"{label},{space.region(label)}\n" for label in space.labels))
    names: dict = {}
    figure = run(BLOCKS[0], names)
    found = names["found"]
    assert figure.layout.title.text.startswith("Region: L") and len(found.to_frame()) == 3 * 32
    assert "L3H6" in repr(found) and "L3H6" in found._repr_html_()
    scores = run(BLOCKS[1], names)
    assert "not calibrated" in scores.layout.title.text.replace("<br>", " ")
    explorer = run(BLOCKS[2], names)
    assert "Explorer" in repr(explorer)
