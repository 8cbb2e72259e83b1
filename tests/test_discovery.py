"""Discovery end to end on the embedded models."""

from __future__ import annotations

import numpy as np
import pytest

from decisionheads import DecisionModel, InputError, tiny
from decisionheads.discovery import discover
from decisionheads.null_tokens import first_generated, null_positions, template_ids, token_class
from decisionheads.survey import match_kind, split, survey
from decisionheads.transcripts import Transcript, encode

from .conftest import FIRST_FAMILY, shapes_unchecked


@pytest.fixture(scope="module")
def written(model):
    return tiny.generate(model, 60, seed=21)


@pytest.fixture(scope="module")
def found(family, model, space):
    with shapes_unchecked():
        return discover(model, tiny.generate(model, 88, seed=21), space, seed=["llama", "gpt2"].index(family), caliper=0.5, minimum=10, draws=1999, random_sets=20, held_out=24)


@FIRST_FAMILY
def test_each_kind_has_heads_and_most_are_not_selected(found):
    assert set(found.kinds) == {"region", "label", "departure"} and not found.set_aside
    assert sum(len(result.selected) > 0 for result in found.kinds.values()) >= 2
    for kind, result in found.kinds.items():
        assert len(result.selected) <= 16, kind
        assert np.isclose(result.table.query("selected").effect.min(), result.table.query("selected").effect.abs().min())  # all support


@FIRST_FAMILY
def test_the_sets_are_needed_and_enough_on_held_out_texts_and_random_sets_are_not(found):
    standing = found.standing
    assert set(standing.judged) == {*found.kinds, "global"} and len(standing.judged["global"].transcripts) == 24
    for kind, result in found.kinds.items():
        s = result.summary
        assert s["transcripts"] >= 20 and s["events"] == len(standing.judged[kind].carried) and s["set_size"] == len(standing.selections[kind].heads)
        if s["set_size"]:
            assert s["kept"] <= 0.75 and s["kept_without_random"] >= 0.75 and s["recovery"]["pooled"] >= 0.6 and abs(s["recovery"]["random"]) <= 0.2
    whole = found.standing.summary("global")
    assert whole["sufficient"]["share"] >= 0.8 and whole["necessity"]["pooled"] >= 0.7 and whole["necessary"]["low"] < whole["necessary"]["share"]


@FIRST_FAMILY
def test_near_miss_heads_lose_their_effect_with_the_near_miss_and_not_with_the_list_and_the_reverse(found):
    near, region = found.standing.families.near_miss, found.standing.families.region
    assert 1 <= len(near) <= 5 and 1 <= len(region) <= 10
    rows = {(d["family"], d["kind"]): d for d in found.standing.dissociations()}
    for key in (("near-miss", "departure"), ("region", "region")):
        assert rows[key]["difference"] > 0.5 and rows[key]["low"] > 0.2, key
    for name, blocked in found.standing.blocked:
        if blocked.kind != "label":
            assert blocked.removed("before softmax")[1] > 0.6 and abs(blocked.removed("other family's span")[1]) < 0.2, name


@FIRST_FAMILY
def test_sets_are_judged_on_texts_that_did_not_select_them(found):
    selection, evaluation = set(found.splits["selection"]), set(found.splits["evaluation"])
    for kind, s in found.standing.selections.items():
        assert s.seen <= selection and set(found.standing.judged[kind].transcripts) <= evaluation


@FIRST_FAMILY
def test_summaries_say_what_was_done(found):
    assert any("within 0.5 standard deviations" in note for note in found.warnings) and any("1999 permutations" in note for note in found.warnings)
    assert any("held against 20 random ones" in note for note in found.warnings)
    for result in found.kinds.values():
        s, seen = result.summary, result.summary["selection"]
        assert seen["calibrated_events"] + seen["left_out"] == seen["events"] and seen["m"] > seen["m0"] and s["m"] > s["m0"]
        assert s["knock_in"] is None if not s["set_size"] else s["knock_in"]["identity"] == 0.0 and s["knock_in"]["shift"] > abs(s["knock_in"]["random_shift"]) + 1
        assert seen["reference_agreement"]["resample"] > 0.5 and {"resample", "generated", "zero"} <= set(seen["reference_agreement"])
    assert "selected region" in repr(found) and len(found.to_frame()) == 96
    best = found.kinds["region"].table.query("selected").iloc[0]
    assert f"selected region: L{best.layer}H{best['head']}" in repr(found)  # the strongest first
    tables = found.standing.tables()
    assert set(tables) == {"texts", "phase_matrix", "references", "stability", "knock_in", "reads", "read_blocking"} and all(len(t) for t in tables.values())
    assert set(tables["references"]["reference"]) == {"mean", "resample", "generated", "zero", "from the answer on"}
    assert set(tables["phase_matrix"]["ablated"]) == {*found.kinds, "global"} and tables["stability"]["jaccard"].between(0, 1).all()


