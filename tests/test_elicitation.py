"""Elicitation: regions had by asking before they are written, and the heads that make it so, against the oracle."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from decisionheads import DecisionModel, InputError, LabelSpace, Span, Transcript, plots, tiny
from decisionheads.branches import Branch, branch_logits
from decisionheads.cues import cued_codes
from decisionheads.elicitation import elicit, leads, read_codes
from decisionheads.elicitation_heads import _cuts_of, _mean_z, _measure, _member, elicitation_heads
from decisionheads.transcripts import encode

from . import oracle
from .bpe import bpe, token
from .conftest import FIRST_FAMILY, plain_hf

CUE = "\ncue {number}:"


@pytest.fixture(scope="module")
def texts(model):
    return tiny.generate(model, 6, seed=41)


@pytest.fixture(scope="module")
def asked(model, texts, space):
    return elicit(model, texts, space, cue=CUE, most=60)


def region_margin(plain, tokenizer, kept, number: int, region: str, candidates) -> float:
    """The margin of a region of the clinic after a cue, by one full forward of the plain model."""
    ids = [*map(int, kept), *tokenizer(f"\ncue {number}:", add_special_tokens=False)["input_ids"]]
    logits = oracle.logits(plain, ids)[-1]
    own, others = tokenizer.convert_tokens_to_ids(f" {region}"), {f" {label.split('-')[0]}" for label in candidates} - {f" {region}"}
    return float(logits[own] - max(logits[tokenizer.convert_tokens_to_ids(other)] for other in others))


# -- margins ------------------------------------------------------------------------------------------


def test_margins_at_cuts_equal_the_oracle(model, plain, texts, asked):
    by_id = {t.id: t for t in texts}
    seen = []
    for row, code in list(enumerate(asked.codes))[::4]:
        t = by_id[code.transcript]
        ids = encode(t, model.tokenizer).ids
        want = lambda position, t=t, code=code, ids=ids: region_margin(plain, model.tokenizer, ids[:position], code.number, code.region, t.candidates)  # noqa: E731
        label_at = encode(t, model.tokenizer).tokens_in(t.text.index(code.label, t.answer_start), t.text.index(code.label, t.answer_start) + 1)[0]
        mention_at = code.tokens[0]
        for k in (1, 2, 7, code.distance):
            assert asked.margins[row, k - 1] == pytest.approx(want(label_at - k), abs=1e-4)
            seen.append(want(label_at - k))
        for j in (0, 2):
            assert asked.before[row, j] == pytest.approx(want(mention_at - j), abs=1e-4)
            seen.append(want(mention_at - j))
        assert np.isfinite(asked.margins[row]).sum() == code.distance  # every token between the two, and none beyond
    assert min(np.abs(seen)) > 1e-3 and min(seen) < -1 and max(seen) > 5


def test_margins_with_another_note_equal_the_oracle(model, plain, texts, asked):
    """The note of the next transcript by id; the reasoning stays."""
    t, donor = sorted(texts, key=lambda t: t.id)[:2]
    note = lambda x: next(x.text[s.start:s.end] for s in x.spans if s.name == "note")  # noqa: E731
    swapped = replace(t, prompt=t.prompt.replace(note(t), note(donor)), spans=())
    ids = encode(swapped, model.tokenizer).ids
    row, code = next((i, c) for i, c in enumerate(asked.codes) if c.transcript == t.id)
    at = encode(swapped, model.tokenizer).tokens_in(swapped.text.index(code.label, swapped.answer_start), swapped.text.index(code.label, swapped.answer_start) + 1)[0]
    for k in (1, 9, code.distance):
        want = region_margin(plain, model.tokenizer, ids[:at - k], code.number, code.region, t.candidates)
        assert asked.note[row, k - 1] == pytest.approx(want, abs=1e-4) and abs(want - asked.margins[row, k - 1]) > 1e-3
    alone = elicit(model, [t], tiny.labels(), cue=CUE, most=3)
    assert np.isnan(alone.note).all() and alone.summary()["baselines"]["note_replaced"]["right"] is None  # no other note to be had


def test_order_and_packs_change_nothing(model, texts, space, asked):
    again = elicit(model, texts[::-1], space, cue=CUE, most=60, memory=10**6)
    assert [(c.transcript, c.label) for c in again.codes] == [(c.transcript, c.label) for c in asked.codes]
    for name in ("margins", "note", "before"):
        np.testing.assert_allclose(getattr(again, name), getattr(asked, name), atol=1e-4)
    assert again.summary() == asked.summary()
    events = [model.find_events(t, space).events for t in texts]
    few = [model.read(t, e if i % 2 else e[:1]) for i, (t, e) in enumerate(zip(texts, events, strict=True))]  # some read to their first event only
    np.testing.assert_allclose(elicit(model, few, space, cue=CUE, most=60).margins, asked.margins, atol=1e-4)


def test_the_trained_models_can_be_asked_from_the_mention_on(model, family, texts, space, asked):
    """And not before it. gpt2 is thrown off the cue where its own line has just begun with the same number."""
    s = asked.summary()
    assert s["elicitable"]["share"] == 1.0 and s["baselines"]["before_mention"]["right"] < 0.35 and s["baselines"]["chance"] == pytest.approx(1 / 6, abs=1e-6)
    assert s["mentions"] == len(texts) * 3 and s["dropped"] == {"codes": {}, "cuts": {}, "transcripts": {}}
    inside = elicit(model, texts, space, cue=CUE, most=60, where="answer")
    assert (inside.lead == [c.distance for c in inside.codes]).all() and inside.summary()["lead"]["to_the_mention"] == len(inside.codes)
    wrong = [(c, k + 1) for c, row in zip(asked.codes, asked.margins, strict=True) for k in np.flatnonzero(row <= 0)]
    by_id = {t.id: encode(t, model.tokenizer) for t in texts}
    last = {model.tokenizer.decode(by_id[c.transcript].ids[next(x.position for x in c.cuts if x.k == k) - 1]) for c, k in wrong}
    assert last == ({":"} if family == "gpt2" else set())


def test_near_misses_make_the_stratum_in_which_the_region_was_named(texts, asked):
    by_id = {t.id: t for t in texts}
    for code, named in zip(asked.codes, asked.named, strict=True):
        t = by_id[code.transcript]
        whole, reasoning = t.text[t.reasoning_start:], t.reasoning
        assert named.any() == (f" {code.region}-" in reasoning)
        if named.any():  # from the near-miss on; k falls as the text goes on
            assert named[0] and not named[code.distance - 1] and whole.index(f"{code.region}-") > whole.index(t.text[code.start:code.end])
    s = asked.summary()["strata"]
    assert s["named"]["cuts"] + s["not_named"]["cuts"] == np.isfinite(asked.margins).sum() and 0 < s["named"]["elicitable"]["n"] < len(asked.codes)


def test_what_comes_back_can_be_kept_and_shown(asked):
    s = json.loads(json.dumps(asked.summary()))
    frame = asked.to_frame()
    assert len(frame) == s["mentions"] and (frame.lead == asked.lead).all() and (frame.cuts <= frame.distance).all()
    assert s["right_by_k"][1]["share"] == pytest.approx((asked.margins[:, 1] > 0).mean(), abs=1e-6)
    assert s["lead"]["low"] <= s["lead"]["mean"] == pytest.approx(asked.lead.mean(), abs=1e-6) and s["lead"]["mean"] <= s["lead"]["high"] and s["lead"]["capped"] == 0
    assert "100% elicitable" in repr(asked) and s["elicitable"]["low"] < 1 == s["elicitable"]["high"]
    figure = plots.elicitation_lead(s)
    assert f"100% of {len(frame)} regions" in figure.layout.title.text and figure.layout.xaxis.range[0] > figure.layout.xaxis.range[1] == 0
    lines = {d.name: d for d in figure.data}
    assert list(lines["right"].y) == [r["share"] for r in s["right_by_k"]] and set(lines["chance"].y) == {s["baselines"]["chance"]}


def test_leads_by_hand():
    n = np.nan
    margins = np.array([[1, 2, 1, n], [1, -1, 2, 2], [-1, 2, 2, 2], [1, n, 2, -1], [0, 1, n, n], [1, 1, 1, 1], [n, n, n, n]], np.float32)
    assert leads(margins).tolist() == [3, 1, 0, 3, 0, 4, 0]


# -- cues and cuts --------------------------------------------------------------------------------------

ICD = LabelSpace(["I50.9", "I51.1", "I10", "J44.9"], descriptions={"I50.9": "Heart failure"})


def note(reasoning: str, answer: str = "answer: I50.9\n", **more) -> Transcript:
    return Transcript("t", "codes:\n", reasoning, answer, **more)


def codes_of(transcript: Transcript, cue: str = "\nregion {number}:", labels: LabelSpace = ICD, **options):
    return cued_codes(transcript, labels, bpe(), cue=cue, **options)


def test_a_region_of_several_tokens_has_a_step_for_each():
    (code,), dropped, cuts_dropped = codes_of(note(" he has heart failure, so\n"))
    target = code.cuts[0].target
    assert bpe().decode(target.tokens) == "\nregion 1: I5" and not dropped and not cuts_dropped
    assert [(target.ids[s.chosen], sorted(target.ids[a] for a in s.against)) for s in target.steps] == [
        (token(" I"), [token(" J")]), (token("5"), [token("1")]), (token("0"), [token("1")])]
    assert [s.row for s in target.steps] == [len(target.tokens) - 3, len(target.tokens) - 2, len(target.tokens) - 1]
    assert len({id(c.target) for c in code.cuts}) == 1 and code.chance == pytest.approx(1 / 4)


@pytest.fixture(scope="module")
def spelled(tmp_path_factory):
    """A small random model that spells codes, and a text."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("spelled")
    torch.manual_seed(5)
    hf = GPT2LMHeadModel(GPT2Config(vocab_size=len(bpe()), n_embd=32, n_layer=2, n_head=4, n_positions=96, bos_token_id=1, eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    for p in hf.parameters():
        if p.ndim > 1:
            p.data.normal_(0, 0.4)
    hf.save_pretrained(folder), bpe().save_pretrained(folder)
    return DecisionModel.from_pretrained(folder), plain_hf(folder), note(" he has heart failure, so\n")


def test_the_margin_of_several_tokens_is_that_of_the_weakest(spelled):
    spelling, plain, t = spelled
    found = elicit(spelling, [t], ICD, cue="\nregion {number}:", most=9)
    ids, at = encode(t, bpe()).ids, encode(t, bpe()).tokens_in(t.text.index("I50.9"), len(t.text))[0]
    weakest = set()
    for k in range(1, 10):
        logits = oracle.logits(plain, [*map(int, ids[:at - k]), *bpe()("\nregion 1: I50", add_special_tokens=False)["input_ids"]])
        steps = [float(logits[i][token(a)] - logits[i][token(b)]) for i, a, b in ((-4, " I", " J"), (-3, "5", "1"), (-2, "0", "1"))]
        assert found.margins[0, k - 1] == pytest.approx(min(steps), abs=1e-4)
        weakest.add(int(np.argmin(steps)))
    assert weakest == {0, 1, 2}


def test_a_cut_whose_tokens_the_cue_would_change_is_left_out_and_counted():
    """" di" and the cue "sease" are one token together."""
    t = note(" he has heart failure, a disorder\n")
    (plain_cut,), _, none = codes_of(t)
    (code,), dropped, cuts_dropped = codes_of(t, "sease {number}:")
    encoded = encode(t, bpe())
    lost = {c.k for c in plain_cut.cuts} - {c.k for c in code.cuts}
    assert not none and not dropped and cuts_dropped == {"the cue changes the tokens before it": len(lost)}
    assert {bpe().decode(encoded.ids[next(c.position for c in plain_cut.cuts if c.k == k) - 1]) for k in lost} >= {" di"} and len(code.cuts) > 5
    for cut in code.cuts:  # what is left really stays
        whole = bpe()(t.text[:encoded.offsets[cut.position - 1, 1]] + "sease 1: I50.9", add_special_tokens=False)["input_ids"]
        assert whole[:cut.position] == encoded.ids[:cut.position].tolist() and tuple(whole[cut.position:][:len(cut.target.tokens)]) == cut.target.tokens


def test_a_mention_is_a_span_or_a_description_or_the_label_itself():
    t = note(" first I50.9? a HEART FAILURE, yes\n")
    words = lambda t, **more: t.text[slice(*next((c.start, c.end) for c in codes_of(t, **more)[0]))]  # noqa: E731
    assert words(t) == "I50.9" and words(note(" a HEART FAILURE, I50.9\n")) == "HEART FAILURE"
    at = t.text.index("yes")
    assert words(replace(t, spans=(Span("mention", 0, 5, "I50.9"), Span("mention", at, at + 3, "I50.9"), Span("mention", 9, 12, "I10")))) == "yes"
    assert words(t, labels=LabelSpace(ICD.labels)) == "I50.9"
    answer = "answer: I10, J44.9, I50.9, I10\n"
    found, dropped, _ = codes_of(note(" J44.9? heart failure.\n", answer, candidates=("I10", "I50.9")))
    assert [(c.label, c.number) for c in found] == [("I50.9", 3)] and dropped == {"not mentioned in the reasoning": 1, "not among the candidates": 1}
    assert codes_of(note(" I50.9", " I50.9\n"), where="answer")[1] == {"nothing stands between mention and code": 1}
    assert codes_of(note(" I50.9 it is\n", candidates=("I50.9",)))[1] == {"nothing else alive": 1}


def test_cuts_count_back_from_the_code_or_from_the_answer():
    t = note(" so a heart failure, yes\n", "the answer is I50.9\n")
    encoded = encode(t, bpe())
    kept = lambda code: [t.text[:encoded.offsets[c.position - 1, 1]] for c in code.cuts]  # noqa: E731
    (code,), _, _ = codes_of(t, most=3)
    (whole,), _, _ = codes_of(t)
    (early,), _, _ = codes_of(t, where="answer")
    assert [c.k for c in code.cuts] == [1, 2, 3] and code.distance == whole.distance > 3 and encoded.ids[code.cuts[0].position + 1] == token(" I")
    assert kept(whole)[-1].endswith("heart failure") and kept(early)[-1] == kept(whole)[-1] and kept(early)[0].endswith("yes")
    before = [t.text[:encoded.offsets[c.position - 1, 1]] for c in whole.before]
    assert before[0].endswith("so a") and before[-1] == "codes:\n" and len(before) <= len(whole.cuts)


@pytest.mark.parametrize("cue", ["\nwhat is heart failure?", "\nregion {number}, like I50.9:", "\nHEART FAILURE is", "\n{finding}:", "\n{:", "", "  "])
def test_a_cue_that_restates_or_cannot_be_filled_in_is_refused(cue):
    with pytest.raises(InputError, match="the cue"):
        codes_of(note(" he has heart failure, so\n"), cue)
    assert codes_of(note(" he has heart failure, so\n"), "\nregion, like J44.9:")[0]  # of another region: nothing is given away


def test_texts_that_cannot_be_read_are_set_aside(spelled):
    spelling, _, t = spelled
    long = replace(t, id="long", reasoning=t.reasoning + " so it is" * 20)
    wrong = replace(t, id="wrong", token_ids=(1, 2, 3))
    found = elicit(spelling, [long, t, wrong], ICD, cue="\nregion {number}:", most=5)
    assert [c.transcript for c in found.codes] == ["t"] and list(found.set_aside) == ["wrong"]
    assert found.cuts_dropped == {"longer than the model can read": 5} and found.dropped == {"longer than the model can read": 1}
    nothing = elicit(spelling, [wrong], ICD, cue="\nregion {number}:")
    assert repr(nothing).startswith("Elicitation(no mention") and json.dumps(nothing.summary()) and "no code" in plots.elicitation_lead(nothing.summary()).layout.title.text
    for options, said in ((dict(where="prompt"), "unknown place 'prompt'"), (dict(most=0), "most=1 or more")):
        with pytest.raises(InputError, match=said):
            elicit(spelling, [t], ICD, cue="\nregion:", **options)
    with pytest.raises(InputError, match="id 't' is used more than once"):
        elicit(spelling, [t, t], ICD, cue="\nregion:")


def test_a_text_whose_rows_are_not_exact_is_set_aside(spelled, monkeypatch):
    from decisionheads._hooked import Hooked

    real = Hooked.prefill

    def prefill(self, ids, *a, **k):
        prefix = real(self, ids, *a, **k)
        return replace(prefix, logits=prefix.logits + 0.1 * prefix.logits.roll(1, -1))

    monkeypatch.setattr(Hooked, "prefill", prefill)
    found = elicit(spelled[0], [spelled[2]], ICD, cue="\nregion {number}:", most=5)
    assert not found.codes and "the rows of a cue differ from the plain model" in found.set_aside["t"]


# -- heads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["cut", "cue"])
def test_effects_at_cuts_of_equal_the_oracle(model, plain, texts, space, at):
    """One full forward with z set at one token, the cue run again after it."""
    read, *_ = read_codes(model, texts[:4], space, cue=CUE, most=60, where="answer")
    cuts = [c for c in _cuts_of(model, read, space, at, Counter(), 10**8) if c.nulls]
    zbar = _mean_z(model, [(c.text, c.event) for c in cuts], at)
    where = lambda m: m.position - 1 if at == "cut" else m.position + len(m.target.tokens) - 1  # noqa: E731
    fed = lambda c, m: [*map(int, c.text.encoded.ids[: m.position]), *m.target.tokens]  # noqa: E731
    np.testing.assert_allclose(zbar, torch.stack([oracle.z_of(plain, fed(c, c.event), where(c.event)) for c in cuts]).mean(0), atol=1e-5)
    largest = 0.0
    for c in cuts[:3]:
        for m in (c.event, c.nulls[0]):
            clean, floor, effects = _measure(model, c.text, (m,), zbar, at, 10**7)
            margin = lambda logits, m=m: float(logits[m.target.ids[m.margin.chosen]] - logits[m.target.ids[m.margin.against[0]]])  # noqa: E731
            ids = fed(c, m)
            assert clean[0] == pytest.approx(margin(oracle.logits(plain, ids)[-1]), abs=1e-4) and clean[0] == pytest.approx(m.value, abs=1e-4)
            if at == "cue":
                assert floor[0] == pytest.approx(margin(oracle.all_ablated(plain, ids, where(m), zbar)), abs=1e-4)
            for head in (0, 2, 12, 17, 30):
                with oracle.z_set(plain, head // 8, head % 8, where(m), zbar[head // 8, head % 8]):
                    want = clean[0] - margin(oracle.logits(plain, ids)[-1])
                assert effects[0, head] == pytest.approx(want, abs=1e-4)
                largest = max(largest, abs(want))
    assert largest > 1


@pytest.mark.parametrize("at", ["cut", "cue"])
def test_effects_on_the_weakest_of_several_tokens_equal_the_oracle(spelled, at):
    """The step is fixed in the clean run, whatever row it is read from; at the cue, z is replaced in that row."""
    spelling, plain, t = spelled
    (text,), *_ = read_codes(spelling, [t], ICD, cue="\nregion {number}:", most=9, where="code")
    zbar, rows = np.random.default_rng(0).normal(0, 1, (2, 4, 8)).astype(np.float32), set()
    moved = []
    for cut in text.codes[0].cuts:
        logits = next(rows for _, rows in branch_logits(spelling.hooked, text.prefix, [Branch(cut.position, cut.target.tokens, (), cut.target.ids)]))
        member = _member((cut.position, cut.target), logits, answered=False)
        clean, floor, effects = _measure(spelling, text, (member,), zbar, at, 10**7)
        ids = [*map(int, text.encoded.ids[: cut.position]), *cut.target.tokens]
        where, read_at = cut.position - 1 if at == "cut" else cut.position + member.row, cut.position + member.row
        chosen, rival = (cut.target.ids[i] for i in (member.margin.chosen, *member.margin.against))
        margin = lambda logits, a=chosen, b=rival, row=read_at: float(logits[row][a] - logits[row][b])  # noqa: E731
        assert clean[0] == pytest.approx(margin(oracle.logits(plain, ids)), abs=1e-4)
        with oracle.z_set(plain, 0, 2, where, zbar[0, 2]):
            want = clean[0] - margin(oracle.logits(plain, ids))
        assert effects[0, 2] == pytest.approx(want, abs=1e-4)
        rows.add(member.row), moved.append(abs(want))
    assert len(rows) == 3 and np.median(moved) > 0.01


def test_nulls_are_other_cuts_at_which_the_region_can_be_had(model, texts, space):
    read, *_ = read_codes(model, texts, space, cue=CUE, most=60, where="code")
    left_out = Counter()
    cuts = [c for c in _cuts_of(model, read, space, "cut", left_out, 10**8)]
    assert len(cuts) + sum(left_out.values()) == sum(len(t.codes) for t in read) and len(cuts) > 10
    for c in cuts:
        t, ids = c.text.transcript, c.text.encoded
        labels = {i for m in space.mentions(t.text, t.reasoning_start) for i in ids.tokens_in(m.start, m.end)}
        assert 2 <= len(c.nulls) <= 5 and len({m.position for m in c.nulls}) == len(c.nulls) and c.event.value > 0
        assert all(m.value > 0 and m.position - 1 not in labels and m.position != c.event.position for m in c.nulls)
        apart = [abs(m.value - c.event.value) for m in c.nulls]
        assert apart == sorted(apart)
    short, *_ = read_codes(model, texts, space, cue=CUE, most=4, where="answer")
    left_out = Counter()
    assert all(c.event.position - 1 <= max(k.tokens[1] for k in c.text.codes) for c in _cuts_of(model, short, space, "cut", left_out, 10**8))
    assert set(left_out) == {"its lead is longer than was asked for"}


@pytest.fixture(scope="module")
def found(model, space):
    return elicitation_heads(model, tiny.generate(model, 28, seed=42), space, cue=CUE, most=60, where="answer", draws=999, minimum=10)


@FIRST_FAMILY
def test_the_heads_that_write_a_finding_down_are_found_in_the_first_two_layers(found, family):
    """What binds a step's number to its finding; and without them the region is lost where it was written at the cut."""
    writer = {"llama": (1, 4), "gpt2": (1, 7)}[family]
    assert (0, 0) in found.selected and writer in found.selected and len(found.selected) <= 10
    top = found.table.set_index(["layer", "head"]).loc[[(0, 0), writer]]
    assert (top.effect > 1).all() and (top.null_effect.abs() < 0.2).all() and (top.p_maxt < 0.05).all()
    held = found.summary["held_out"]
    assert held["right_without_selected"] < 0.9 < held["right_without_random"] and held["events"] > 20
    assert found.layers.selected.sum() == len(found.selected) and found.layers.effect_share.sum() == pytest.approx(1) and found.layers.effect_share[:2].sum() > 0.9
    assert json.dumps(found.summary) and "at the cut" in repr(found) and not found.summary["unbalanced"]


def test_too_few_cuts_of_and_unknown_places(model, texts, space):
    with pytest.raises(InputError, match="lead cuts in the reference split"):
        elicitation_heads(model, texts, space, cue=CUE)
    with pytest.raises(InputError, match="unknown place 'end'"):
        elicitation_heads(model, texts, space, cue=CUE, at="end")
