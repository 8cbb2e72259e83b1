"""The evidence flip: edits as pure functions, plans that cannot be changed, its statistics in simulation, and planted flips in the clinic."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from decisionheads import DecisionModel, InputError, LabelSpace, save_transcripts, tiny
from decisionheads.cli import main
from decisionheads.corpora.notes import Note
from decisionheads.evidence.alignment import holm
from decisionheads.flip.edits import ROUTES, Change, Wording, change, controls, edit, evidence_of, merged
from decisionheads.flip.outcomes import cases_of, conclude_flips, prompts_of, sources_of
from decisionheads.flip.plan import Planning, load_plan, pilot_variance, plan_digest
from decisionheads.flip.statistics import NOTHING, blinded_variance, detectable_effect, difference, verdict
from decisionheads.generation import Generating
from decisionheads.prompts import Layout
from decisionheads.transcripts import Span

from .conftest import shapes_unchecked
from .marked import codiesp_shaped, flippable, mdace_shaped

# -- edits ------------------------------------------------------------------------------------------

TEXTS = st.text(alphabet="ab \r\né-.", min_size=1, max_size=60)


@st.composite
def edits(draw):
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=8)))
    changes = [Change(a, b, draw(st.text(alphabet="xyz", max_size=5))) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    places = draw(st.lists(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)), st.sampled_from(["evidence", "note", "other"])), max_size=5))
    return text, changes, [Span(name, min(a, b), max(a, b), "c") for a, b, name in places if a != b]


@given(edits())
def test_outside_of_an_edit_nothing_changes(case):
    text, changes, spans = case
    found = edit(text, changes, spans)
    kept, at, pieces = [], 0, found.text
    for c in sorted(changes):  # take the new text apart again
        assert pieces.startswith(text[at:c.start] + c.text)
        kept.append(text[at:c.start])
        pieces, at = pieces[len(text[at:c.start]) + len(c.text):], c.end
    assert pieces == text[at:] and len(found.text) == len(text) + sum(len(c.text) - (c.end - c.start) for c in changes)
    assert len(found.spans) + len(found.lost) == len(spans)
    touched = lambda s: any(c.start < s.end and c.end > s.start for c in changes)  # noqa: E731
    moved = iter(found.spans)
    for span in spans:
        if span in found.lost and touched(span):
            continue
        new = next(moved)
        assert (new.name, new.of) == (span.name, span.of)
        assert touched(span) and span.name == "note" or found.text[new.start:new.end] == text[span.start:span.end]


def test_spans_move_grow_or_are_lost():
    text = "a fever, a cough, b"
    spans = [Span("note", 0, 19), Span("evidence", 2, 7, "x"), Span("evidence", 11, 16, "y"), Span("section", 9, 19), Span("other", 5, 12)]
    found = edit(text, [Change(2, 7, "")], spans)
    assert found.text == "a , a cough, b" and found.lost == (spans[1], spans[4])
    assert found.spans == (Span("note", 0, 14), Span("evidence", 6, 11, "y"), Span("section", 4, 14)) and found.text[6:11] == "cough"
    put = edit(text, [Change(2, 2, "no ")], spans)  # before a span, not in it
    assert put.text == "a no fever, a cough, b" and put.text[5:10] == "fever" and Span("evidence", 5, 10, "x") in put.spans
    with pytest.raises(ValueError, match="overlap"):
        edit(text, [Change(2, 7, ""), Change(6, 8, "")])
    with pytest.raises(ValueError, match="outside"):
        edit(text, [Change(18, 20, "")])


def test_routes_by_hand():
    text, w = "- had fever\r\nmild, well", Wording(affirmed="had ")
    made = {route: edit(text, [change(route, text, (6, 17), w, "rash late")]).text for route in ROUTES}
    assert made == {"delete": "- had , well", "mask": "- had -----\r\n----, well", "negate": "- denies fever\r\nmild, well", "swap": "- had rash late, well"}
    assert edit(text, [change("negate", text, (6, 17), Wording("x", "no "))]).text == "- had no fever\r\nmild, well"
    with shapes_unchecked(), pytest.raises(ValueError, match="unknown route"):
        change("burn", text, (0, 1), w)
    for odd in (lambda: Wording(filler="--"), lambda: Wording(filler=" "), lambda: Wording(negation=" ")):
        with pytest.raises(InputError):
            odd()


@st.composite
def marked(draw):
    text = draw(st.text(alphabet="ab ,\n", min_size=20, max_size=80))
    place = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 12)).map(lambda x: (x[0], min(len(text), x[0] + x[1])))
    return text, draw(st.lists(place, min_size=1, max_size=3)), {c: draw(st.lists(place, min_size=1, max_size=2)) for c in draw(st.sets(st.sampled_from("xyz")))}


@given(marked(), st.sampled_from(["", "a "]))
@settings(max_examples=300)
def test_controls_are_as_long_and_touch_nothing_of_the_own(case, affirmed):
    text, own, others = case
    w = Wording(affirmed=affirmed)
    windows = controls(text, own, others, (0, len(text)), w)
    own = merged(own)
    if windows is None:
        return
    assert [b - a for a, b in windows] == [b - a for a, b in own]
    starts = {a for places in others.values() for a, _ in places}
    evidence = np.zeros(len(text), bool)
    for a, b in (p for places in others.values() for p in places):
        evidence[a:b] = True
    for i, (a, b) in enumerate(windows):
        assert a in starts and a >= 0 and b <= len(text) and evidence[a:b].mean() >= 0.5
        assert all(b <= x or y <= a for x, y in [*own, *windows[:i]])
        assert text[:a].endswith(w.affirmed) == text[:own[i][0]].endswith(w.affirmed)
    for route in ROUTES:  # the same edit: as much goes, as much comes
        lengths = [len(edit(text, [change(route, text, p, w, "swapped in") for p in side]).text) for side in (own, windows)] if route != "negate" or not affirmed else [0, 0]
        assert lengths[0] == lengths[1], route


def test_controls_are_near_and_cut_no_word_where_that_can_be():
    text = "fever mild; cough bad; rash; and a sore throat; ulcer"
    where = lambda word: (text.index(word), text.index(word) + len(word))  # noqa: E731
    others = {"b": [where("rash")], "c": [where("sore throat")], "d": [where("ulcer")]}
    assert controls(text, [where("cough bad")], others, (0, len(text))) == [(35, 44)]  # "sore thro": rash goes on into too much else, ulcer ends the note
    assert controls(text, [where("mild")], others | {"e": [where("bad")]}, (0, len(text))) == [where("bad;")]  # nearest, and no word is cut
    assert controls(text, [where("fever")], {"e": [where("cough")]}, (0, len(text))) == [where("cough")]
    assert controls(text, [where("fever")], {}, (0, len(text))) is None and controls(text, [where("fever")], {"b": [where("rash")]}, (0, 26)) is None
    assert controls(text, [where("fever mild")], {"b": [where("mild")]}, (0, len(text))) is None  # shared evidence is no control


def test_evidence_of_a_code_is_merged():
    assert evidence_of([Span("evidence", 5, 9, "x"), Span("evidence", 0, 6, "x"), Span("evidence", 2, 3, ""), Span("note", 0, 9)]) == {"x": [(0, 9)]}


# -- cases ------------------------------------------------------------------------------------------

SPACE = LabelSpace(["E11.9", "I50.1", "I50.9", "J44.9"])


def noted(name, words, **more):
    text = ", ".join(words.values())
    return Note(**{"id": name, "note": text, "labels": tuple(words), "spans": tuple(Span("evidence", text.index(w), text.index(w) + len(w), c) for c, w in words.items()), **more})


NOTES = [noted("a", {"I50.9": "weak heart", "E11.9": "much sugar"}), noted("b", {"I50.1": "left heart", "J44.9": "bad lungs!"}), noted("c", {"I50.9": "tired heart"})]


def test_cases_have_a_control_and_others_are_counted():
    cases, why = cases_of(sources_of(NOTES, []), SPACE, ROUTES)
    assert {(c.source.id, c.code, c.route) for c in cases} == {*(("a", "I50.9", r) for r in ROUTES), *(("b", "I50.1", r) for r in ROUTES),
                                                               *(("a", "E11.9", r) for r in ROUTES[:3]), *(("b", "J44.9", r) for r in ROUTES[:3])}
    assert why == {"no near-miss whose evidence is known": 2, "no control window of equal length": 4}
    swap = next(c for c in cases if (c.source.id, c.code, c.route) == ("a", "I50.9", "swap"))
    assert swap.changes[0] == [Change(0, 10, "left heart")] and swap.changes[1] == [Change(12, 22, "left heart")]  # the same words, at either place
    assert cases_of(sources_of(NOTES, []), SPACE, ["mask"], shortest=11)[1]["evidence of fewer than 11 characters"] == 4
    few, _ = cases_of(sources_of(NOTES, []), SPACE, ["mask"], n=1)
    assert len({c.source.id for c in few}) == 1 and few == cases_of(sources_of(NOTES[::-1], []), SPACE, ["mask"], n=1)[0]  # by seed, not by place in the file
    assert "weak" not in repr(cases) + repr(cases[0].source)


def test_a_text_of_which_an_edit_would_be_cut_is_no_case():
    from .bpe import bpe

    asked = Generating(Layout("compact", "Give codes."), longest=8)
    sources = sources_of(NOTES[:2], [])
    cases, _ = cases_of(sources, SPACE, ["mask", "negate"])
    whole = prompts_of(sources, cases, SPACE, bpe(), asked, None)
    assert len(whole) == 2 + 2 * len(cases) and "denies weak heart" in whole["a/I50.9/negate/own"].text and "weak heart, denies much sugar" in whole["a/I50.9/negate/control"].text
    room = 8 + whole["a"].tokens
    tight = prompts_of(sources, cases, SPACE, bpe(), asked, room)
    assert "a" in tight and "a/I50.9/negate/own" not in tight  # the negation makes it too long by a few tokens


# -- statistics -------------------------------------------------------------------------------------


def simulate(n, own, control, seed, each=2):
    """Flips of cases in documents that differ in how easily anything flips."""
    rng = np.random.default_rng(seed)
    documents = np.repeat(np.arange(n), each)
    ease = rng.beta(2, 2, n)[documents] - 0.5
    draw = lambda rate: (rng.random(n * each) < np.clip(rate + 0.4 * ease, 0, 1)).astype(float)  # noqa: E731
    return draw(own), draw(control), documents


def test_without_an_effect_flips_are_found_at_the_level():
    """Uncorrected at .05, and in any of four tests after Holm, over 200 runs: within the 99.9% band of a binomial."""
    p = np.array([[difference(*simulate(24, 0.3, 0.3, 4 * run + test), draws=399, seed=run).p for test in range(4)] for run in range(200)])
    low, high = binom.interval(0.999, 200, 0.05)
    single, any_of_four = int((p[:, 0] <= 0.05).sum()), int((4 * p.min(1) <= 0.05).sum())  # the first step of Holm
    assert low <= single <= high and any_of_four <= high, (single, any_of_four)
    assert 0.02 <= (p <= 0.05).mean() <= 0.075


def test_an_effect_of_the_registered_size_is_found_with_the_registered_power():
    """The detectable effect, from the variance that is blinded to the arms of a pilot without any effect."""
    own, control, documents = simulate(400, 0.4, 0.4, 0)
    variance = blinded_variance(own - control, documents)
    size = detectable_effect(variance, 60, power=0.8)
    assert 0.1 < size < 0.3
    found = [difference(*simulate(60, 0.4 + size / 2, 0.4 - size / 2, 1_000 + run), draws=399, seed=run) for run in range(200)]
    low, high = binom.interval(0.999, 200, 0.8)
    assert low <= sum(f.p <= 0.05 for f in found) <= high
    assert np.mean([f.difference for f in found]) == pytest.approx(size, abs=0.02) and np.mean([f.difference_low <= size <= f.difference_high for f in found]) > 0.88


def test_the_variance_is_blind_to_which_edit_is_the_control():
    own, control, documents = simulate(50, 0.6, 0.2, 3)
    turned = np.random.default_rng(0).choice([-1, 1], 50)[documents]
    assert blinded_variance(own - control, documents) == pytest.approx(blinded_variance((own - control) * turned, documents))
    assert blinded_variance(np.zeros(10), np.arange(10)) == 0.1 and np.isnan(blinded_variance(np.zeros(0), np.zeros(0, int)))
    assert detectable_effect(0.5, 50) == pytest.approx(2.8016 * 0.1, abs=1e-3) and detectable_effect(0.5, 50, tests=8) > detectable_effect(0.5, 50)
    assert np.isnan(detectable_effect(0.5, 0))


def test_what_never_happened_is_not_known_to_be_impossible():
    found = difference(np.zeros(10), np.zeros(10), np.arange(10))
    assert found.difference == 0 and found.difference_high == pytest.approx(1 - 0.025 ** 0.1) and found.difference_low == -found.difference_high
    always = difference(np.ones(10), np.zeros(10), np.arange(10))
    assert (always.difference, always.difference_high) == (1, 1) and 0.6 < always.difference_low < 0.7 and always.p == 2 / 1024
    between = difference(np.zeros(10), np.zeros(10), np.arange(10), most=2.0)
    assert between.difference_high == pytest.approx(2 * found.difference_high)


def test_a_null_result_says_so():
    found = difference(*simulate(24, 0.3, 0.3, 5), draws=999)
    said = verdict(found, found.p, 0.25, 0.1)
    assert NOTHING == "no improvement detected" and said.startswith("no improvement detected, ") and "detectable effect 0.250" in said and f"[{found.difference_low:+.3f}, {found.difference_high:+.3f}]" in said
    assert ("an effect of 0.1 is not excluded" in said) == (found.difference_high >= 0.1) and "an effect of 0.9 or more is outside of the interval" in verdict(found, found.p, 0.25, 0.9)
    strong = difference(*simulate(24, 0.9, 0.1, 5), draws=999)
    assert verdict(strong, strong.p, 0.2, 0.1).startswith("more flips, +") and NOTHING not in verdict(strong, strong.p, 0.2, 0.1)
    turned = difference(*(lambda o, c, d: (c, o, d))(*simulate(24, 0.9, 0.1, 5)), draws=999)
    assert verdict(turned, turned.p, 0.2, 0.1).startswith("fewer flips, -")
    assert verdict(difference(np.zeros(0), np.zeros(0), np.zeros(0, int)), float("nan"), float("nan"), 0.1) == "no improvement detected: no case could be compared"


def simulated_cases(rates, n=30):
    """A table of cases: `rates[arm] = (own, control)`, two routes, two corpora."""
    rows = []
    for a, (arm, (own, control)) in enumerate(rates.items()):
        for c, corpus in enumerate(("near", "far")):
            for r, route in enumerate(("delete", "mask")):
                o, k, documents = simulate(n, own, control, 100 * a + 10 * c + r)
                rows += [{"corpus": corpus, "document": f"d{d}", "text": f"d{d}", "code": f"c{i}", "route": route, "arm": arm, "absent_own": x, "absent_control": y, "live_own": x, "live_control": y}
                         for i, (x, y, d) in enumerate(zip(o, k, documents, strict=True))]
    return pd.DataFrame(rows).sample(frac=1, random_state=0)


def test_conclusions_of_arms_and_between_them():
    found = conclude_flips(simulated_cases({"old": (0.35, 0.3), "new": (0.95, 0.15)}), ["old", "new"], ["delete", "mask"], {"near": "in domain", "far": "zero-shot"}, smallest=0.1, draws=999)
    t = found.table[found.table.outcome == "absent"].set_index(["arm", "against"]).sort_index()
    assert len(found.table) == 2 * 3 * 4 and (t.loc[("new", "control edit")].D > 0.4).all() and (t.loc[("new", "control edit")].holm_p <= 0.05).all()
    assert (t.loc[("new", "old")].D > 0.3).all() and t.loc[("new", "old")].verdict.str.startswith("more flips").all() and t.loc[("old", "control edit")].verdict.str.startswith(NOTHING).all()
    for _, family in found.table.groupby(["outcome", "arm", "against"]):
        assert len(family) == 4 and family.holm_p.to_numpy() == pytest.approx(holm(family.p.to_numpy()))  # over routes and corpora
    assert t.loc[("new", "control edit")].rate.to_numpy() == pytest.approx((t.loc[("new", "control edit")].D + t.loc[("new", "control edit")].other).to_numpy())
    same = conclude_flips(simulated_cases({"old": (0.9, 0.1), "new": (0.9, 0.1)}), ["old", "new"], ["delete", "mask"], {"near": "in domain", "far": "zero-shot"}, smallest=0.1, draws=999)
    assert same.table[same.table.against == "old"].verdict.str.startswith(NOTHING).all() and "2 arms" in repr(same)
    none = conclude_flips(pd.DataFrame(), ["old", "new"], ["delete"], {"near": "zero-shot"}, smallest=0.1)
    assert (none.table.verdict == f"{NOTHING}: no case could be compared").all()


# -- the command --------------------------------------------------------------------------------------


def flip(*arguments):
    with shapes_unchecked():
        return main(["flip", *map(str, arguments), *(["--device", "cpu"] if arguments[0] == "run" else [])])


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    """Texts of the clinic and a plan for them, of two arms: the teacher, and the student that tosses a coin at near-misses."""
    folder = tmp_path_factory.mktemp("flip")
    save_transcripts(flippable(9, seed=5), folder / "clinic.jsonl")
    space = tiny.labels()
    (folder / "labels.csv").write_text("label,region\n" + "".join(f"{x},{space.region(x)}\n" for x in space.labels))
    assert flip(*asked_of(folder), "--out", folder / "plan.json") == 0
    return folder


def asked_of(folder, *models):
    models = models or (tiny.path("llama"), tiny.path("llama-student"))
    return ["register", *(x for m in models for x in ("--model", m)), "--spans", folder / "clinic.jsonl", "--labels", folder / "labels.csv", "--cue", "answer\\n", "--longest", 110, "--affirmed", "had ",
            "--n", 8, "--routes", "delete,negate,swap"]


def test_a_plan_says_everything_before_anything_runs(clinic, capsys, monkeypatch):
    monkeypatch.setattr(DecisionModel, "from_pretrained", lambda *a, **k: pytest.fail("a model was loaded"))
    plan = json.loads((clinic / "plan.json").read_text())
    assert plan["digest"] == plan_digest(plan) and plan["registered"].endswith("+00:00") and plan["options"]["routes"] == ["delete", "negate", "swap"] and plan["options"]["n"] == 8
    (corpus,) = plan["corpora"]
    assert corpus["texts"] == 8 and corpus["cases"]["delete"] == 24 and corpus["hash"] and all(m["hash"] for m in plan["models"]) and plan["labels"]["hash"]
    expected = detectable_effect(0.5, 8, tests=3)
    assert corpus["detectable"]["D of an arm"] == pytest.approx(expected, abs=1e-5) and corpus["detectable"]["between arms"] == pytest.approx(expected * 2**0.5, abs=1e-5)
    assert "every planned text is run once" in plan["options"]["stop"] and "every arm gives unedited" in plan["inclusion"]["rule"] and plan["options"]["wording"]["affirmed"] == "had "
    assert flip(*asked_of(clinic), "--out", clinic / "plan.json") == 2 and "a registration is never overwritten" in capsys.readouterr().err
    assert flip(*asked_of(clinic), "--out", clinic / "other.json") == 0 and "larger than the smallest effect of interest" in capsys.readouterr().out


@pytest.fixture(scope="module")
def run(clinic):
    assert flip("run", "--plan", clinic / "plan.json", "--out", clinic / "out") == 0
    return clinic / "out"


def test_planted_flips_are_found(run):
    """A finding's words are the only way to its code: edited they take it along, another finding's do not."""
    table = pd.read_csv(run / "flip.csv")
    t = table[(table.outcome == "absent") & (table.against == "control edit")].set_index(["arm", "route"])
    assert (t.D["llama"] > 0.4).all() and (t.holm_p["llama"] <= 0.05).all() and (t.rate["llama"] > 0.85).all() and t.verdict["llama"].str.startswith("more flips").all()
    cases = pd.read_csv(run / "cases.csv")
    assert (cases.own_start != cases.control_start).all() and set(cases.arm) == {"llama", "llama-student"}
    per_arm = [set(zip(x.text, x.code, x.route, strict=True)) for _, x in cases.groupby("arm")]
    assert per_arm[0] == per_arm[1] and len(per_arm[0]) == len(cases) / 2  # codes that both arms give
    secondary = table[(table.outcome == "live") & (table.arm == "llama") & (table.against == "control edit")]
    assert (secondary.rate <= 0.1).all() and secondary.verdict.str.startswith(NOTHING).all()  # with its own reasoning before it, the answer no longer needs the note


def test_arms_that_do_not_differ_read_so(run, capsys):
    from decisionheads.flip.work import show_flip

    said = " ".join(show_flip(run).split())  # lines are broken to fit a terminal
    between = pd.read_csv(run / "flip.csv").query("against == 'llama'")
    assert len(between) == 6 and between.verdict.str.startswith("no improvement detected, ").all() and said.count("llama-student against llama") == 6 and "detectable effect" in said
    assert "of codes that not every arm gives unedited" in said and "unchanged" in said
    assert 0 < pilot_variance(run) <= 1


@pytest.mark.whole
def test_a_run_that_was_killed_goes_on_and_a_finished_one_reprints(clinic, run, tmp_path, capsys, monkeypatch):
    from decisionheads.flip import work as flip_work

    real, calls = flip_work.generate, []

    def dies(*a, **k):
        calls.append(1)
        if len(calls) == 3:  # the first arm, after its edits were begun
            k["parts"].save("clinic/none", [[1], None])
            raise KeyboardInterrupt
        return real(*a, **k)

    monkeypatch.setattr(flip_work, "generate", dies)
    assert flip("run", "--plan", clinic / "plan.json", "--out", tmp_path / "out") not in (0, 2)
    assert not (tmp_path / "out" / "flip.csv").exists() and list((tmp_path / "out").glob(".arm-*.parts"))
    monkeypatch.setattr(flip_work, "generate", real)
    capsys.readouterr()
    assert flip("run", "--plan", clinic / "plan.json", "--out", tmp_path / "out") == 0
    said = capsys.readouterr().out
    for name in ("flip.csv", "cases.csv", "plan.json"):
        assert (tmp_path / "out" / name).read_bytes() == (run / name).read_bytes(), name
    assert not list((tmp_path / "out").glob(".*"))  # what was written is text, and gone
    monkeypatch.setattr(flip_work, "generate", lambda *a, **k: pytest.fail("it ran again"))
    assert flip("run", "--plan", clinic / "plan.json", "--out", tmp_path / "out") == 0 and capsys.readouterr().out == said


@pytest.mark.parametrize(("change", "said"), [
    (lambda f, p: p["options"].__setitem__("smallest", 0.2), "plan.json was changed after it was registered; restore it, or register a new plan"),
    (lambda f, p: p.__setitem__("registered", "2001-01-01T00:00:00+00:00"), "plan.json was changed after it was registered"),
    (lambda f, p: p["corpora"][0].__setitem__("hash", "0"), "plan.json was changed after it was registered"),
    (lambda f, p: (f / "clinic.jsonl").write_text((f / "clinic.jsonl").read_text().replace("slept", "slopt", 1)), "clinic.jsonl was changed after"),
    (lambda f, p: (f / "labels.csv").write_text((f / "labels.csv").read_text() + "Zzz-zz,Zzz\n"), "labels.csv was changed after"),
    (lambda f, p: (f / "clinic.jsonl").unlink(), "clinic.jsonl is not there, as it was when"),
    (lambda f, p: (f / "model" / "generation_config.json").write_text("{}"), "model was changed after"),
    (lambda f, p: p.clear(), "plan.json was changed after it was registered")])
def test_what_was_changed_after_registration_is_refused(clinic, tmp_path, capsys, monkeypatch, change, said):
    import shutil

    for name in ("clinic.jsonl", "labels.csv"):
        shutil.copy(clinic / name, tmp_path)
    shutil.copytree(tiny.path("llama"), tmp_path / "model")
    assert flip(*asked_of(tmp_path, tmp_path / "model"), "--out", tmp_path / "plan.json") == 0
    assert load_plan(tmp_path / "plan.json")["models"][0]["arm"] == "model"
    monkeypatch.setattr(DecisionModel, "from_pretrained", lambda *a, **k: pytest.fail("a model was loaded"))
    plan = json.loads((tmp_path / "plan.json").read_text())
    change(tmp_path, plan)
    (tmp_path / "plan.json").write_text(json.dumps(plan, indent=1) + "\n")
    capsys.readouterr()
    assert flip("run", "--plan", tmp_path / "plan.json", "--out", tmp_path / "out") == 2
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("more", "said"), [
    (["--routes", "delete,burn"], "'burn' is none of them"), (["--routes", ","], "routes are to be named"), (["--routes", "mask,mask"], "each once"), (["--smallest", "0"], "smallest effect of interest"),
    (["--variance", "3"], "variance of a document's D"), (["--filler", "--"], "is not one character"), (["--negation", " "], "the negation is empty"), (["--pilot", "."], "cannot be read"),
    (["--shortest", "500"], "no case can be made (81 evidence of fewer than 500 characters"), (["--like", "x.jsonl"], "nothing beside it says"), (["--in-domain", "x.jsonl"], "is not one of the files"),
    (["--longest", "400"], "no case can be made (72 truncated: longer than a model's context")])
def test_what_cannot_be_registered_is_refused(clinic, tmp_path, capsys, more, said):
    assert flip(*asked_of(clinic), *more, "--out", tmp_path / "plan.json") == 2
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1 and not (tmp_path / "plan.json").exists()
    assert flip("run", "--plan", tmp_path / "plan.json", "--out", tmp_path / "out") == 2 and "no such plan; register one" in capsys.readouterr().err


def test_planning_is_frozen_and_transcripts_need_a_note():
    with pytest.raises(InputError, match="0 spans named 'note' in its prompt"):
        sources_of([], [replace(flippable(1, 0)[0], spans=())])
    assert Planning().routes == ROUTES


def test_two_corpora_of_notes_end_to_end(bpe_folder, tmp_path, capsys):
    mdace_shaped(tmp_path / "m", 5), codiesp_shaped(tmp_path / "c", 5)
    with shapes_unchecked():
        assert main(["prepare", "mdace", "--path", str(tmp_path / "m"), "--out", str(tmp_path / "mdace.jsonl"), "--labels-out", str(tmp_path / "labels.csv")]) == 0
        assert main(["prepare", "codiesp", "--path", str(tmp_path / "c"), "--out", str(tmp_path / "codiesp.jsonl")]) == 0
        assert main(["generate", "--model", str(bpe_folder), "--notes", str(tmp_path / "mdace.jsonl"), "--labels", str(tmp_path / "labels.csv"), "--out", str(tmp_path / "like.jsonl"), "--limit", "1",
                     "--within-labels", "--longest", "4", "--most", "4", "--listing", "compact", "--instruction", "Give codes.", "--device", "cpu"]) == 0
    spans = ["--spans", tmp_path / "mdace.jsonl", "--spans", tmp_path / "codiesp.jsonl"]
    assert flip("register", "--model", bpe_folder, *spans, "--labels", tmp_path / "labels.csv", "--in-domain", tmp_path / "codiesp.jsonl", "--like", tmp_path / "like.jsonl", "--out", tmp_path / "p.json") == 0
    assert flip("run", "--plan", tmp_path / "p.json", "--out", tmp_path / "out") == 0
    said = capsys.readouterr().out
    table, cases = pd.read_csv(tmp_path / "out" / "flip.csv"), pd.read_csv(tmp_path / "out" / "cases.csv")
    assert set(zip(table.corpus, table["read"], strict=True)) == {("mdace", "zero-shot"), ("codiesp", "in domain")} and len(table) == 2 * 2 * 4 and set(cases.corpus) == {"mdace", "codiesp"}
    assert " ".join(said.split()).count("no improvement detected") == 16  # weights are random
    words = ("heart failure", "slept well", "lung disease")
    held = [p for p in (tmp_path / "out").rglob("*") if p.is_file()] + [tmp_path / "p.json"]
    assert not any(w.encode() in p.read_bytes() for p in held for w in words) and not any(w in said for w in words)