def test_the_same_seed_gives_the_same_tables_and_order_changes_nothing(model, written, space):
    options = dict(kinds=("departure",), caliper=0.5, minimum=6, draws=199, together=False)
    some = written[:50]
    with shapes_unchecked():
        once, again = discover(model, some, space, **options), discover(model, some[::-1], space, **options)
    table = lambda d: d.kinds["departure"].table.drop(columns=["ci_low", "ci_high"])  # noqa: E731
    assert once.splits.keys() == again.splits.keys() and all(sorted(once.splits[k]) == sorted(again.splits[k]) for k in once.splits)
    a, b = table(once).set_index(["layer", "head"]).sort_index(), table(again).set_index(["layer", "head"]).sort_index()
    np.testing.assert_allclose(a["effect"], b["effect"], atol=1e-4)
    np.testing.assert_allclose(a["statistic"], b["statistic"], atol=1e-2)


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_pseudo_events_find_no_heads(model, written, space):
    """Random null words called events: what is left is chance (benchmarks/pseudo_events.py runs 20 of these)."""
    some = written[:60]
    with shapes_unchecked():
        result = discover(model, some, space, caliper=0.5, minimum=6, draws=999, together=False, pseudo=True)
        real = discover(model, some, space, caliper=0.5, minimum=6, draws=99, together=False).events
    events = result.events
    assert len(events) > 40 and not {*zip(events.transcript, events.position, strict=True)} & {*zip(real.transcript, real.position, strict=True)}
    assert min(r.calibration.p_maxt.min() for r in result.kinds.values()) > 0.01
    assert sum(len(r.selected) for r in result.kinds.values()) <= 1


# -- parts --------------------------------------------------------------------------------------------


def test_splits_are_disjoint_seeded_and_keep_groups_together():
    texts = [Transcript(str(i), "p", "", "a", group=f"g{i // 3}") for i in range(60)]
    parts = split(texts, 0)
    sizes = {name: len(part) for name, part in parts.items()}
    assert sizes == {"reference": 12, "selection": 24, "evaluation": 24}
    groups = [{t.group for t in part} for part in parts.values()]
    assert not (groups[0] & groups[1] or groups[0] & groups[2] or groups[1] & groups[2])
    assert split(texts[::-1], 0)["reference"][::-1] == parts["reference"] and split(texts, 1)["reference"] != parts["reference"]


def test_null_tokens_are_generated_and_of_no_label(model, written, space):
    tokenizer, t = model.tokenizer, written[0]
    encoded = encode(t, tokenizer)
    template = template_ids([(x, encode(x, tokenizer)) for x in written], tokenizer.all_special_ids)
    assert {tokenizer.decode([i]) for i in template} >= {"step", "code", "answer", "<end>"}
    positions = null_positions(t, encoded, space.subset(t.candidates), template, tokenizer)
    words = [t.text[slice(*encoded.offsets[p + 1])] for p in positions]
    assert min(positions) >= first_generated(t, encoded) - 1 and len(positions) > 20
    assert not any(w.strip() and (w.strip() in tiny.clinic.REGIONS or w in tiny.clinic.LEAVES) for w in words) and " clear" in words + [" clear"]
    assert not {"step", "code"} & set(words)
    assert [token_class(x) for x in (" fever", "-mi", " 1", ":", "\n")] == ["word", "word", "digit", "punctuation", "space"]


def test_nulls_come_from_the_events_own_transcript_and_class(model, written, space):
    from decisionheads.survey import Options

    template = template_ids(((t, encode(t, model.tokenizer)) for t in written), model.tokenizer.all_special_ids)
    surveys = [survey(model, t, space, (), template, Options()) for t in written[:20]]
    matched = match_kind(surveys, "departure", 0.5)
    owner = [i for i, s in enumerate(surveys) for _ in s.nulls.positions]
    classes = [c for s in surveys for c in s.nulls.classes]
    events = [i for i, s in enumerate(surveys) for e in s.reading.events if e.kind == "departure"]
    assert len(matched.kept) >= 8
    for e, nulls in zip(events, matched.nulls, strict=True):
        assert all(owner[j] == e and classes[j] == "word" for j in nulls)


