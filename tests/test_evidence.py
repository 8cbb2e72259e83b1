"""Evidence alignment: measures by hand, planted evidence, truncation, and the whole command over two corpora."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisionheads import DecisionModel, HeadSet, InputError, LabelSpace, save_transcripts, tiny
from decisionheads.branches import Branch
from decisionheads.cli import main
from decisionheads.corpora.notes import Note
from decisionheads.evidence.alignment import MEASURES, auroc, by_document, holm, measures, paired, shares, sign_flip
from decisionheads.evidence.arms import _ranked
from decisionheads.evidence.reading import Arm, Measured, align, conclude, pooled_rows
from decisionheads.evidence.texts import EvidenceText, cut_note, gold_answer, texts_of_notes, texts_of_transcripts, units_of
from decisionheads.generation import Generating
from decisionheads.interventions import BlockReads
from decisionheads.prompts import Layout
from decisionheads.reads import pooled_attention
from decisionheads.spans import Sinks
from decisionheads.transcripts import Span, encode

from .conftest import shapes_unchecked
from .marked import clinic, codiesp_shaped, mdace_shaped, rotated, run_folder

ROW = np.array([0.50, 0.20, 0.10, 0.10, 0.06, 0.04])  # a sink, then a note of five tokens
NOTE = np.array([0, 1, 1, 1, 1, 1], bool)
keys = lambda *where: np.isin(np.arange(6), where)  # noqa: E731

# -- measures -------------------------------------------------------------------------------------


def test_measures_by_hand():
    found = dict(zip(MEASURES, measures(ROW, NOTE, keys(1, 4), [keys(2), keys(3, 5)]), strict=True))
    assert found["mass"] == pytest.approx(0.52) and found["lift"] == pytest.approx(0.52 / 0.4)
    others = [np.log(0.2 / 0.2), np.log((0.2 + 0.08) / 0.4)]
    assert found["specificity"] == pytest.approx(np.log(0.52 / 0.4) - np.mean(others))
    assert found["auroc"] == pytest.approx((3 + 1) / 6)  # .40 above all three, .12 above .08 alone
    assert found["iou"] == pytest.approx(1 / 3)  # the two that have most: 1 and the first of 2 and 3


def test_the_row_is_renormalised_over_the_note():
    near = measures(ROW, NOTE, keys(1, 4), [keys(2)])
    assert measures(ROW * 0.1, NOTE, keys(1, 4), [keys(2)]) == pytest.approx(near)
    assert measures(np.concatenate([[9.0], ROW[1:]]), NOTE, keys(1, 4), [keys(2)]) == pytest.approx(near)  # what lies outside the note is nothing to it
    assert measures(np.ones(6), NOTE, keys(1, 4), [keys(2)])[:3] == pytest.approx([0.4, 1.0, 0.0])


def test_under_a_hundredth_on_the_note_is_undefined():
    assert shares(np.where(NOTE, 0.0019, 0.99), NOTE) is None and shares(np.where(NOTE, 0.0021, 0.98), NOTE) is not None
    assert np.isnan(measures(np.where(NOTE, 0.0019, 0.99), NOTE, keys(1), [keys(2)])).all()


def test_without_other_evidence_two_measures_are_undefined():
    assert np.isnan(measures(ROW, NOTE, keys(1), [])).tolist() == [False, False, True, True, False]
    assert np.isnan(measures(ROW, NOTE, keys(1, 2), [keys(2)])).tolist() == [False, False, True, True, False]  # the other's is all its own
    assert measures(ROW, NOTE, keys(1, 2), [keys(2, 3)])[2] == pytest.approx(np.log(0.6 / 0.4) - np.log(0.2 / 0.2))  # and without what they share


def test_a_sink_is_no_evidence():
    assert measures(ROW, NOTE, keys(0, 1), [])[:2] == pytest.approx(measures(ROW, NOTE, keys(1), [])[:2])
    with pytest.raises(ValueError, match="no token of the evidence"):
        measures(ROW, NOTE, keys(0), [])


@given(own=st.lists(st.integers(0, 4), min_size=1, max_size=6), others=st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_auroc_counts_pairs_and_halves_ties(own, others):
    pairs = [(a > b) + (a == b) / 2 for a in own for b in others]
    assert auroc(np.array(own, float), np.array(others, float)) == pytest.approx(np.mean(pairs))


# -- statistics -----------------------------------------------------------------------------------


def test_sign_flips_are_exact_for_few_documents_and_two_sided():
    assert sign_flip(np.ones(3)) == 2 / 8 and sign_flip(-np.ones(3)) == 2 / 8 and sign_flip(np.ones(1)) == 1
    assert sign_flip(np.array([3.0, 1.0, -2.0])) == 6 / 8  # |sum| 2, 6, 0, 4 twice each: all but the two of 0
    assert sign_flip(np.zeros(5)) == 1 and np.isnan(sign_flip(np.zeros(0)))
    assert sign_flip(np.ones(40), draws=199) == 1 / 200  # never 0
    d = np.random.default_rng(0).normal(0.1, 1, 30)
    assert sign_flip(d, seed=1) == pytest.approx(sign_flip(-d, seed=1)) and sign_flip(d, seed=1) == sign_flip(d, seed=1)


def test_without_a_difference_one_test_in_twenty_finds_one():
    rng = np.random.default_rng(0)
    for n in (8, 20):
        share = np.mean([sign_flip(rng.standard_t(3, n), draws=399, seed=i) <= 0.05 for i in range(400)])
        assert 0.025 <= share <= 0.08, (n, share)


def test_codes_of_a_document_count_as_one():
    values, documents = np.array([1.0, 3.0, 10.0, np.nan]), np.array([0, 0, 1, 1])
    assert by_document(values[:, None], documents)[:, 0].tolist() == [2.0, 10.0]
    found = paired(values, np.array([0.0, 1.0, 4.0, 0.0]), documents)
    assert (found.mean, found.other, found.difference) == (6.0, 2.25, 3.75)
    assert (found.documents, found.units, found.undefined, found.p) == (2, 3, 1, 0.5)
    many = paired(np.repeat(values[:3], 50), np.zeros(150), np.repeat([0, 0, 1], 50))
    assert many.p == 0.5 and many.documents == 2  # copies of codes are no more evidence
    assert paired(np.array([np.nan]), np.zeros(1), np.zeros(1, int)).documents == 0


def test_holm():
    from statsmodels.stats.multitest import multipletests

    p = [0.01, 0.04, 0.03]
    assert holm(p) == pytest.approx(multipletests(p, method="holm")[1])
    assert holm([0.01, float("nan"), 0.04])[[0, 2]] == pytest.approx([0.02, 0.04]) and np.isnan(holm([0.01, float("nan")])[1])


def measured(corpus, arm, shift, n=20, codes=("a", "b"), left=None, seed=0):
    rng = np.random.default_rng([seed, len(arm)])
    rows = {(f"d{i}", f"t{i}", c): (rng.normal(shift, 1, 5), rng.normal(0, 1, (4, 5)), 0.3, 2.0, shift, 0.0) for i in range(n) for c in codes}
    return Measured(corpus, corpus == "home", arm, rows, left or Counter())


def test_conclusions_are_corrected_over_measures_corpora_and_comparisons():
    found = conclude([measured("home", "one", 3.0), measured("home", "two!", 0.0), measured("far", "one", 3.0), measured("far", "two!", 0.0, left=Counter(truncated=7))], draws=999)
    assert len(found.evidence) == 2 * 2 * 5 and len(found.comparisons) == 2 * 5 and len(found.blocking) == 4
    p = np.concatenate([found.evidence.p, found.comparisons.p])
    assert np.concatenate([found.evidence.holm_p, found.comparisons.holm_p]) == pytest.approx(holm(p))
    one, two = (found.evidence[found.evidence.arm == name] for name in ("one", "two!"))
    assert (one.holm_p <= 0.05).all() and (two.holm_p > 0.05).all() and (found.comparisons.difference < 0).all() and (found.comparisons.holm_p <= 0.05).all()
    assert one.random_mean.abs().max() < 0.5 and (one.documents == 20).all() and (one.codes == 40).all()
    assert set(found.evidence["read"]) == {"in domain", "zero-shot"} and (found.evidence[found.evidence.corpus == "home"]["read"] == "in domain").all()
    assert found.evidence.set_index(["corpus", "arm"]).truncated.loc[("far", "two!")].tolist() == [7] * 5  # counted, and no row of zeros


def test_arms_are_compared_on_the_codes_that_all_have():
    less = measured("far", "two!", 0.0, codes=("a",))
    found = conclude([measured("far", "one", 3.0), less])
    assert (found.evidence.codes == 20).all() and (found.comparisons.codes == 20).all()
    assert found.left_out[["arm", "reason", "codes"]].to_numpy().tolist() == [["one", "no decision in another arm", 20]]


# -- attention -------------------------------------------------------------------------------------


def test_pooled_rows_are_means_over_heads(random_model):
    import torch

    prefix = random_model.hooked.prefill(torch.randperm(80, generator=torch.Generator().manual_seed(3)) + 8)
    sets = [HeadSet(["L0H1", "L2H3"]), HeadSet(["L1H0"]), HeadSet()]
    rows = pooled_rows(random_model.hooked, prefix, [40, 79, 41], sets)
    each = pooled_attention(random_model.hooked, prefix, [Branch(40), Branch(79), Branch(41)], np.eye(80, dtype=bool)).double().numpy()
    each[[0, 1, 2], :, :, [40, 79, 41]] = 0  # a row's own key is left out
    assert np.abs(rows[:, 0] - (each[:, 0, 1] + each[:, 2, 3]) / 2).max() <= 1e-6 and np.abs(rows[:, 1] - each[:, 1, 0]).max() <= 1e-6 and (rows[:, 2] == 0).all()
    assert np.abs(pooled_rows(random_model.hooked, prefix, [40, 79, 41], sets, memory=1) - rows).max() <= 1e-6
    assert (rows[0, :, 41:] == 0).all() and rows[1, 0].sum() > 0.5


# -- planted evidence ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    return DecisionModel.from_pretrained(tiny.path("llama"))


def read(model, texts, heads, kind="region", sets=8):
    """Everything measured of some texts of the clinic, for one arm."""
    arm, space = Arm("arm", {kind: HeadSet(heads)}, Sinks(frozenset([0, 1, 2, 3]))), tiny.labels()
    rows, left = {}, Counter()
    for t in texts:
        text, encoded = EvidenceText(t), encode(t, model.tokenizer)
        units, why = units_of(text, space, model.tokenizer, encoded, (4,), kind)
        left += why
        a = align(model, text, encoded, units, arm, model.prefixes, sets=sets)
        rows |= {(t.id, t.id, u.code): (a.own[i], a.random[i], a.on_note[i], a.margin[i], a.lost[i], a.lost_control[i]) for i, u in enumerate(units)}
    return Measured("clinic", False, "arm", rows, left)


def note_readers(model, seed=1):
    """The two heads that read a finding's line most when its region is written, known from other texts than those that are tested."""
    mass = []
    for t in clinic(8, seed):
        found = model.find_events(t, tiny.labels())
        reading = model.read(t, [e for e in found if e.kind == "region" and e.primary])
        for e in reading.events:
            line = next(s for s in t.spans if s.name == "evidence" and s.of == e.label)
            tokens = reading.encoded.tokens_in(line.start, line.end)
            mass.append(pooled_attention(model.hooked, reading.prefix, [Branch(e.position)], [(int(tokens[0]), int(tokens[-1]) + 1)])[0, ..., 0].numpy())
    best = np.argsort(-np.mean(mass, 0).ravel())[:2]
    return [(int(i) // 8, int(i) % 8) for i in best]


def test_heads_that_read_the_note_find_a_finding_and_random_heads_do_not(llama):
    texts = clinic(12, seed=11)
    found = conclude([read(llama, texts, note_readers(llama))]).evidence.set_index("measure")
    assert (found.holm_p.loc[["mass", "lift", "specificity"]] <= 0.01).all() and found["mean"]["mass"] > 0.8 > 0.55 > found.random_mean["mass"]
    assert found["mean"]["lift"] > 4 and found["mean"]["auroc"] > 0.7 and (found.documents == 12).all() and (found.truncated == 0).all()
    wrong = conclude([read(llama, [rotated(t) for t in texts], note_readers(llama))]).evidence.set_index("measure")
    assert wrong["mean"]["mass"] < 0.15 and wrong["mean"]["specificity"] < -2 and wrong["mean"]["auroc"] < 0.5


def test_decision_heads_of_regions_find_their_block_of_the_list_and_blocking_it_costs_their_margin(llama, demo):
    """The list stands in for a note: it is what these heads were found to read."""
    heads = json.loads((demo / "sets.json").read_text())["region"]["heads"]
    found = conclude([read(llama, clinic(12, seed=12, where="list"), heads)])
    table, blocking = found.evidence.set_index("measure"), found.blocking.iloc[0]
    assert table["mean"]["mass"] > 2 * table.random_mean["mass"] and table.holm_p["mass"] <= 0.01 and table.holm_p["specificity"] <= 0.01
    assert blocking["mean"] > 2 and abs(blocking.control_mean) < 0.2 and blocking.holm_p <= 0.01 and blocking.margin > 10


def test_reading_is_not_causing(llama):
    """Heads that read the finding's line: its attention says so, and its blocking takes next to nothing of the margin."""
    blocking = conclude([read(llama, clinic(12, seed=11), note_readers(llama))]).blocking.iloc[0]
    assert blocking["mean"] < 0.1 * blocking.margin


def test_blocking_takes_the_evidence_away_and_nothing_else(llama):
    """Margins lost are those of plain BlockReads branches over the evidence's own tokens."""
    from decisionheads.ablation import event_margin
    from decisionheads.branches import branch_logits

    t, heads = clinic(1, seed=12, where="list")[0], HeadSet(["L1H4", "L1H5"])
    encoded = encode(t, llama.tokenizer)
    (unit, *_), _ = units_of(EvidenceText(t), tiny.labels(), llama.tokenizer, encoded, (4,), "region")
    found = align(llama, EvidenceText(t), encoded, [unit], Arm("a", {"region": heads}, Sinks(frozenset([0]))), llama.prefixes, sets=2)
    reading = llama.read(t, [unit.event])
    margin, tokens = event_margin(reading, unit.event), encoded.tokens_in(*unit.spans[0])
    branches = [Branch(unit.event.position), Branch(unit.event.position, (), (BlockReads(heads, int(tokens[0]), int(tokens[-1]) + 1),))]
    clean, cut = (float(margin(rows[0])) for _, rows in sorted(branch_logits(llama.hooked, reading.prefix, branches)))
    assert found.margin[0] == pytest.approx(clean, abs=1e-4) and found.lost[0] == pytest.approx(clean - cut, abs=1e-4) and found.lost[0] > 1 > abs(found.lost_control[0])


def test_sinks_within_the_note_are_left_out_before_renormalising(llama):
    """Against measures of plain pooled rows: line breaks and words that begin a line are called sinks, in the note as elsewhere."""
    t, heads = clinic(1, seed=12)[0], HeadSet(["L1H3", "L1H1"])
    encoded = encode(t, llama.tokenizer)
    sinks = frozenset(llama.tokenizer("\n- had", add_special_tokens=False)["input_ids"])
    (unit, *_), _ = units_of(EvidenceText(t), tiny.labels(), llama.tokenizer, encoded, (4,), "region")
    found = align(llama, EvidenceText(t), encoded, [unit], Arm("a", {"region": heads}, Sinks(sinks)), llama.prefixes, sets=2)
    reading = llama.read(t, [unit.event])
    row = pooled_rows(llama.hooked, reading.prefix, [unit.event.position], [heads])[0, 0]
    inside = lambda spans: np.isin(np.arange(len(row)), [i for s in spans for i in encoded.tokens_in(s.start, s.end)])  # noqa: E731
    note = inside([s for s in t.spans if s.name == "note"]) & ~np.isin(encoded.ids[:len(row)], sorted(sinks))
    marked = {code: inside([s for s in t.spans if s.name == "evidence" and s.of == code]) for code in t.labels}
    expected = measures(row, note, marked[unit.code], [k for code, k in marked.items() if code != unit.code])
    assert found.own[0] == pytest.approx(expected, abs=1e-5) and found.on_note[0] == pytest.approx(row[note].sum(), abs=1e-6)
    assert not np.allclose(found.own[0], align(llama, EvidenceText(t), encoded, [unit], Arm("a", {"region": heads}, Sinks(frozenset())), llama.prefixes, sets=2).own[0], atol=1e-3)


# -- texts, truncation and what is left out ------------------------------------------------------------

CODES = ["E11.9", "I50.1", "I50.9", "J44.9"]


def note_of(words=40, **more):
    text = "heart failure, " + "filler " * words + "diabetes"
    spans = (Span("evidence", 0, 13, "I50.9"), Span("evidence", len(text) - 8, len(text), "E11.9"))
    return Note(**{"id": "n", "note": text, "labels": ("I50.9", "E11.9", "Z99"), "subject_id": "s", "spans": spans, **more})


ASKED = Generating(Layout("compact", "Give codes."))


def test_notes_become_texts_with_their_gold_codes():
    from .bpe import bpe

    (side,), counts = texts_of_notes([note_of(), note_of(id="m", labels=("Z99",))], LabelSpace(CODES), [bpe()], [None], ASKED)
    (text,) = side
    t = text.transcript
    assert t.answer == gold_answer(["I50.9", "E11.9"], ASKED) == "\nCodes: I50.9, E11.9\n" and t.reasoning == "" and text.document == "s"
    assert {s.of: t.text[s.start:s.end] for s in t.spans if s.name == "evidence"} == {"I50.9": "heart failure", "E11.9": "diabetes"}
    assert counts == {"no gold code is in the label file": 1} and text.truncated == frozenset()


def test_evidence_beyond_the_limit_is_truncated_and_never_zero():  # H6
    from .bpe import bpe

    space, tokenizer = LabelSpace(CODES), bpe()
    whole = len(encode(texts_of_notes([note_of()], space, [tokenizer], [None], ASKED)[0][0][0].transcript, tokenizer))
    sides, _ = texts_of_notes([note_of()], space, [tokenizer, tokenizer], [whole - 30, None], ASKED)
    for (text,) in sides:  # the arm that has room reads no more than the other
        units, reasons = units_of(text, space, tokenizer, encode(text.transcript, tokenizer), (tokenizer("\n")["input_ids"][-1],))
        assert text.truncated == {"E11.9"} and [u.code for u in units] == ["I50.9"] and reasons == {"truncated": 1}
        assert text.transcript.answer.count("E11.9") == 1 and len(encode(text.transcript, tokenizer)) <= whole - 30
    assert sides[0][0].transcript.text == sides[1][0].transcript.text
    partly = texts_of_notes([note_of(spans=(*note_of().spans, Span("evidence", 0, 5, "E11.9")))], space, [tokenizer], [whole - 30], ASKED)[0][0][0]
    assert partly.truncated == {"E11.9"}  # some of its evidence is still there, and not all
    units, reasons = units_of(partly, space, tokenizer, encode(partly.transcript, tokenizer), (4,))
    assert [u.code for u in units] == ["I50.9"] and reasons == {"truncated": 1}


def test_an_answer_that_would_be_cut_is_refused():  # H6
    from .bpe import bpe

    tokenizer = bpe()
    with pytest.raises(InputError, match="candidate list and instruction need"):
        texts_of_notes([note_of()], LabelSpace(CODES), [tokenizer], [40], ASKED)
    uncut = Generating(replace(ASKED.layout, cut=False))
    with pytest.raises(InputError, match="note 'n': its prompt needs"):
        texts_of_notes([note_of(words=200)], LabelSpace(CODES), [tokenizer], [600], uncut)


def test_a_transcript_that_is_too_long_for_one_arm_is_truncated_in_all(llama):
    (t,) = clinic(1, seed=2)
    short, long = texts_of_transcripts([t], [llama.tokenizer] * 2, [50, None])
    for (text,) in (short, long):
        units, reasons = units_of(text, tiny.labels(), llama.tokenizer, encode(text.transcript, llama.tokenizer), (4,))
        assert not units and reasons == {"truncated": 3}
    with pytest.raises(InputError, match="has no span named 'note'"):
        texts_of_transcripts([replace(t, spans=())], [llama.tokenizer], [None])


def test_a_note_is_cut_at_its_end():
    note = note_of(spans=(Span("section", 0, 60, "x"), Span("evidence", 0, 13, "I50.9"), Span("evidence", 10, 41, "E11.9")))
    assert cut_note(note, 40).spans == (Span("section", 0, 40, "x"), Span("evidence", 0, 13, "I50.9")) and cut_note(note, 40).note == note.note[:40]


def test_every_code_is_measured_or_counted(llama):
    (t,) = clinic(1, seed=3)
    own = {s.of: s for s in t.spans if s.name == "evidence"}
    first, second, third = own
    block = next(s for s in t.spans if s.name == "block")
    spans = [s for s in t.spans if s.name != "evidence"] + [own[first], own[first], own[second]._replace(of=""), block._replace(name="evidence", of=third), own[third],
             own[second]._replace(of="Zzz-zz"), own[second]._replace(of=next(c for c in t.candidates if c not in t.labels))]
    units, reasons = units_of(EvidenceText(replace(t, spans=tuple(spans))), tiny.labels(), llama.tokenizer, encode(t, llama.tokenizer), (4,), "region")
    assert [(u.code, len(u.spans), u.event.kind) for u in units] == [(first, 1, "region")]
    assert reasons == {"evidence of no code": 1, "evidence outside the note": 1, "not in the label file": 1, "not in the answer": 1}
    units, reasons = units_of(EvidenceText(t), tiny.labels(), llama.tokenizer, encode(t, llama.tokenizer), (4,), "departure")
    assert len(units) + sum(reasons.values()) == 3 and set(reasons) <= {"no departure decision"} and all(u.event.kind == "departure" for u in units)


# -- the command -----------------------------------------------------------------------------------------


def evidence(*arguments):
    with shapes_unchecked():
        return main(["evidence", *map(str, arguments), "--device", "cpu"])


@pytest.fixture(scope="module")
def files(tmp_path_factory, demo):
    """The clinic's own texts with evidence, beside the labels of the demo."""
    folder = tmp_path_factory.mktemp("clinic")
    save_transcripts(clinic(10, seed=21), folder / "near.jsonl")
    save_transcripts(clinic(12, seed=22, where="list"), folder / "far.jsonl")
    return folder


def test_the_command_on_a_discovered_run(files, demo, tmp_path, capsys):
    command = ["--model", tiny.path("llama"), "--run-folder", demo, "--spans", files / "near.jsonl", "--spans", files / "far.jsonl", "--in-domain", files / "near.jsonl", "--labels", demo / "labels.csv",
               "--out", tmp_path / "out", "--kind", "region", "--random-sets", 5]
    assert evidence(*command) == 0
    said = capsys.readouterr().out
    flat = " ".join(said.split())  # lines are broken to fit a terminal
    assert "near (in domain), 10 texts" in flat and "far (zero-shot), 12 texts" in flat and "no difference found" in flat and "random heads" in flat and "blocking the evidence takes" in flat
    table = pd.read_csv(tmp_path / "out" / "evidence.csv").set_index(["corpus", "measure"])
    assert len(table) == 10 and table.holm_p["far", "mass"] <= 0.05 and table["mean"]["far", "mass"] > table.random_mean["far", "mass"]
    state = json.loads((tmp_path / "out" / "run.json").read_text())
    assert state["arms"]["llama"]["heads"]["region"] == json.loads((demo / "sets.json").read_text())["region"]["heads"] and state["finished"] and state["versions"]["torch"]
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").glob("*.csv")}
    assert evidence(*command) == 0 and capsys.readouterr().out == said  # finished: it reprints
    assert evidence(*command, "--seed", 1) == 2 and "was made from other inputs (options differ)" in capsys.readouterr().err
    parts = sorted((tmp_path / "out" / "parts").iterdir())
    parts[0].unlink(), parts[1].write_bytes(b"torn")
    (tmp_path / "out" / "run.json").write_text(json.dumps({**state, "finished": False}))
    assert evidence(*command) == 0 and {p.name: p.read_bytes() for p in (tmp_path / "out").glob("*.csv")} == before  # killed, and gone on with


PLANTED = ("heart failure", "slept well", "lung disease")


@pytest.fixture(scope="module")
def two_corpora(tmp_path_factory, bpe_folder):
    """MDACE- and CodiEsp-shaped releases, prepared, and two arms of a small random model."""
    folder = tmp_path_factory.mktemp("corpora")
    mdace_shaped(folder / "m"), codiesp_shaped(folder / "c")
    with shapes_unchecked():
        assert main(["prepare", "mdace", "--path", str(folder / "m"), "--out", str(folder / "mdace.jsonl"), "--labels-out", str(folder / "labels.csv")]) == 0
        assert main(["prepare", "codiesp", "--path", str(folder / "c"), "--out", str(folder / "codiesp.jsonl")]) == 0
        assert main(["generate", "--model", str(bpe_folder), "--notes", str(folder / "mdace.jsonl"), "--labels", str(folder / "labels.csv"), "--out", str(folder / "like.jsonl"), "--limit", "1",
                     "--within-labels", "--longest", "4", "--most", "1", "--listing", "compact", "--instruction", "Give codes.", "--device", "cpu"]) == 0
    run_folder(folder / "one", bpe_folder, {"region": ["L0H1", "L1H0", "L1H2"], "label": ["L0H0"], "departure": []}, (2, 4))
    run_folder(folder / "two", bpe_folder, {"region": ["L1H3", "L0H2"], "label": ["L1H1", "L0H3"], "departure": []}, (2, 4))
    return folder


def test_two_corpora_and_two_arms_end_to_end(two_corpora, bpe_folder, tmp_path, capsys):
    f, out = two_corpora, tmp_path / "out"
    command = ["--model", bpe_folder, "--run", f / "one", "--model", bpe_folder, "--run", f / "two", "--spans", f / "mdace.jsonl", "--spans", f / "codiesp.jsonl", "--labels", f / "labels.csv",
               "--in-domain", f / "codiesp.jsonl", "--like", f / "like.jsonl", "--out", out, "--random-sets", 3]
    assert evidence(*command) == 0
    said = " ".join(capsys.readouterr().out.split())
    table, against = pd.read_csv(out / "evidence.csv"), pd.read_csv(out / "comparisons.csv")
    names = [bpe_folder.name, f"{bpe_folder.name} (2)"]
    assert table.groupby(["corpus", "read", "arm"], sort=False).size().to_dict() == {(c, r, a): 5 for c, r in (("mdace", "zero-shot"), ("codiesp", "in domain")) for a in names}
    assert (against.against == names[0]).all() and len(against) == 10 and not table[["mean", "random_mean", "difference", "p", "holm_p"]].isna().any().any()
    assert (table[table.corpus == "mdace"].documents == 4).all()  # two notes of each patient count as one
    assert (table.holm_p >= table.p).all() and (table.holm_p > 0.05).all() and "no difference found" in said and "difference +" not in said  # weights are random
    assert "note: mdace has 4 documents for some of 30 tests" in said
    state = json.loads((out / "run.json").read_text())
    assert state["arms"][names[0]]["heads"] == {"region": ["L0H1", "L1H0"], "label": ["L0H0"]} and state["arms"][names[1]]["heads"] == {"region": ["L0H2", "L1H3"], "label": ["L1H1"]}
    assert not any(word.encode() in p.read_bytes() for p in out.rglob("*") if p.is_file() for word in PLANTED) and not any(word in said for word in PLANTED)


@pytest.mark.parametrize(("change", "said"), [
    (lambda f, c: c.extend(["--model", c[1]]), "2 models and 1 run folders are given"),
    (lambda f, c: c.__setitem__(3, run_folder(f / "x", None, {"region": ["L0H1"]}, hashed="other")), "was not made of the model"),
    (lambda f, c: c.__setitem__(3, f / "nowhere"), "is not a run folder"),
    (lambda f, c: c.__setitem__(5, f / "none.jsonl"), "no such file of notes or transcripts"),
    (lambda f, c: c.extend(["--spans", c[5]]), "two files of spans are named 'mdace'"),
    (lambda f, c: c.extend(["--in-domain", f / "other.jsonl"]), "is called in-domain and is not one of the files"),
    (lambda f, c: c.extend(["--kind", "departure"]), "has no decision heads for departure decisions"),
    (lambda f, c: c.extend(["--kind", "phase"]), "unknown kind 'phase'"),
    (lambda f, c: c.extend(["--heads-from", "hat"]), "unknown source of heads 'hat'"),
    (lambda f, c: c.extend(["--top", 99]), "--top 99 is more than the 8 heads"),
    (lambda f, c: c.extend(["--like", c[5]]), "nothing beside it says how it was generated"),
    (lambda f, c: (f / "bare.jsonl").write_text('{"id": "a", "note": "x y", "labels": ["I50.9"]}\n') and c.__setitem__(5, f / "bare.jsonl"), "no span named 'evidence' in it"),
    (lambda f, c: (f / "l.csv").write_text("label\nZ99\n") and c.__setitem__(7, f / "l.csv"), "no code with evidence has a decision in all arms (8 no gold code is in the label file"),
    (lambda f, c: c.extend(["--device", "abacus"]), "device 'abacus' cannot be used")])
def test_what_cannot_be_is_refused_before_a_model_is_loaded(two_corpora, bpe_folder, tmp_path, capsys, monkeypatch, change, said):
    monkeypatch.setattr(DecisionModel, "from_pretrained", lambda *a, **k: pytest.fail("a model was loaded"))
    f = two_corpora
    (tmp_path / "one").symlink_to(f / "one")
    command = ["--model", bpe_folder, "--run", f / "one", "--spans", f / "mdace.jsonl", "--labels", f / "labels.csv", "--out", tmp_path / "out"]
    change(tmp_path, command)
    device = [] if "--device" in command else ["--device", "cpu"]
    with shapes_unchecked():
        assert main(["evidence", *map(str, command), *device]) == 2
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_first_heads_of_a_ranking(tmp_path, k):
    run = run_folder(tmp_path / "r", None, {"region": ["L1H3", "L0H2", "L1H0"]}, (2, 4), hashed="x")
    assert list(map(str, _ranked(run, ["region"], "set", k)["region"]))[:3] == ["L1H3", "L0H2", "L1H0"][:k] and len(_ranked(run, ["region"], "set", k)["region"]) == k
    assert list(map(str, _ranked(run, ["region"], "set", 0)["region"])) == ["L1H3", "L0H2", "L1H0"]  # by rank, though sets are kept in order of layers
