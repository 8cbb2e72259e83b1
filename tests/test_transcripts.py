from __future__ import annotations

import json

import numpy as np
import pytest

from decisionheads import InputError, Span, Transcript, from_dataset, load_transcripts, save_transcripts
from decisionheads.transcripts import encode, to_dataset

from .bpe import bpe

GOOD = {"id": "a", "prompt": "codes:\n", "reasoning": "maybe I50.9\n", "answer": "I10\n"}


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_round_trip_through_jsonl_and_datasets(tmp_path):
    one = Transcript("a", "p\r\n", "r", "é I10", ("I10", "I50"), ("I10",), "g", (Span("note", 0, 2, "x"),), None)
    two = Transcript("b", "p", "", "q")
    save_transcripts([one, two], tmp_path / "t.jsonl")
    assert load_transcripts(tmp_path / "t.jsonl") == [one, two]
    assert from_dataset(to_dataset([one, two])) == [one, two]
    assert one.text == "p\r\nré I10" and one.answer_start == 4  # CR and LF are two characters (H4)


def test_openai_style_outputs():
    record = {"id": 7, "prompt": "p", "content": "I10", "reasoning_content": "hm"}
    assert Transcript.from_record(record) == Transcript("7", "p", "hm", "I10")


def test_messages_are_rendered_by_the_chat_template_with_one_bos():  # E1
    tokenizer = bpe()
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
    try:
        messages = [{"role": "user", "content": "codes?"}]
        t = Transcript.from_record({"id": "a", "messages": messages, "answer": "I10"}, tokenizer)
        ids = encode(t, tokenizer).ids.tolist()
        want = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
        want = want["input_ids"] if not isinstance(want, list) else want
        assert ids[: len(want)] == want and ids.count(tokenizer.bos_token_id) == 1
    finally:
        tokenizer.chat_template = None
    with pytest.raises(InputError, match="chat template"):
        Transcript.from_record({"id": "a", "messages": [], "answer": "I10"}, tokenizer)


@pytest.mark.parametrize(("lines", "said"), [
    ([GOOD, "{not json"], "line 2: not JSON"),
    ([GOOD, {**GOOD, "id": "b", "answer": ""}], "line 2: no answer"),
    ([{k: v for k, v in GOOD.items() if k != "id"}], "line 1: no id"),
    ([GOOD, GOOD], "line 2: id 'a' was already used in line 1"),
    ([[1, 2]], "line 1: not a JSON object"),
    ([{**GOOD, "prompt": 3}], "line 1: prompt is not text"),
    ([{**GOOD, "spans": [{"name": "x", "start": 5, "end": 500}]}], "5:500 in a text of"),
    ([{**GOOD, "spans": [{"name": "x", "start": 5}]}], "lacks 'name', 'start' or 'end'"),
    ([{**GOOD, "spans": [{"name": "x", "start": 0, "end": 5, "text": "coder"}]}], "does not match the text at 0:5"),
    ([], "the file is empty")])
def test_bad_files_name_file_line_and_remedy(tmp_path, lines, said):
    file = write(tmp_path / "t.jsonl", *lines)
    with pytest.raises(InputError) as caught:
        load_transcripts(file)
    assert said in str(caught.value) and str(caught.value).startswith(str(file)) and "\n" not in str(caught.value)


def test_a_missing_file():
    with pytest.raises(InputError, match="no such transcript file"):
        load_transcripts("/nowhere/t.jsonl")


# -- tokens ---------------------------------------------------------------------------------------


def test_given_ids_must_decode_to_the_text():  # I1
    tokenizer = bpe()
    text = "codes:\nI10"
    ids = tokenizer(text)["input_ids"]
    good = Transcript("a", "codes:\n", "", "I10", token_ids=tuple(ids))
    assert encode(good, tokenizer).ids.tolist() == ids
    with_bos = Transcript("a", "codes:\n", "", "I10", token_ids=(tokenizer.bos_token_id, *ids))
    assert encode(with_bos, tokenizer).offsets[0].tolist() == [0, 0]
    with pytest.raises(InputError, match="do not decode to its text"):
        encode(Transcript("a", "codes:\n", "", "I50", token_ids=tuple(ids)), tokenizer)


def test_ids_that_were_written_otherwise_keep_their_own_tokens():
    tokenizer = bpe()
    ids = [i for c in "codes: é" for i in tokenizer(c)["input_ids"]]  # one character at a time, é in two bytes
    encoded = encode(Transcript("a", "codes", "", ": é", token_ids=tuple(ids)), tokenizer)
    assert encoded.ids.tolist() == ids
    assert encoded.offsets[:3].tolist() == [[0, 1], [1, 2], [2, 3]]
    assert (encoded.offsets[-2:] == [7, 8]).all()  # both bytes stand for the one character


