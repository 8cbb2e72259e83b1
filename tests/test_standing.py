"""Figures, words and comparisons of causal standing, from tables made by hand and from a small run."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch

from decisionheads import Margin
from decisionheads import standing_plots as plots
from decisionheads.cli import main
from decisionheads.comparison import compare
from decisionheads.standing import jaccard, of_some_texts
from decisionheads.words import blocking_lines, elicitation_lines, judged_lines, knock_in_line


def test_two_runs_side_by_side(demo, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(demo, other)
    summary = json.loads((other / "summary.json").read_text())
    summary["kinds"]["region"]["necessity"]["pooled"] = 0.123
    (other / "summary.json").write_text(json.dumps(summary))
    assert main(["compare", str(demo), str(other), "--figure", str(tmp_path / "both.html")]) == 0
    shown = capsys.readouterr().out
    assert "llama (1)" in shown and "0.12 [" in shown and "phase matrix" in shown and "region family" in shown
    sizes = [line.split()[-2:] for line in shown.splitlines() if line.startswith(("  set size", "  heads "))]
    assert len(sizes) >= 8 and all(x.isdigit() for pair in sizes for x in pair)  # counts are whole numbers
    page = (tmp_path / "both.html").read_text()
    assert "Global sets: " in page and 'src="http' not in page
    table = compare(demo, other).to_frame().set_index(["about", "figure"])
    changed = table[(table["one"] != table["other"]) & table["one"].notna()]
    assert [*changed.index] == [("region", "N, lost without")] and "Comparison(llama (1)" in repr(compare(demo, other))
    assert main(["compare", str(demo), str(other), "--json"]) == 0 and len(json.loads(capsys.readouterr().out)) == len(table)


@pytest.mark.parametrize("broken, said", [("missing", "is not a run folder"), ("reads.csv", "cannot be read"), ("figure", "is not a folder"), ("folder", "name a file for the figure")])
def test_what_cannot_be_compared_is_said_in_one_sentence(demo, tmp_path, capsys, broken, said):
    other, options = tmp_path / "other", []
    if broken != "missing":
        shutil.copytree(demo, other)
    if broken == "reads.csv":
        (other / "reads.csv").unlink()
    elif broken in ("figure", "folder"):
        options = ["--figure", str(tmp_path / "no" / "f.html" if broken == "figure" else tmp_path)]
    assert main(["compare", str(demo), str(other), *options]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_every_figure_of_a_run_has_a_finding_for_its_title(demo):
    table = {name: pd.read_csv(demo / f"{name}.csv") for name in ("texts", "phase_matrix", "reads", "read_blocking", "references")}
    made = {"texts": plots.texts_judged(table["texts"], "global", (0.1, None)), "phase": plots.phase_map(table["phase_matrix"]), "reads": plots.family_reads(table["reads"]),
            "depth": plots.family_depth(table["reads"]), "blocked": plots.blocked_reads(table["read_blocking"]), "references": plots.reference_choices(table["references"])}
    says = {"texts": "held-out texts", "phase": "of the margin lost", "reads": "read the chosen block", "depth": "relative depth", "blocked": "of its effect", "references": "recovery falls to"}
    for name, figure in made.items():
        assert says[name] in figure.layout.title.text.replace("<br>", " ") and len(figure.data), name
    scale = made["phase"].data[0]
    assert scale.zmin == -scale.zmax <= -1  # zero is the middle of the scale


def test_figures_state_what_the_tables_say():
    texts = pd.DataFrame({"transcript": list("abc"), "necessity": [0.9, 0.6, 0.9], "necessity_p": [0.01, 0.2, np.nan], "sufficiency": [0.9, 0.4, np.nan], "sufficiency_p": [0.01, 0.01, 0.01], "set": "label"})
    assert plots.texts_judged(texts, "label").layout.title.text.replace("<br>", " ") == "Label set: necessary in 1 of 3 and sufficient in 1 of 2 held-out texts"
    nothing = pd.DataFrame({"family": ["region"], "kind": ["region"], "span": ["own block"], "name": ["before softmax"], "role": ["arm"], "removed": [np.nan], "low": [np.nan], "high": [np.nan]})
    assert "No family" in plots.blocked_reads(nothing).layout.title.text


# -- words --------------------------------------------------------------------------------------------


def judged(**changes):
    share = {"k": 9, "n": 10, "share": 0.9, "low": 0.55, "high": 1.0}
    ratio = {"pooled": 0.8, "low": 0.7, "high": 0.9, "random": 0.01, "random_95": 0.05}
    return {"set": ["L0H1"], "transcripts": 10, "events": 12, "undefined": 0, "necessary": share, "sufficient": share, "necessity": ratio, "recovery": ratio,
            "kept": 0.3, "kept_without_random": 0.97, "chance": 0.25, "kappa": {"value": 0.07, "low": 0.0, "high": 0.1}} | changes


def test_a_judged_set_is_said_beside_its_controls():
    lines = judged_lines(judged())
    assert "necessary  9 of 10 texts [0.55, 1.00]; N 0.80 [0.70, 0.90], random 0.01" in lines[1] and "kept in 30% without it, 97% without a random set" in lines[3]
    helped = judged_lines(judged(set=["L0H0", "L1H1"]) | {"selection": {"selected": ["L1H1"]}})
    assert helped[1] == "    not selected by itself, but the set falls short without: L0H0" and len(helped) == len(lines) + 1
    assert judged_lines(judged(set=["L1H1"]) | {"selection": {"selected": ["L1H1", "L2H2"]}})[1].startswith("    necessary")
    undefined = judged_lines(judged(necessary={"k": 0, "n": 3, "share": None, "low": None, "high": None}, undefined=7))
    assert "undefined (7 of 10 texts)" in undefined[1] and judged_lines({"set": []}) == ["  held out: no set to test"]


def test_a_claim_that_fails_a_control_names_it():
    controls = {name: {"n": 9, "shift": 1.0, "p": p} for name, p in (("true", None), ("own label", 0.001), ("same token, other region", 0.4), ("another donor of the label", 0.5))}
    found = {"shift": 3.0, "flipped": 0.5, "identity": 0.0, "p": 0.4, "controls": controls}
    assert "does not beat same token, other region (p 0.4000)" in knock_in_line(found)
    controls["same token, other region"]["p"] = None
    assert "beats 1 controls, p 0.0010" in knock_in_line(found | {"p": 0.001}) and "no recipient has a donor" in knock_in_line(None)


def test_blocking_is_said_only_where_it_is_defined():
    way = {"n": 5, "removed": 0.9, "low": 0.8, "high": 1.0}
    found = {"region family, own block": {"defined": True, "heads": 2, "before softmax": way, "equal span": way | {"removed": 0.0}, "other heads": way | {"removed": None},
                                          "all but the span": way | {"removed": 0.1}, "other family's span": way | {"removed": None}}, "near-miss family, near-miss": {"defined": False}}
    assert blocking_lines(found) == ["    region family, own block blocked removes 90% [0.80, 1.00] of the effect of 2 heads (equal span 0%, all but the span 10%)"]


# -- parts --------------------------------------------------------------------------------------------


def test_half_of_nothing_is_no_agreement():
    assert jaccard(set(), set()) == 0.0 and jaccard({1, 2}, {2, 3}) == 1 / 3 and jaccard({1}, {1}) == 1.0


def test_some_texts_are_taken_whole_and_evenly():
    from decisionheads._cache import Prefix
    from decisionheads.head_sets import Case

    prefix = Prefix(torch.zeros(1, dtype=torch.long), None, torch.zeros(0, 3))
    cases = [Case(prefix, 5, np.zeros((1, 1, 1), np.float32), Margin(1, (2,)), (1, 2), f"t{i // 2}", "g", 3) for i in range(20)]
    kept = of_some_texts(cases, 4)
    assert [c.transcript for c in kept] == ["t0", "t0", "t3", "t3", "t6", "t6", "t9", "t9"] and of_some_texts(cases, 99) == cases and of_some_texts([], 3) == []


def test_one_bar_counts_every_stage_once(capsys):
    from decisionheads._progress import Progress

    bar = Progress({"one": 1, "two": 3}, True)
    assert list(bar([1, 2], "one")) == [1, 2] and bar.bar.n == 1.0
    assert list(bar([], "two")) == [] and bar.bar.n == 4.0 and list(bar([7], "two")) == [7] and bar.bar.n == 4.0
    assert list(bar([7], "other")) == [7] and bar.bar.n == 4.0
    bar.close()
    assert "100%" in capsys.readouterr().err


def test_a_run_in_which_nothing_was_selected_is_shown_and_reported(demo, tmp_path, capsys):
    """Tables may be empty: nothing to knock in, nothing to block."""
    from decisionheads.run_folder import read_table

    bare = tmp_path / "bare"
    shutil.copytree(demo, bare)
    summary = json.loads((bare / "summary.json").read_text())
    for found in summary["kinds"].values():
        found.update(set=[], set_size=0, knock_in=None, read_blocking={})
    (bare / "summary.json").write_text(json.dumps(summary))
    for name in ("knock_in", "read_blocking", "reads", "references"):
        (bare / f"{name}.csv").write_text("\n")
    assert len(read_table(bare / "reads.csv")) == 0
    assert main(["show", str(bare)]) == 0 and "held out: no set to test" in capsys.readouterr().out
    assert main(["report", str(bare)]) == 0 and main(["compare", str(demo), str(bare)]) == 0


def test_a_notebook_can_draw_what_each_verb_returns(demo):
    """Without the columns that a run adds."""
    texts, blocked, references = (pd.read_csv(demo / f"{name}.csv") for name in ("texts", "read_blocking", "references"))
    one = texts[texts["set"] == "global"].drop(columns="set")
    assert plots.texts_judged(one, "mine").layout.title.text.startswith("Mine set: necessary in")
    first = blocked[(blocked["kind"] == "region")].drop(columns="family")
    assert "Blocking" in plots.blocked_reads(first).layout.title.text
    assert "recovery falls" in plots.reference_choices(references[references["kind"] == references["kind"].iloc[0]].drop(columns="kind")).layout.title.text


def test_elicitation_says_why_nothing_could_be_asked():
    assert elicitation_lines(None) == [] and elicitation_lines({"mentions": 0, "undefined": "the cue names it"})[1] == "elicitation: the cue names it"
    assert elicitation_lines({"mentions": 0, "dropped": {"codes": {"not mentioned in the reasoning": 7}}})[1] == "elicitation: no code could be asked for (7 not mentioned in the reasoning)"