def test_choices_that_lost_are_dropped_on_greedy_output_only(model, written, space):
    from decisionheads.survey import Options

    t = written[0]
    given = space.mentions(t.text, t.answer_start)[0]
    other = next(c for c in t.candidates if c != given.label and c.split("-")[0] == given.label.split("-")[0])
    wrong = Transcript("w", t.prompt, t.reasoning, t.answer.replace(given.label, other, 1), t.candidates, spans=())
    strict, lenient = (survey(model, wrong, space, (), frozenset(), Options(greedy=g)) for g in (True, False))
    assert len(strict.reading.events) < len(lenient.reading.events)
    assert "not the best among live tokens" in {d.reason for d in strict.dropped}


def test_too_few_transcripts(model, written, space):
    with pytest.raises(InputError, match="are too few"):
        discover(model, written[:5], space)
    with pytest.raises(InputError, match="30 are needed"):
        discover(model, written[:20], space)
    with pytest.raises(TypeError):
        discover(model, written, space, level=0.1)


def test_tokens_written_while_labels_were_alive_are_no_nulls():
    from decisionheads import LabelSpace

    from .bpe import bpe

    space = LabelSpace(["I50.9", "I50.23", "I10", "J44.9"])
    t = Transcript("t", "codes:", " a I50 or I50.8 case\n", " I50.8, I10\n")
    encoded = encode(t, bpe())
    words = [t.text[slice(*encoded.offsets[p + 1])] for p in null_positions(t, encoded, space, frozenset(), bpe())]
    assert " I" not in words and "5" not in words and "a" in "".join(words) and "case" in "".join(words)


def test_a_text_longer_than_the_context_is_set_aside(model, written, space):
    from dataclasses import replace

    long = [replace(t, prompt="- slept well\n" * 80 + t.prompt, spans=()) if i == 5 else t for i, t in enumerate(written[:40])]
    result = discover(model, long, space, caliper=0.5, minimum=4, draws=99, kinds=("departure",), together=False)
    assert list(result.set_aside) == [written[5].id] and "longer than the 320" in result.set_aside[written[5].id]


def test_a_negative_floor_selects_no_negative_effect():
    from decisionheads.calibration import Calibration
    from decisionheads.scoring import head_table

    small = np.full(2, 0.001)
    calibration = Calibration(np.array([5.0, 4.0]), small, small, small, small, 30, np.zeros(9))
    columns = {k: np.array([-0.2, 0.3]) for k in ("effect", "ci_low", "ci_high", "null_effect", "attribution", "dla", "resample")}
    table = head_table("region", (1, 2), columns, calibration, 0.05, 0.0)
    assert table.set_index("head").selected.to_dict() == {0: False, 1: True}


def test_texts_without_any_null_are_refused_in_one_sentence(model, written, space):
    from dataclasses import replace

    bare = [replace(t, reasoning="", answer="answer\n" + "\n".join(f"code {m.label}" for m in space.mentions(t.text, t.answer_start)) + "\n", spans=()) for t in written[:40]]
    with pytest.raises(InputError):
        discover(model, bare, space, minimum=2, greedy=False, kinds=("departure",), together=False)


def test_a_transcript_whose_rows_are_not_exact_is_set_aside(model, written, space, monkeypatch):
    from dataclasses import replace

    from decisionheads._hooked import Hooked

    real, bad = Hooked.prefill, encode(written[7], model.tokenizer).ids[:150]

    def prefill(self, ids, *a, **k):
        prefix = real(self, ids, *a, **k)
        return replace(prefix, logits=prefix.logits + 0.1 * prefix.logits.roll(1, -1)) if ids[:150].tolist() == bad.tolist() else prefix

    monkeypatch.setattr(Hooked, "prefill", prefill)
    result = discover(model, written[:40], space, caliper=0.5, minimum=4, draws=99, kinds=("region",), greedy=False, together=False)
    assert list(result.set_aside) == [written[7].id] and "packed rows differ" in result.set_aside[written[7].id]


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_in_sixteen_bits_the_noise_floor_is_printed_and_effects_below_it_are_marked(space, tmp_path, written):
    from dataclasses import asdict

    from decisionheads import tiny
    from decisionheads.survey import Options
    from decisionheads.workflow import run, show

    half = DecisionModel.from_pretrained(tiny.path("llama"), dtype="bfloat16")
    options = Options(caliper=1.0, minimum=4, draws=99, kinds=("region",), greedy=False, random_sets=2)
    run(half, written[:40], space, tmp_path / "run", {"model": "llama", "options": asdict(options)}, options, 2**28, with_text=False, progress=False)
    shown = show(tmp_path / "run", most=32)
    assert "~ below the noise of 16-bit arithmetic: region 0." in shown
    marked = [line.startswith("~") for line in shown.splitlines() if line[2:3] == "L" and line[:1] in "~ "]
    assert any(marked) and not all(marked)
    assert "what rounding in 16 bits does" in (tmp_path / "run" / "report.html").read_text()