def test_tokens_of_characters():  # H2, H1
    tokenizer = bpe()
    encoded = encode(Transcript("a", "x", "", " I50.9"), tokenizer)
    offsets = encoded.offsets.tolist()
    assert offsets[1] == [1, 3]  # " I" holds the space
    assert encoded.tokens_in(2, 7).tolist() == [1, 2, 3, 4, 5] and encoded.tokens_in(0, 1).tolist() == [0]


def test_bos_belongs_to_no_span(space):  # H1
    from decisionheads.tiny.clinic import clinic_tokenizer

    encoded = encode(Transcript("a", "list\n", "", "- gout"), clinic_tokenizer())
    assert encoded.offsets[0].tolist() == [0, 0] and encoded.tokens_in(0, 4).tolist() == [1]


def test_offsets_that_a_tokenizer_leaves_empty_are_rebuilt():  # H1
    class Broken:
        """Returns (s, s) for every token."""

        bos_token, all_special_ids = "<s>", bpe().all_special_ids

        def __call__(self, text, **options):
            encoded = bpe()(text, add_special_tokens=False, return_offsets_mapping=True)
            return {"input_ids": encoded["input_ids"], "offset_mapping": [(s, s) for s, _ in encoded["offset_mapping"]]}

        def decode(self, ids):
            return bpe().decode(ids)

    t = Transcript("a", "codes: ", "", "I50.9 é")
    rebuilt, own = encode(t, Broken()).offsets, encode(t, bpe()).offsets
    assert np.array_equal(rebuilt[:-3], own[:-3]) and (rebuilt[:, 1] > rebuilt[:, 0]).all() and rebuilt[-1, 1] == len(t.text)


def test_null_fields_fall_back_and_empty_lists_survive():
    record = {"id": "a", "prompt": "p", "reasoning": None, "reasoning_content": "hm", "answer": None, "content": "I10", "candidates": []}
    t = Transcript.from_record(record)
    assert (t.reasoning, t.answer, t.candidates) == ("hm", "I10", ())
    assert Transcript.from_record(t.to_record()) == t  # "none listed" does not become "all of them"


@pytest.mark.parametrize("change", [
    {"candidates": "I50.9"}, {"candidates": 5}, {"labels": [5]}, {"token_ids": ["a"]}, {"token_ids": [1.5]}, {"token_ids": [-1]}, {"token_ids": [10**30]},
    {"token_ids": [None]}, {"spans": 5}, {"spans": [{"name": ["x"], "start": 0, "end": 1}]}, {"spans": [{"name": "x", "start": 0.9, "end": 2}]},
    {"spans": [{"name": "x", "start": True, "end": 2}]}, {"id": []}, {"id": True}, {"id": "a\nb"}, {"group": {"a": 1}}, {"prompt": "\ud800"}, {"answer": 5}])
def test_wrong_types_are_one_sentence(tmp_path, change):
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({**GOOD, **change}) + "\n")
    with pytest.raises(InputError) as caught:
        load_transcripts(file)
    assert "line 1: " in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe{\x00", b"[" * 100_000 + b"\n", b'{"id": ' + b"9" * 5000 + b"}\n", "\ufeff".encode() + b"nope\n"])
def test_hostile_files_are_one_sentence(tmp_path, content):
    file = tmp_path / "t.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError, match="not UTF-8|line 1: not JSON|line 1: no id"):
        load_transcripts(file)


def test_a_bom_is_left_out(tmp_path):
    (tmp_path / "t.jsonl").write_bytes("\ufeff".encode() + json.dumps(GOOD).encode())
    assert load_transcripts(tmp_path / "t.jsonl")[0].id == "a"


def test_a_template_that_raises_is_one_sentence():
    tokenizer = bpe()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(InputError, match="does not take these messages .TemplateError."):
            Transcript.from_record({"id": "a", "messages": [{"role": "x", "content": "y"}], "answer": "I10"}, tokenizer)
    finally:
        tokenizer.chat_template = None


def test_a_first_id_that_is_no_bos_is_refused():  # I1
    tokenizer = bpe()
    ids = tokenizer("codes:\nI10")["input_ids"]
    with pytest.raises(InputError, match="do not decode"):
        encode(Transcript("a", "codes:\n", "", "I10", token_ids=(tokenizer("z")["input_ids"][0], *ids)), tokenizer)


def test_two_empty_offsets_among_many_are_rebuilt():  # H1
    class Partly:
        bos_token, bos_token_id, all_special_ids = "<s>", 0, bpe().all_special_ids

        def __call__(self, text, **options):
            encoded = bpe()(text, add_special_tokens=False, return_offsets_mapping=True)
            offsets = [(s, s) if i in (3, 4) else (s, e) for i, (s, e) in enumerate(encoded["offset_mapping"])]
            return {"input_ids": encoded["input_ids"], "offset_mapping": offsets}

        def decode(self, ids):
            return bpe().decode(ids)

    t = Transcript("a", "codes: ", "", "I50.9")
    assert np.array_equal(encode(t, Partly()).offsets, encode(t, bpe()).offsets)
