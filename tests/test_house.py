"""The house itself: floors, start-up, and what may be imported where."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).parent.parent / "decisionheads"
FLOORS = [
    ["errors", "views", "_reading", "_examples", "_options", "_progress", "_processes", "words"],
    ["_keeping", "_sources"],
    ["heads", "label_trie", "decisions", "outputs", "provenance"],
    ["labels"],
    ["transcripts", "calibration"],
    ["corpora"],
    ["prompts"],
    ["events", "margin", "task_score"],
    ["interventions", "cues"],
    ["_cache", "_unembed"],
    ["_rows"],
    ["_batch_rows", "_late_entry", "_ways"],
    ["_hooked", "_classic"],
    ["_self_test", "_together", "prefixes"],
    ["_packs"],
    ["model"],
    ["branches"],
    ["ablation"],
    ["attribution", "knock_in", "null_tokens", "head_sets", "reads"],
    ["necessity", "spans"],
    ["phases", "read_blocking", "elicitation"],
    ["survey", "writing"],
    ["scoring"],
    ["elicitation_heads"],
    ["standing"],
    ["discovery"],
    ["tiny"],
    ["run_folder"],
    ["generation"],
    ["comparison", "run_check"],
    ["looks"],
    ["plots"],
    ["standing_plots"],
    ["explorer"],
    ["report_page"],
    ["report"],
    ["workflow"],
    ["distillation", "evidence"],
    ["flip"],
    ["cli"],
    ["__main__"],
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def imports(path: Path) -> list[tuple[str, bool]]:
    """`(room of this house, at module level?)` for every import that runs; within a package, those that leave it."""
    tree = ast.parse(path.read_text())
    typing_only = {id(n) for node in ast.walk(tree) if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING" for n in ast.walk(node)}
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == len(path.relative_to(HOUSE).parts) and id(node) not in typing_only:
            for name in [node.module.split(".")[0]] if node.module else [a.name for a in node.names]:
                found.append((name, id(node) in top))
    return found


def modules():
    return sorted(p for p in HOUSE.rglob("*.py") if p != HOUSE / "__init__.py")


def room(path: Path) -> str:
    """The module, or the package that it lies in."""
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


def test_every_module_has_a_floor():
    assert {room(p) for p in modules()} == set(FLOOR)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(HOUSE)))
def test_a_module_imports_only_from_floors_below(path):
    for name, at_top in imports(path):
        verb = path.stem == "model" and not at_top  # its methods are one line over verbs above it
        assert verb or name == "__version__" or FLOOR[name] < FLOOR[room(path)], f"{path.stem} imports {name}"


def test_only_the_model_imports_transformer_lens():
    for path in HOUSE.rglob("*.py"):
        named = "import transformer_lens" in path.read_text() or "from transformer_lens" in path.read_text()
        assert not named or path.name == "model.py", path


@pytest.mark.parametrize("code", ["import decisionheads", "from decisionheads.cli import main; main(['--help'])"])
def test_start_up_loads_nothing_heavy(code):
    heavy = ["torch", "transformers", "transformer_lens", "plotly", "pandas", "datasets"]
    done = subprocess.run([sys.executable, "-c", f"{code}\nimport sys\nprint([m for m in {heavy} if m in sys.modules])"], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


def test_every_public_name_is_there():
    import decisionheads

    assert len(decisionheads.__all__) <= 28
    for name in decisionheads.__all__:
        value = getattr(decisionheads, name)
        assert value.__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        decisionheads.nothing  # noqa: B018


def test_modules_stay_readable():
    for path in HOUSE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 350, path


def test_planted_faults_fit_the_code():
    """What `campaigns/planted_faults.py` replaces stands in the code, once."""
    from .campaigns.faults import FAULTS

    assert len(FAULTS) > 50 and [f.name for f in FAULTS if (HOUSE / f.file).read_text().count(f.right) != 1] == []
