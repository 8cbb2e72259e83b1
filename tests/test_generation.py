"""From notes to transcripts: what is written, how it is kept, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from decisionheads import DecisionModel, InputError, LabelSpace, Transcript, load_transcripts
from decisionheads.cli import main
from decisionheads.corpora.notes import Note, save_notes
from decisionheads.generation import Generating, Parts, beside, generate, make_prompts
from decisionheads.prompts import Layout
from decisionheads.transcripts import Span, encode

SECRET = "zebra quartz umbrella"  # planted in every note
CODES = ["E11.9", "E11.65", "I10", "I50.1", "I50.21", "I50.9", "J18.9", "J44.0", "J44.9"]
COMPACT = Layout("compact", "Give the codes.")
WITHIN = Generating(COMPACT, longest=12, within_labels=True, most=3)


@pytest.fixture(scope="module")
def bpe_model(bpe_folder):
    return DecisionModel.from_pretrained(bpe_folder)


@pytest.fixture(scope="module")
def codes():
    return LabelSpace(CODES, descriptions={code: f"finding {code}" for code in CODES})


def note(i: int, extra: str = "") -> Note:
    text = f"History: {SECRET} number {i} with chronic disease.\r\nCourse: failure.{extra}\n"
    at = text.index("chronic")
    return Note(f"n{i}", text, (CODES[i % 9], CODES[(i + 3) % 9]), subject_id=f"s{i // 2}", spans=(Span("evidence", at, at + 7, CODES[i % 9]),))


@pytest.fixture(scope="module")
def notes():
    return [note(i) for i in range(7)]


@pytest.fixture
def files(bpe_folder, codes, notes, tmp_path):
    save_notes(notes, tmp_path / "notes.jsonl")
    (tmp_path / "labels.csv").write_text("label,description\n" + "".join(f"{code},finding {code}\n" for code in CODES))

    def command(out: str = "t.jsonl", *more: str, within: bool = True) -> list[str]:
        return ["generate", "--model", str(bpe_folder), "--notes", str(tmp_path / "notes.jsonl"), "--labels", str(tmp_path / "labels.csv"), "--out", str(tmp_path / out), "--device", "cpu",
                "--listing", "compact", "--instruction", "Give the codes.", "--longest", "12", *(["--within-labels", "--most", "3"] if within else []), *more]
    return command


# -- what is written ----------------------------------------------------------------------------------


def test_transcripts_hold_prompt_reasoning_and_answer(bpe_model, notes, codes):
    made = generate(bpe_model, notes, codes, WITHIN)
    assert not made.unfinished and [t.id for t in made.transcripts] == [n.id for n in notes]
    for t, n in zip(made.transcripts, notes, strict=True):
        assert t.labels == n.labels and t.group == n.subject_id and t.prompt == made.prompts[n.id].text
        assert t.answer.startswith("\nCodes:") and "Codes:" not in t.reasoning and 0 < len(encode(t, bpe_model.tokenizer).tokens_in(t.reasoning_start, t.answer_start)) <= 13
        given = [m.label for m in codes.mentions(t.text, t.answer_start)]
        assert 1 <= len(given) <= 3 and len(set(given)) == len(given)
        spans = {(s.name, s.of): t.text[s.start:s.end] for s in t.spans}
        assert spans["evidence", n.labels[0]] == "chronic" and spans["note", ""] == n.note and spans["block", "I50"] == "I50 .1 .21 .9"
    assert len({t.answer for t in made.transcripts}) > 2


def test_company_processes_and_resuming_change_nothing(bpe_model, notes, codes, tmp_path):
    alone = generate(bpe_model, notes, codes, WITHIN, together=1).transcripts
    assert generate(bpe_model, notes, codes, WITHIN, together=5).transcripts == alone
    assert generate(bpe_model, notes[::-1], codes, WITHIN, together=3).transcripts == alone[::-1]
    parts = Parts(tmp_path / "t.jsonl", {})
    generate(bpe_model, notes[:3], codes, WITHIN, parts=parts)
    assert generate(bpe_model, notes, codes, WITHIN, parts=parts).transcripts == alone


def test_events_are_found_in_what_was_written_and_nothing_lost_its_place(bpe_model, notes, codes):
    """Within the labels every choice is the best live token, once labels given already are excluded."""
    made = generate(bpe_model, notes, codes, WITHIN)
    seen = 0
    for t in made.transcripts:
        found = bpe_model.find_events(t, codes, closers=(bpe_model.tokenizer.eos_token_id,), exclude_emitted=True)
        reading = bpe_model.read(t, found)
        for e in reading.events:
            live = list(e.alternatives)
            assert live[int(reading.clean(e)[live].argmax())] == e.chosen
            seen += 1
            assert any(s[0] == "own block" for s in e.spans)
            evidence = {name for name, *_ in e.spans if "evidence" in name}
            assert evidence == {"own evidence" if t.labels[0] == e.label else "other evidence"}
    assert seen > 15


def test_ids_are_kept_where_the_text_would_be_tokenized_otherwise(bpe_model, notes, codes):
    made = generate(bpe_model, notes, codes, WITHIN).transcripts
    with_ids = [t for t in made if t.token_ids is not None]
    assert with_ids  # a random model writes pieces that a tokenizer would not
    for t in made:
        assert bpe_model.tokenizer.decode(encode(t, bpe_model.tokenizer).ids) == "<s>" * int(encode(t, bpe_model.tokenizer).offsets[0, 1] == 0) + t.text


def test_free_writing_that_comes_to_no_answer_is_counted(bpe_model, notes, codes):
    made = generate(bpe_model, notes, codes, Generating(COMPACT, longest=5))
    assert len(made.unfinished) + len(made.transcripts) == 7 and set(made.unfinished.values()) <= {"no whole answer within 5 tokens"} and made.unfinished


class Scripted:
    """Writes a fixed text, to see it taken apart."""

    def __init__(self, text, tokenizer, longest, ends):
        self.left, self.longest, self.written = tokenizer(text, add_special_tokens=False)["input_ids"], longest, []

    def choose(self, logits):
        return self.left.pop(0) if self.left else None


@pytest.mark.parametrize("text, reasoning", [
    ("<think>it is I50.1</think>\nI50.9</s>", "<think>it is I50.1</think>"), ("first I10\nCodes: I50.9</s>", "first I10"), ("I50.9, I10</s>", ""), ("<think>no end", None)])
def test_free_writing_is_taken_apart(bpe_model, notes, codes, monkeypatch, text, reasoning):
    monkeypatch.setattr("decisionheads.generation.Greedy", lambda longest, ends: Scripted(text, bpe_model.tokenizer, longest, ends))
    made = generate(bpe_model, notes[:1], codes, Generating(COMPACT, longest=60))
    assert made.unfinished == ({} if reasoning is not None else {"n0": "no whole answer within 60 tokens"})
    for t in made.transcripts:
        assert (t.reasoning, t.reasoning + t.answer) == (reasoning, text)


# -- notes that are too long ------------------------------------------------------------------------


def test_long_notes_are_cut_and_what_was_lost_is_told(bpe_model, codes):
    long = note(1, " and" * 600)
    late = Note("late", long.note, long.labels, spans=(Span("evidence", len(long.note) - 5, len(long.note) - 2, "I10"),))
    made = generate(bpe_model, [note(0), late], codes, WITHIN)
    cut = made.summary(codes)["cut"]
    assert set(cut) == {"late"} and cut["late"]["characters"] > 1000 and cut["late"]["lost_evidence"] == {"I10": 1}
    t = made.transcripts[1]
    assert "Give the codes." in t.prompt and not any(s.name == "evidence" for s in t.spans) and len(encode(t, bpe_model.tokenizer)) <= 600
    with pytest.raises(InputError, match=r"note 'late': its prompt needs \d+ tokens, and \d+ are to be written, but the model's context is 600"):
        make_prompts([late], codes, bpe_model.tokenizer, Generating(Layout("compact", "Give the codes.", cut=False), 12, True), 600)


def test_a_list_that_does_not_fit_names_both_lengths_before_a_model_is_loaded(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(DecisionModel, "from_pretrained", lambda *a, **k: pytest.fail("loaded"))
    assert main(files("t.jsonl", "--instruction", "Give the codes. " * 200)) == 2
    said = capsys.readouterr().err
    assert "tokens without any note" in said and "context is 600" in said and said.count("\n") == 1
    assert not list(tmp_path.glob("*t.jsonl*"))


@pytest.mark.parametrize("change, said", [
    (["--cue", " "], "the cue is empty"), (["--until", "x"], "--until ends the reasoning of answers within the labels"), (["--longest", "0"], "nothing can be written within 0 tokens")])
def test_options_that_cannot_be_are_refused_first(files, capsys, monkeypatch, change, said):
    monkeypatch.setattr(DecisionModel, "load_tokenizer", lambda *a, **k: pytest.fail("loaded"))
    assert main(files("t.jsonl", *change, within=False)) == 2
    assert said in capsys.readouterr().err


# -- files --------------------------------------------------------------------------------------------


def test_from_files_to_a_file(files, tmp_path, capsys):
    assert main(files()) == 0
    said = capsys.readouterr()
    assert "7 of 7 notes were written" in said.out and "precision" in said.out and SECRET not in said.out + said.err
    texts = load_transcripts(tmp_path / "t.jsonl")
    state = json.loads(beside(tmp_path / "t.jsonl").read_text())
    assert len(texts) == 7 and state["score"]["gold"] == 14 and state["prompt_tokens"]["shared"] > 40 and state["inputs"]["options"]["most"] == 3
    assert not list(tmp_path.glob(".*")) and SECRET not in beside(tmp_path / "t.jsonl").read_text()
    before = (tmp_path / "t.jsonl").read_bytes()
    assert main(files()) == 0 and capsys.readouterr().out == said.out and (tmp_path / "t.jsonl").read_bytes() == before
    assert main(files("t.jsonl", "--most", "2")) == 2 and "options differ" in capsys.readouterr().err
    assert (tmp_path / "t.jsonl").read_bytes() == before


def test_a_killed_run_goes_on_where_it_stopped(files, tmp_path, capsys, monkeypatch):
    assert main(files("whole.jsonl")) == 0
    done = []
    real = Parts.save
    monkeypatch.setattr(Parts, "save", lambda self, name, written: done.append(name) or (real(self, name, written) if len(done) < 4 else (_ for _ in ()).throw(KeyboardInterrupt)))
    assert main(files("t.jsonl", "--batch", "2")) == 130
    kept = [p for p in (tmp_path / ".t.jsonl.parts").iterdir() if p.name != "inputs.json"]
    assert len(kept) == 3 and not (tmp_path / "t.jsonl").exists()
    assert not any(SECRET in p.read_text() for p in (tmp_path / ".t.jsonl.parts").iterdir())  # ids alone
    monkeypatch.setattr(Parts, "save", lambda self, name, written: done.append("again " + name) or real(self, name, written))
    assert main(files("t.jsonl", "--most", "2")) == 2 and "options differ" in capsys.readouterr().err
    assert main(files("t.jsonl", "--batch", "3")) == 0
    assert [d for d in done if d.startswith("again")] == [f"again n{i}" for i in range(3, 7)]
    assert (tmp_path / "t.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes() and not (tmp_path / ".t.jsonl.parts").exists()


def test_a_file_that_was_changed_and_parts_that_are_torn(files, tmp_path, capsys):
    assert main(files()) == 0
    whole = (tmp_path / "t.jsonl").read_bytes()
    (tmp_path / "t.jsonl").write_bytes(whole + b"\n")
    assert main(files()) == 2 and "it or t.jsonl.json was changed since" in capsys.readouterr().err
    (tmp_path / "t.jsonl").unlink()  # as if killed between the two files
    parts = Parts(tmp_path / "t.jsonl", json.loads(beside(tmp_path / "t.jsonl").read_text())["inputs"])
    for i, torn in enumerate(("", "{", "{}", '{"written": 5}', '{"written": [[-1], null]}', '{"written": [["a"], 1]}')):
        parts.save(f"n{i}", [[1], 0])
        parts._part(f"n{i}").write_text(torn)
    assert main(files()) == 0 and (tmp_path / "t.jsonl").read_bytes() == whole and not parts.folder.exists()


def test_two_at_once_on_one_file_are_refused(tmp_path):
    one = Parts(tmp_path / "t.jsonl", {"a": 1})
    with one.held():
        with pytest.raises(InputError, match="t.jsonl is being written by another process"), Parts(tmp_path / "t.jsonl", {"a": 1}).held():
            pass
        one.save("n", [[1], None])
    assert one.load("n") == [[1], None]  # what was written stays
    one.remove()
    with one.held():
        pass
    assert not one.folder.exists()  # where nothing was, nothing is left


@pytest.mark.parametrize("looks", ["glob", "iterdir"])
def test_parts_that_another_process_has_just_removed_are_gone(tmp_path, monkeypatch, looks):
    """Processes that wrote one file together clear up together, and each may come last."""
    parts = Parts(tmp_path / "t.jsonl", {})

    def too_late(folder, *pattern):
        shutil.rmtree(folder)
        raise FileNotFoundError(folder)

    with parts.held():
        parts.save("t", [[1, 2], None])
        monkeypatch.setattr(Path, looks, too_late)
        if looks == "glob":
            parts.remove()
    assert not parts.folder.exists()


def test_a_decoder_that_takes_the_first_space_away_loses_nothing(notes, codes):
    """Metaspace tokenizers, as Llama 2's: a text that begins with a word decodes without its space when it stands alone."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    from decisionheads.generation import _transcript

    core = Tokenizer(kinds.BPE(byte_fallback=False, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace(prepend_scheme="first")
    text = [n.note for n in notes] + CODES + ["Give the codes. Candidate labels, by group: stands for Note: Codes:\n , ; ( )"]
    core.train_from_iterator(text * 3, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    prompt = make_prompts(notes[:1], codes, tokenizer, WITHIN, None)["n0"]
    ids = encode(Transcript("p", prompt.text, "", ""), tokenizer).ids
    written = tokenizer("History and failure", add_special_tokens=False)["input_ids"]
    thought = len(written)
    cue = WITHIN.answers(codes, tokenizer, frozenset([2]))
    t = _transcript(notes[0], prompt, ids, [*written, *cue.cue, *cue.first.sequence(0), 2], thought, WITHIN, tokenizer, frozenset([2]))
    assert t.reasoning == " History and failure" and t.answer == "\nCodes: " + codes.labels[cue.first.order[0]] + "</s>"
    assert encode(t, tokenizer).ids.tolist() == [*ids, *written, *cue.cue, *cue.first.sequence(0), 2]


@pytest.mark.parametrize("change, said", [
    (lambda d: (d / "t.jsonl").write_text("mine\n"), "exists and nothing says how it was made"),
    (lambda d: (d / "t.jsonl.json").write_text('{"mine": 1}'), "exists and nothing says how it was made"),
    (lambda d: (d / ".t.jsonl.parts").mkdir() or (d / ".t.jsonl.parts" / "x.json").write_text("{}"), "does not say what it was made from; remove it"),
    (lambda d: (d / "notes.jsonl").write_text('{"id": "a", "note": "x \\ud800 y"}\n'), "line 1: note 'a' holds half of a character"),
    (lambda d: (d / "notes.jsonl").write_text('{"id": "a", "note": "x", "labels": ["I\\udc00"]}\n'), "line 1: labels are not a list of codes"),
    (lambda d: (d / "labels.csv").write_text("label,description\nI10,Hypertension, essential\n"), "row 1: more cells than the header has columns"),
    (lambda d: (d / "labels.csv").write_text("label,label\nI10,I10\n"), "a column is named twice"),
    (lambda d: (d / "labels.csv").write_text("label,region\nX01.1,X01\n"), "none of the notes' codes (such as 'E11.65') is in the label file"),
    (lambda d: (d / "labels.csv").write_text("label\nheart failure\n"), "add a region column or name another with --region-by"),
    (lambda d: (d / "notes.jsonl").write_text('{"id": "a"}\n'), "line 1: note 'a' has no text"),
])
def test_bad_input_is_one_sentence(files, tmp_path, capsys, monkeypatch, change, said):
    monkeypatch.setattr(DecisionModel, "from_pretrained", lambda *a, **k: pytest.fail("loaded"))
    change(tmp_path)
    kept = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    assert main(files()) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and SECRET not in error
    assert {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == kept


def test_what_the_system_refuses_is_one_sentence(files, capsys, monkeypatch):
    monkeypatch.setattr(DecisionModel, "from_pretrained", lambda *a, **k: pytest.fail("loaded"))
    assert main(files("t" * 300 + ".jsonl")) == 2
    error = capsys.readouterr().err
    assert "file name too long; mend that, or name another" in error and error.count("\n") == 1
