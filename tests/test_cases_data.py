"""Known failures of this trade, each a test named after its case: labels, margins, statistics, offsets, distances, codes.

The small input of the case with the value that is right, and the kind that it stands for.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decisionheads import DecisionModel, InputError, LabelSpace, Margin, Span, Transcript, find_events, fix_margin, load_transcripts, tiny
from decisionheads.calibration import Sets, calibrate, p_value
from decisionheads.corpora import Note, mdace, mimic_iv
from decisionheads.corpora.codes import dotted
from decisionheads.corpora.icd10cm import about_file, check, edition, icd10cm_labels, normalise
from decisionheads.corpora.prepare import prepare
from decisionheads.distillation.loss import mistill_loss
from decisionheads.evidence.texts import texts_of_notes, units_of
from decisionheads.generation import Generating
from decisionheads.heads import HeadScores
from decisionheads.prompts import Layout, Prompter
from decisionheads.transcripts import encode

from .bpe import bpe, token
from .null_worlds import world

CODES = ["E11.9", "I50.1", "I50.9", "J44.9"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"


def events(answer: str, labels, **options):
    return find_events(Transcript("t", "Diagnosis code:", "", answer), LabelSpace(labels), bpe(), **options).events


@pytest.fixture
def chat():
    tokenizer = bpe()
    tokenizer.chat_template = TEMPLATE
    yield tokenizer
    tokenizer.chat_template = None


# -- tokens, labels, margin ----------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["Give the code.", "x", "I50.9 or I10?\n\nNote: é"])
def test_e1_chat_text_has_the_ids_of_the_chat_template_and_one_bos(chat, content):
    messages = [{"role": "user", "content": content}]
    want = chat.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    t = Transcript.from_record({"id": "a", "messages": messages, "answer": "I10"}, chat)
    ids = encode(t, chat).ids.tolist()
    assert ids[:len(want)] == want and ids.count(chat.bos_token_id) == 1
    prompt = Prompter(LabelSpace(CODES), chat, Layout("compact", "Give codes.")).prompt(Note("n", content), 0, None)
    assert encode(Transcript("p", prompt.text, "", ""), chat).ids.tolist().count(chat.bos_token_id) == 1


def test_e1_a_tokenizer_that_adds_a_bos_of_its_own_adds_none_to_chat_text(chat):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer.from_str(chat.backend_tokenizer.to_str())
    core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    messages = [{"role": "user", "content": "Give the code."}]
    t = Transcript.from_record({"id": "a", "messages": messages, "answer": "I10"}, tokenizer)
    assert tokenizer(t.text)["input_ids"][:2] == [0, 0] and encode(t, tokenizer).ids.tolist()[:2] != [0, 0] and encode(t, tokenizer).ids.tolist().count(0) == 1
    assert encode(Transcript("p", "plain", "", " text"), tokenizer).ids[0] == 0


@pytest.mark.parametrize("letter", "EIJ")
def test_e3_the_decision_token_is_the_one_that_stands_there(letter):
    first = events(f" {letter}50.9\n", [f"{letter}50.9", "A10"])[0]
    assert first.chosen == token(f" {letter}") != token(letter) and token(" A") in first.competitors and token("A") not in first.alternatives
    assert events(f"\n{letter}50.9\n", [f"{letter}50.9", "A10"])[0].chosen == token(letter)


def test_e3_results_name_the_ids(model, readings, means):
    frame = model.mean_ablate(readings[6], means).to_frame()
    assert frame["chosen"].tolist() == [e.chosen for e in readings[6].events]
    assert all(int(against) in e.competitors for against, e in zip(frame["against"], readings[6].events, strict=True))


def test_e5_there_is_no_decision_at_a_token_that_all_labels_share():
    (only,) = events(" I50.9\n", ["I50.9", "I10"])
    assert (only.chosen, only.competitors) == (token("5"), (token("1"),))
    first, *_ = events(" I50.9\n", ["I50.9", "I10", "J44.9"])
    assert set(first.alternatives) == {token(" I"), token(" J")} and len(first.alternatives) == 2 and first.competitors == (token(" J"),)
    first, *_ = events(" I50.9\n", ["I50.9", "I10", "J44.9", "J45.9", "J10"])
    assert first.competitors == (token(" J"),)  # three labels, one token
    assert fix_margin(torch.tensor([0.0, 1.0, 2.0]), 0, [1, 1, 2, 2], "logsumexp").against == (1, 2)


def test_e6_after_a_label_that_begins_another_it_may_end():
    labels = ["I50", "I50.9", "I10"]
    last = events(" I50\n", labels)[-1]
    assert (last.chosen, last.competitors) == (token("\n"), (token("."),))
    dot = events(" I50.9\n", labels, closers=(token("\n"),))[-1]
    assert (dot.chosen, dot.competitors) == (token("."), (token("\n"),)) and dot.alternatives == tuple(sorted((token("."), token("\n"))))


@given(st.lists(st.text("AB123", min_size=2, max_size=4).filter(lambda x: x[0] in "AB" and x[1:].isdigit()), min_size=2, max_size=6, unique=True), st.data())
@settings(deadline=None, max_examples=60)
def test_e6_alternatives_lead_to_whole_labels_and_never_from_one_path_to_another(labels, data):
    written = data.draw(st.sampled_from(labels))
    tokens = {label: bpe()(f": {label}", add_special_tokens=False)["input_ids"][1:] for label in labels}
    found = find_events(Transcript("t", "codes:", "", f" {written}\n"), LabelSpace(labels, regions=dict.fromkeys(labels, "r")), bpe(), closers=(token("\n"),)).events
    start = len(bpe()("codes:", add_special_tokens=False)["input_ids"]) - 1
    for event in found:
        depth = event.position - start
        alive = [sequence for sequence in tokens.values() if sequence[:depth] == tokens[written][:depth]]
        assert set(event.alternatives) == {sequence[depth] if depth < len(sequence) else token("\n") for sequence in alive}
    (region, *rest) = events(" A12\n", ["A12", "B13"])
    assert region.competitors == (token(" B"),) and not rest  # A, then 1, is no way to A13


@pytest.mark.parametrize("chosen", [0, 7, 40])
def test_e9_sixteen_bits_do_not_round_a_margin_away(chosen):
    """20.10 and 20.15 are one number in bfloat16; projected from a hidden state in float32 they are two."""
    from decisionheads._unembed import Unembedding

    weight = torch.zeros(60, 8, dtype=torch.bfloat16)
    weight[:, 0] = 20.0
    weight[chosen, 1], weight[chosen + 1, 1] = 0.10, 0.15
    hidden = torch.zeros(1, 8, dtype=torch.bfloat16)
    hidden[:, :2] = 1
    rounded = hidden @ weight.T
    assert float(rounded[0, chosen] - rounded[0, chosen + 1]) == 0
    ours = Unembedding((torch.nn.Identity(), torch.nn.Identity()), {}, weight, None, 10.0, {}).logits(rounded, [hidden])
    margin = Margin(chosen, (chosen + 1,))
    assert ours.dtype == torch.float32 and float(margin(ours)[0]) == pytest.approx(-0.05, abs=5e-4)
    assert margin(torch.zeros(60).bfloat16()).dtype == torch.float32


def test_e9_effects_of_a_sixteen_bit_model_are_distinct(family, model, readings, means):
    half = DecisionModel.from_pretrained(tiny.path(family), dtype="bfloat16")
    found = half.mean_ablate(half.read(readings[6].transcript, readings[6].events), means).scores.values[:2].ravel()
    exact = model.mean_ablate(readings[6], means).scores.values[:2].ravel()
    assert len(set(found.tolist())) > 0.9 * len(found) and (found == 0).mean() < 0.1 and np.corrcoef(found, exact)[0, 1] > 0.9


def test_e11_folded_and_centred_weights_move_logits_and_no_margin(model, family, readings):
    from decisionheads.model import _bridge

    from .conftest import plain_hf

    bridge, last = _bridge(plain_hf(tiny.path(family)).requires_grad_(False)), None
    for _ in range(2):
        bridge.enable_compatibility_mode(disable_warnings=True)
        folded = DecisionModel(bridge, model.tokenizer).read(readings[6].transcript, readings[6].events)
        for event in folded.events:
            margin = fix_margin(readings[6].clean(event), event.chosen, event.competitors)
            assert abs(float(margin(folded.clean(event)) - margin(readings[6].clean(event)))) <= 1e-3
        assert (folded.prefix.logits - readings[6].prefix.logits).abs().max() > 1e-2
        assert last is None or torch.equal(last, folded.prefix.logits)
        last = folded.prefix.logits


def test_e12_a_wrong_choice_has_a_negative_margin_and_its_competitor_stays():
    clean = torch.tensor([3.0, 5.0, 4.0])
    margin = fix_margin(clean, 0, [1, 2])
    assert margin.against == (1,) and float(margin(clean)) == -2.0
    after = torch.tensor([3.0, 0.0, 9.0])  # another one is best now: the margin is still against id 1
    assert float(margin(after)) == 3.0 != float(fix_margin(after, 0, [1, 2])(after))


def test_e12_every_head_is_measured_against_the_competitor_of_the_clean_run(model, readings, means):
    from decisionheads import HeadSet, MeanAblate
    from decisionheads.branches import Branch, branch_logits

    found, other = model.mean_ablate(readings[6], means), 0
    for i, event in enumerate(found.events):
        for layer, head in ((1, 0), (2, 3), (3, 1)):
            ((_, row),) = branch_logits(model.hooked, readings[6].prefix, [Branch(event.position, (), (MeanAblate(HeadSet([(layer, head)]), means.of(event)),))])
            fixed, anew = found.measured[i], fix_margin(row[0], event.chosen, event.competitors)
            assert found.scores.values[i, layer, head] == pytest.approx(float(found.margins[i] - fixed(row[0])), abs=1e-4)
            other += abs(float(anew(row[0]) - fixed(row[0]))) > 1e-3
    assert other  # there are heads without which another competitor would be the strongest


# -- statistics -----------------------------------------------------------------------------------------


def test_g1_the_observed_value_counts_among_its_nulls():
    assert p_value(1.0, np.zeros(99)) == 0.01 and p_value(1.0, np.zeros(999)) == 0.001
    assert p_value(1.0, [1.0, 1.0, 0.0, 0.0]) == 0.6
    assert p_value(-1.0, np.zeros(99)) == 1.0  # the upper tail
    result = calibrate({"k": world(np.random.default_rng(0), "normal", transcripts=30, heads=3, planted={1: 9.0})}, draws=99)["k"]
    assert result.p_value[1] == result.p_maxt[1] == 0.01


@given(st.floats(-3, 3), st.lists(st.integers(-3, 3), min_size=1, max_size=50))
def test_g1_a_p_value_counts_what_reaches_it(observed, null):
    assert p_value(observed, [float(x) for x in null]) == pytest.approx((1 + sum(x >= observed - 1e-8 for x in null)) / (1 + len(null)))


def test_g3_heads_without_an_effect_are_rarely_found_and_without_correction_always():
    rng = np.random.default_rng(3)
    corrected, raw = [], []
    for i in range(200):
        result = calibrate({"k": Sets(tuple(rng.normal(size=(24, 4, 270))), np.arange(24))}, draws=199, seed=i)["k"]
        corrected.append(bool((result.p_maxt <= 0.05).any())), raw.append(bool((result.p_value <= 0.05).any()))
    assert 0.01 <= np.mean(corrected) <= 0.09 and np.mean(raw) == 1.0


def test_g4_ties_come_in_layer_and_head_order_and_are_reported():
    nine = HeadScores(np.ones((2, 3, 3), np.float32), "effect")
    assert nine.top(3).heads == ((0, 0), (0, 1), (0, 2)) == nine.top(5).heads[:3]
    assert len(nine.top(3).tied) == 6 and "6 more tied at the cut" in repr(nine.top(3)) and nine.top(9).tied == ()


@given(st.lists(st.integers(0, 3), min_size=12, max_size=12), st.integers(1, 11))
def test_g4_a_top_k_is_the_head_of_every_longer_one(values, k):
    scores = HeadScores(np.array(values, np.float32).reshape(1, 3, 4), "effect")
    top, whole = scores.top(k), scores.top(12)
    assert whole.heads[:k] == top.heads and list(whole) == sorted(whole, key=lambda x: (-x[1], x[0]))
    assert len(top.tied) == sum(v == top.scores[-1] for v in values) - top.scores.count(top.scores[-1])


# -- offsets and evidence ---------------------------------------------------------------------------------


class Given:
    """A tokenizer that returns `change(offsets)`."""

    bos_token, bos_token_id, all_special_ids = "<s>", 0, bpe().all_special_ids

    def __init__(self, change):
        self.change = change

    def __call__(self, text, **options):
        encoded = bpe()(text, add_special_tokens=False, return_offsets_mapping=True)
        return {"input_ids": encoded["input_ids"], "offset_mapping": [self.change(i, *o) for i, o in enumerate(encoded["offset_mapping"])]}

    def decode(self, ids):
        return bpe().decode(ids)


@pytest.mark.parametrize("change", [lambda i, s, e: (s, s), lambda i, s, e: (s, s) if i == 3 else (s, e), lambda i, s, e: (0, 0)], ids=["all", "one", "none"])
def test_h1_offsets_that_a_tokenizer_leaves_empty_are_rebuilt(change):
    t = Transcript("a", "codes: ", "", "I50.9")
    own = encode(t, bpe()).offsets
    assert np.array_equal(encode(t, Given(change)).offsets, own) and (own[:, 1] > own[:, 0]).all()
    wrong = Given(change)
    wrong.decode = lambda ids: "something else"
    with pytest.raises(InputError, match="do not decode to its text"):
        encode(t, wrong)


def test_h1_bos_belongs_to_no_span():
    from decisionheads.tiny.clinic import clinic_tokenizer

    encoded = encode(Transcript("a", "list\n", "", "- gout"), clinic_tokenizer())
    assert encoded.offsets[0].tolist() == [0, 0] and encoded.tokens_in(0, 4).tolist() == [1] and 0 not in encoded.tokens_in(0, 11)


def test_h2_the_space_before_a_code_is_not_yet_the_code():
    encoded = encode(Transcript("a", " I50.9", "", ""), bpe())
    assert encoded.offsets[0].tolist() == [0, 2] and len(encoded) == 5
    assert encoded.tokens_in(1, 6).tolist() == [0, 1, 2, 3, 4] and encoded.tokens_in(0, 1).tolist() == []
    assert encoded.tokens_in(0, 6).tolist() == [0, 1, 2, 3, 4] and encoded.tokens_in(1, 2).tolist() == [0]


@given(st.text("AI5. \n\té", min_size=1, max_size=12), st.data())
def test_h2_a_span_holds_the_tokens_of_its_letters(text, data):
    encoded = encode(Transcript("a", text, "", ""), bpe())
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    found = set(encoded.tokens_in(start, end).tolist())
    for i, (a, b) in enumerate(encoded.offsets.tolist()):
        shared = text[max(a, start):min(b, end)]
        assert i in found if shared.strip() or (shared and not text[a:b].strip()) else i not in found or not shared.strip() and text[a:end].strip()


def test_h4_line_ends_are_kept_as_they_are(tmp_path):
    text = b"a\r\nb".decode()
    record = {"id": "a", "prompt": text, "answer": "I10", "spans": [{"name": "note", "start": 0, "end": 4, "text": text}]}
    (tmp_path / "t.jsonl").write_bytes(json.dumps(record).encode() + b"\r\n")
    (t,) = load_transcripts(tmp_path / "t.jsonl")
    assert len(t.prompt) == 4 and t.text[slice(*t.spans[0][1:3])] == text
    with pytest.raises(InputError, match="does not match the text at 0:4"):
        Transcript.from_record({**record, "spans": [{**record["spans"][0], "text": "a\nb"}]})


def chart(root, cover):
    """An MDACE release of one note, which holds CR and LF, and two spans of it."""
    mark = lambda begin, end, code, text: {"begin": begin, "end": end, "code": code, "code_system": "ICD-10-CM", "description": "", "type": "Human", "covered_text": text}  # noqa: E731
    note = {"note_id": 7, "category": "x", "description": "x", "text": "a\r\nb c", "annotations": [mark(0, 3, "I10", cover), mark(3, 4, "J44.9", "b")]}
    folder = root / "data" / "Inpatient" / "ICD-10" / "1.0"
    folder.mkdir(parents=True)
    (folder / "100-ICD-10.json").write_text(json.dumps({"hadm_id": 100, "comment": "", "notes": [note]}))
    return root


@pytest.mark.parametrize(("cover", "kept"), [("a\r\n", 2), ("a\n", 1), ("a\r", 1)])
def test_h4_a_span_that_does_not_hold_its_text_is_rejected_and_counted(tmp_path, cover, kept):
    counts = Counter()
    (note,) = mdace.notes(chart(tmp_path, cover), counts)
    assert note.note == "a\r\nb c" and len(note.note) == 6 and len(note.spans) == kept and counts["spans whose text is not what stands there"] == 2 - kept


def gold(words: int = 40) -> Note:
    text = "heart failure, " + "filler " * words + "diabetes"
    return Note(id="n", note=text, labels=("I50.9", "E11.9"), subject_id="s", spans=(Span("evidence", 0, 13, "I50.9"), Span("evidence", len(text) - 8, len(text), "E11.9")))


@pytest.mark.parametrize("short", [10, 30, 60])
def test_h6_evidence_beyond_the_limit_is_truncated_and_a_cut_answer_refused(short):
    space, tokenizer, asked = LabelSpace(CODES), bpe(), Generating(Layout("compact", "Give codes."))
    whole = len(encode(texts_of_notes([gold()], space, [tokenizer], [None], asked)[0][0][0].transcript, tokenizer))
    ((text,),), _ = texts_of_notes([gold()], space, [tokenizer], [whole - short], asked)
    units, reasons = units_of(text, space, tokenizer, encode(text.transcript, tokenizer), (token("\n"),))
    assert text.truncated == {"E11.9"} and [u.code for u in units] == ["I50.9"] and reasons == {"truncated": 1}
    assert text.transcript.text.endswith("\nCodes: I50.9, E11.9\n")  # the cue and the answer are whole
    with pytest.raises(InputError, match="candidate list and instruction need"):
        texts_of_notes([gold()], space, [tokenizer], [40], asked)


# -- distillation -----------------------------------------------------------------------------------------


def test_i1_ids_of_another_tokenizer_are_refused_even_if_vocabularies_are_equally_large():
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    teacher, state = bpe(), json.loads(bpe().backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    turned = dict(zip(vocabulary, [*list(vocabulary.values())[:2], *reversed(list(vocabulary.values())[2:])], strict=True))
    state["model"]["vocab"] = turned
    student = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False)
    text = Transcript("a", "codes:", "", " I50.9")
    written = replace(text, token_ids=tuple(teacher(text.text)["input_ids"]))
    assert len(student) == len(teacher) and encode(written, teacher).ids.tolist() == list(written.token_ids)
    with pytest.raises(InputError, match="token_ids do not decode to its text"):
        encode(written, student)
    assert encode(text, student).ids.tolist() != list(written.token_ids) and student.decode(encode(text, student).ids.tolist()) == text.text


def test_i3_the_distance_is_of_teacher_to_student_in_nats_over_groups():
    p, q = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.5, 0.25, 0.25]])
    assert float(mistill_loss(p, q)) == pytest.approx(0.09927, abs=1e-5)
    assert float(mistill_loss(q, p)) == pytest.approx(0.11662, abs=1e-5) and float(mistill_loss(p, p)) == 0
    assert float(mistill_loss(p.repeat(4, 1), q.repeat(4, 1))) == pytest.approx(0.09927, abs=1e-5)  # a mean over events


@given(st.lists(st.floats(0.01, 1), min_size=3, max_size=3), st.lists(st.floats(0.01, 1), min_size=3, max_size=3))
def test_i3_a_distance_is_never_negative_and_equals_the_formula(a, b):
    p, q = np.array(a) / sum(a), np.array(b) / sum(b)
    found = float(mistill_loss(torch.tensor([a]), torch.tensor([b])))
    assert found == pytest.approx(float((p * np.log(p / q)).sum()), abs=1e-4) and found >= -1e-6


# -- clinical codes -----------------------------------------------------------------------------------------

FOUR = ["0042", "042", "01882", "1882"]


def test_j1_codes_are_text_and_one_counts_once_in_an_admission(tmp_path):
    assert [dotted(code) for code in FOUR] == FOUR == check(FOUR)["label"].tolist() == list(icd10cm_labels(codes=FOUR).space.labels)
    for code in (42, 42.0, None):
        with pytest.raises(InputError, match="is not text"):
            check([code])

    def table(name, header, rows):
        with gzip.open(tmp_path / name, "wt", newline="") as file:
            csv.writer(file).writerows([header, *rows])

    table("discharge.csv.gz", ["note_id", "subject_id", "hadm_id", "note_type", "note_seq", "charttime", "storetime", "text"], [["1-DS-1", "1", "11", "DS", "1", "", "", "a\r\nb"]])
    rows = [["1", "11", str(i), code, "10"] for i, code in enumerate([*FOUR, "0042", " I509", "I509 "])]
    table("diagnoses_icd.csv.gz", ["subject_id", "hadm_id", "seq_num", "icd_code", "icd_version"], rows)
    counts = Counter()
    (note,) = mimic_iv.notes(tmp_path, counts)
    assert note.labels == (*FOUR, "I50.9") and counts["diagnosis rows that repeat a code of their admission"] == 2 and len(note.note) == 4


def test_j3_codes_that_are_no_leaf_or_unknown_stay_and_are_flagged():
    table = check(["I50.2", "I50.20", "I50.99"])
    assert table["code"].tolist() == ["I50.2", "I50.20", "I50.99"] and table["flag"].tolist() == ["not billable", "", "unknown"]
    labels = icd10cm_labels(codes=["I50.2", "I50.20", "I50.99"])
    assert labels.space.labels == ("I50.2", "I50.20", "I50.99") and set(labels.flags) == {"I50.2", "I50.99"}


def test_j4_the_padded_seventh_character_and_the_edition_in_every_output(tmp_path):
    assert check(["W21.89XA", "W21.89A"])["flag"].tolist() == ["", "unknown"] and normalise("W21.89A") is None
    assert check(["S02.0XXB", "S02.0B", "S020XXB"])["flag"].tolist() == ["", "unknown", "listed twice"]
    labels = icd10cm_labels(codes=["W21.89XA"])
    labels.save(tmp_path / "labels.csv")
    assert json.loads(about_file(tmp_path / "labels.csv").read_text())["edition"] == edition() and edition().startswith("ICD-10-CM ")
    record = prepare("mdace", chart(tmp_path, "a\r\n"), tmp_path / "notes.jsonl", tmp_path / "seen.csv")
    assert record["edition"] == edition() and any(json.loads(p.read_text()).get("edition") == edition() for p in tmp_path.glob("*notes*.json"))


@pytest.mark.parametrize(("text", "code"), [("I509", "I50.9"), ("I50.9", "I50.9"), ("i50.9", "I50.9"), (" I50.9", "I50.9"), ("I50.9.", "I50.9"), ("I10", "I10"), ("I50.90", None), ("I5090", None)])
def test_j5_a_code_is_the_same_however_it_is_written_and_never_cut(text, code):
    assert normalise(text) == code
    assert check([text])["flag"].tolist() == ["" if code else "unknown"]
