"""Random inputs near every format: labels and spans against brute force, records that are taken or refused, saved values with a changed byte.

Every example is drawn from a fixed seed, so that a failure comes again.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from decisionheads import HeadScores, HeadSet, InputError, LabelSpace, Span, Transcript, load_transcripts, save_transcripts
from decisionheads.corpora.notes import Note, load_notes, save_notes
from decisionheads.distillation.groups import GROUPS
from decisionheads.distillation.pool import Pool
from decisionheads.distillation.targets import Target, Targets
from decisionheads.generation import Parts
from decisionheads.label_trie import END
from decisionheads.run_folder import RunFolder, open_run, read_json
from decisionheads.spans import Sinks
from decisionheads.transcripts import Encoded, encode

from .bpe import bpe
from .conftest import shapes_unchecked


def bounded(n: int):
    return settings(max_examples=n, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def tokenizer():
    return bpe()


# -- labels -----------------------------------------------------------------------------------------

LETTERS = "aAé1.- /\u0301\u0308ßא\u05b0بш١½\u200d\u202e\u3000中😀"  # composed and combining marks, two scripts from right to left, digits that are none of ASCII's
WORDS = st.text(LETTERS, min_size=1, max_size=4)


@st.composite
def spaces(draw):
    """Labels that share beginnings, go on from one another, and hold spaces."""
    labels = draw(st.lists(WORDS, min_size=1, max_size=5))
    for label in list(labels):
        labels += [label + more for more in draw(st.lists(WORDS, max_size=2))]
    labels = [label for label in dict.fromkeys(labels) if label.strip()]
    assume(labels)
    return labels, {label: draw(st.sampled_from("xyz")) for label in labels}


@st.composite
def texts_of(draw, labels):
    return "".join(draw(st.lists(st.one_of(st.sampled_from(labels), st.text(LETTERS + "\n", max_size=3)), max_size=10)))


def mentioned(labels, text, start, end):
    """Read letter by letter: at each place the longest label that begins and ends at a boundary of words; then on behind it."""
    found, at = [], start
    while at < end:
        fitting = []
        for label in labels:
            stop = at + len(label)
            if stop > end or text[at:stop] != label:
                continue
            inside_before = at > 0 and text[at - 1].isalnum() and text[at].isalnum()
            after = text[stop:stop + 2]
            inside_after = bool(after) and after[0].isalnum() and label[-1].isalnum()
            goes_on = len(after) == 2 and after[0] in (".", "-") and after[1].isalnum()
            if not inside_before and not inside_after and not goes_on:
                fitting.append(label)
        if fitting:
            best = sorted(fitting, key=len)[-1]
            found.append((best, at, at + len(best)))
            at += len(best)
        else:
            at += 1
    return found


@bounded(250)
@given(spaces(), st.data())
@example((["I50", "I50.9", "I50.99"], dict.fromkeys(["I50", "I50.9", "I50.99"], "x")), None)
def test_mentions_equal_brute_force(drawn, data):
    labels, regions = drawn
    text = "I50.9, I50.99; I50-I50 (I50.)" if data is None else data.draw(texts_of(labels))
    start, end = (0, len(text)) if data is None else sorted(data.draw(st.integers(0, len(text))) for _ in range(2))
    with shapes_unchecked():
        space = LabelSpace(labels, regions)
        assert [tuple(m) for m in space.mentions(text, start, end)] == mentioned(labels, text, start, end)
        assert [tuple(m) for m in space.mentions(text)] == mentioned(labels, text, 0, len(text))


@bounded(60)
@given(spaces(), st.sampled_from(["", "\n", "x", "1", ",", "é"]), st.sampled_from(["", " ", "(", "- "]))
def test_the_trie_equals_brute_force(tokenizer, drawn, before, lead):
    labels, regions = drawn
    sequences = {}
    for label in labels:
        encoded = tokenizer(before + lead + label, add_special_tokens=False, return_offsets_mapping=True)
        sequences[label] = [i for i, (_, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True) if stop > len(before)]
    names = list(dict.fromkeys(regions[label] for label in labels))
    with shapes_unchecked():
        trie = LabelSpace(labels, regions).trie(tokenizer, before, lead)
        stack = [(trie.root, [])]
        seen = 0
        while stack:
            node, path = stack.pop()
            alive = [label for label in labels if sequences[label][:len(path)] == path]
            assert sorted(labels[i] for i in trie.order[node.lo:node.hi]) == sorted(alive)
            assert trie.n_regions(node) == len({regions[label] for label in alive})
            assert [bool(trie.has_region(node, n)) for n in range(len(names))] == [name in {regions[label] for label in alive} for name in names]
            following = {sequences[label][len(path)] if len(sequences[label]) > len(path) else END for label in alive}
            children = trie.children(node)
            assert set(children) == following
            stack += [(child, [*path, token]) for token, child in children.items() if token != END]
            seen += END in children
        assert seen == len({tuple(s) for s in sequences.values()})


@bounded(150)
@given(st.lists(st.one_of(WORDS, st.sampled_from(["", " ", "I10", "I50.9", "a\nb", "a\rb", "\0", "\x1b[2J"])), max_size=6), st.booleans())
def test_label_files_come_back_or_are_refused(folder, labels, lines):
    """What is refused: nothing, blanks, repetitions, spaces around, line breaks and control characters."""
    path = folder / ("l.jsonl" if lines else "l.csv")
    with open(path, "w", encoding="utf-8", newline="") as out:
        if lines:
            out.writelines(json.dumps({"label": label, "region": "r", "description": "d"}) + "\n" for label in labels)
        else:
            csv.writer(out).writerows([("label", "region", "description"), *((label, "r", "d") for label in labels)])
    odd = not labels or len(set(labels)) < len(labels) or any(label != label.strip() or not label.strip() or any(ord(c) < 32 or 127 <= ord(c) < 160 for c in label) for label in labels)
    try:
        found = LabelSpace.load(path)
    except InputError as error:
        assert odd and str(path) in str(error)
    else:
        assert not odd and found.labels == tuple(labels) and set(found.regions.values()) == {"r"}


# -- spans and offsets --------------------------------------------------------------------------------


def overlapping(offsets, start, end):
    """A token is in a span if they share a character."""
    return [i for i, (a, b) in enumerate(offsets) if set(range(a, b)) & set(range(start, end))]


@bounded(150)
@given(st.text(LETTERS + "abc \r\n", min_size=1, max_size=30), st.data())
def test_tokens_of_a_span_equal_brute_force(tokenizer, text, data):
    cut = data.draw(st.integers(0, len(text) - 1))
    with shapes_unchecked():
        encoded = encode(Transcript("t", text[:cut], "", text[cut:]), tokenizer)
        offsets = encoded.offsets.tolist()
        assert encoded.tokens_in(0, len(text)).tolist() == [i for i, (a, b) in enumerate(offsets) if a < b]
        ends = st.one_of(st.integers(0, len(text)), st.sampled_from([0, cut, len(text)]))
        for _ in range(6):
            start, end = sorted((data.draw(ends), data.draw(ends)))
            assert encoded.tokens_in(start, end).tolist() == overlapping(offsets, start, end), (start, end)
        for i, (a, b) in enumerate(offsets):  # the span of a token holds that token
            assert a == b or i in encoded.tokens_in(a, b)


@bounded(150)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.integers(0, 2), st.integers(0, 40), st.integers(0, 40))
def test_tokens_of_a_span_of_any_offsets(sizes, specials, start, end):
    ends = np.cumsum(sizes)
    offsets = np.array([(0, 0)] * specials + list(zip(ends - sizes, ends, strict=True)))
    with shapes_unchecked():
        assert Encoded(np.arange(len(offsets)), offsets).tokens_in(start, end).tolist() == overlapping(offsets.tolist(), start, end)


# -- records ----------------------------------------------------------------------------------------

TEXT = st.text(st.characters(), max_size=12)
ODD = st.one_of(st.none(), st.booleans(), st.integers(), st.just(10**400), st.floats(), st.just("\ud800"), st.just("a\0b"), st.just("a\nb"), st.just("../../x"), st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2), TEXT)
SPAN = st.fixed_dictionaries({"name": st.one_of(st.sampled_from(["note", "evidence"]), ODD), "start": st.one_of(st.integers(-1, 20), ODD), "end": st.one_of(st.integers(-1, 25), ODD)}, optional={"of": st.one_of(TEXT, ODD), "text": ODD})
RECORD = st.fixed_dictionaries(
    {"id": st.one_of(st.text("abc", min_size=1, max_size=3), ODD), "prompt": st.one_of(TEXT, ODD), "answer": st.one_of(TEXT, ODD)},
    optional={"reasoning": st.one_of(TEXT, ODD), "content": TEXT, "reasoning_content": TEXT, "candidates": st.one_of(st.lists(TEXT, max_size=3), ODD), "labels": st.one_of(st.lists(st.one_of(TEXT, ODD), max_size=3), ODD),
              "group": ODD, "spans": st.one_of(st.lists(SPAN, max_size=3), ODD), "token_ids": st.one_of(st.lists(st.integers(-1, 2**31), max_size=4), ODD), "messages": ODD, "more": ODD})
GOOD_RECORD = st.builds(lambda i, p, r, a, labels, group, spans: {"id": i, "prompt": p, "reasoning": r, "answer": a, "labels": labels, "group": group, "spans": [
    {"name": "s", "start": min(x, len(p + r + a) - 1), "end": min(x, len(p + r + a) - 1) + 1, "of": of} for x, of in spans]},
    st.text("abc", min_size=1), st.text(st.characters(exclude_categories=("Cs",)), min_size=1), TEXT, st.text(st.characters(exclude_categories=("Cs",)), min_size=1), st.lists(TEXT, max_size=2), st.one_of(st.none(), TEXT), st.lists(st.tuples(st.integers(0, 20), TEXT), max_size=3))


@bounded(400)
@given(st.one_of(RECORD, GOOD_RECORD, ODD), st.booleans())
@example({"id": "a", "prompt": "p", "answer": "I10", "spans": [{"name": "\ud800", "start": 0, "end": 1}]}, False)
@example({"id": "a", "prompt": "p", "answer": "I10", "group": "\ud800"}, False)
def test_transcript_records_are_taken_whole_or_refused(folder, record, unanswered):
    path = folder / "t.jsonl"
    with shapes_unchecked():
        try:
            found = Transcript.from_record(record, unanswered=unanswered)
        except InputError as error:
            assert str(error) and len(str(error).splitlines()) == 1
            return
        save_transcripts([found], path)
        assert load_transcripts(path, unanswered=unanswered) == [found] == [Transcript.from_record(found.to_record(), unanswered=unanswered)]
        assert all(found.text[s.start:s.end] for s in found.spans) and found.text == found.prompt + found.reasoning + found.answer


NOTE = st.fixed_dictionaries({"id": st.one_of(st.text("abc", min_size=1), ODD), "note": st.one_of(TEXT, ODD)}, optional={"labels": st.one_of(st.lists(TEXT, max_size=3), ODD), "subject_id": ODD, "hadm_id": ODD, "split": ODD, "spans": st.one_of(st.lists(SPAN, max_size=3), ODD)})


@bounded(300)
@given(NOTE)
def test_notes_are_taken_whole_or_refused(folder, record):
    path, again = folder / "n.jsonl", folder / "again.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with shapes_unchecked():
        try:
            found = load_notes(path)
        except InputError as error:
            assert str(path) in str(error) and "line 1" in str(error) and len(str(error).splitlines()) == 1
            return
        save_notes(found, again)
        assert load_notes(again) == found


# -- saved values, and a changed byte ------------------------------------------------------------------

HEADS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6)
PLAIN = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
META = st.dictionaries(PLAIN, st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), PLAIN), lambda x: st.lists(x, max_size=2), max_leaves=4), max_size=3)
CHANGES = st.lists(st.tuples(st.sampled_from(["flip", "cut", "drop", "put"]), st.floats(0, 0.999), st.integers(1, 255)), min_size=6, max_size=6)


def changed(data: bytes, how: str, where: float, by: int) -> bytes:
    at = int(where * len(data))
    return {"flip": data[:at] + bytes([data[at] ^ by]) + data[at + 1:], "cut": data[:at], "drop": data[:at] + data[at + 1:], "put": data[:at] + bytes([by]) + data[at:]}[how]


def survives(path: Path, load, same, changes, guarded: bool = True) -> None:
    """A value comes back; with a byte changed it is refused, or comes back equal (guarded), or is at least a value."""
    whole = path.read_bytes()
    assert same(load(path))
    for change in changes:
        path.write_bytes(changed(whole, *change))
        try:
            found = load(path)
        except InputError as error:
            assert str(path) in str(error) and len(str(error).splitlines()) == 1
        else:
            assert not guarded or same(found), (change, whole, path.read_bytes())
    path.write_bytes(whole)


MODEL = SimpleNamespace(name="clinic é", n_layers=41, n_heads=41)


@bounded(60)
@given(HEADS, st.booleans(), CHANGES)
def test_head_sets(folder, heads, of, changes):
    model = MODEL if of else None
    with shapes_unchecked():
        heads = HeadSet(heads)
        heads.save(folder / "set.json", model)
        survives(folder / "set.json", HeadSet.load, lambda x: x == heads, changes)
        survives(folder / "set.json", lambda p: HeadSet.load(p, MODEL), lambda x: x == heads, changes)
        if of:
            with pytest.raises(InputError, match="and not of other"):
                HeadSet.load(folder / "set.json", SimpleNamespace(name="other", n_layers=41, n_heads=41))


@bounded(60)
@given(st.integers(0, 3), st.integers(1, 3), st.integers(1, 3), PLAIN, META, st.sampled_from(["<f4", "<f8"]), CHANGES, st.integers(0, 9))
def test_head_scores(folder, n, layers, heads, name, meta, dtype, changes, seed):
    values = np.random.default_rng(seed).normal(size=(n, layers, heads)).astype(dtype)
    made = HeadScores(values, name, unit=name, sign=name, events=tuple(f"{name}{i}" for i in range(n)), meta=meta)
    same = lambda x: (x.values.dtype, x.values.tobytes(), x.values.shape, x.name, x.unit, x.sign, x.events, x.meta) == (values.dtype, values.tobytes(), values.shape, name, name, name, made.events, meta)  # noqa: E731
    with shapes_unchecked():
        made.save(folder / "scores.safetensors")
        survives(folder / "scores.safetensors", HeadScores.load, same, changes)


@bounded(60)
@given(st.dictionaries(st.sampled_from(["region", "label", "departure"]), HEADS, max_size=3), st.frozensets(st.integers(0, 300), max_size=5), PLAIN, CHANGES)
def test_pools(folder, heads, sinks, how, changes):
    with shapes_unchecked():
        made = Pool({kind: HeadSet(h) for kind, h in heads.items()}, dict.fromkeys(heads, how), Sinks(sinks), (41, 41))
        made.save(folder / "pool.json")
        survives(folder / "pool.json", Pool.load, lambda x: x == made, changes)


@bounded(50)
@given(st.lists(st.tuples(PLAIN, st.integers(0, 9), st.floats(0, 1)), min_size=1, max_size=3), HEADS, CHANGES)
def test_targets(folder, drawn, heads, changes):
    texts = tuple(Transcript(f"t{i}", f"p{word}", word, f"a{word}", labels=(word,)) for i, (word, _, _) in enumerate(drawn))
    of = {f"t{i}": tuple(Target("label", word, None, k, k + 1, (x,) * len(GROUPS), (k,) * len(GROUPS)) for k in range(n % 3)) for i, (word, n, x) in enumerate(drawn)}
    with shapes_unchecked():
        heads = HeadSet(heads)
        made = Targets(texts, of, {"label": heads}, {"a reason": 3})
        made.save(folder / "targets.jsonl")
        survives(folder / "targets.jsonl", Targets.load, lambda x: (x.transcripts, x.of, x.heads, x.dropped) == (texts, of, {"label": heads}, {"a reason": 3}), changes)


@bounded(60)
@given(st.dictionaries(st.sampled_from(["effects", "é", "a/b"]), st.lists(st.integers(-9, 9), max_size=5), min_size=1), PLAIN, CHANGES)
def test_parts_of_runs_and_of_generation(folder, arrays, name, changes):
    """A part that was changed is made again: None stands in for it."""
    with shapes_unchecked():
        run, parts = RunFolder(folder / "run", {"é": 1}), Parts(folder / "out.jsonl", {"é": 1})
        run.save_part(name, {k: np.array(v, np.int16) for k, v in arrays.items()})
        known = lambda found: found is None or {k: v.tolist() for k, v in found.items()} == arrays and all(v.dtype == np.int16 for v in found.values())  # noqa: E731
        assert run.load_part(name) is not None
        survives(run._part(name), lambda _: run.load_part(name), known, changes)
        written = [[abs(i) for v in arrays.values() for i in v], 2]
        parts.save(name, written)
        assert parts.load(name) == written
        survives(parts._part(name), lambda _: parts.load(name), lambda found: found in (None, written), changes)
        parts._part(name).write_text(parts._part(name).read_text().replace(", 2]", ", 1]"))  # still what a part looks like
        assert parts.load(name) is None


@bounded(60)
@given(META, CHANGES)
def test_json_of_run_folders(folder, meta, changes):
    """Manifests and summaries are plain JSON: a changed byte is refused, or is another value, and nothing else."""
    path = folder / "json"
    path.mkdir(exist_ok=True)
    for name in ("heads.csv", "null_max.safetensors"):
        (path / name).write_bytes(b"")
    (path / "summary.json").write_text(json.dumps(meta))
    (path / "run.json").write_text(json.dumps({"finished": True, "model": "é", "layers": 1, "heads": 1, "more": meta}))
    for name in ("run.json", "summary.json"):
        survives(path / name, read_json, lambda found: isinstance(found, dict), changes)
        whole = (path / name).read_bytes()
        for change in changes:
            (path / name).write_bytes(changed(whole, *change))
            try:
                assert set(open_run(path)) == {"manifest", "summary"}
            except InputError as error:
                assert str(path) in str(error)
        (path / name).write_bytes(whole)
    assert open_run(path)["summary"] == meta


@bounded(60)
@given(st.lists(GOOD_RECORD, min_size=1, max_size=3, unique_by=lambda r: r["id"]), CHANGES)
def test_transcript_files_with_a_changed_byte(folder, records, changes):
    path = folder / "changed.jsonl"
    with shapes_unchecked():
        try:
            made = [Transcript.from_record(r) for r in records]
        except InputError:
            return
        save_transcripts(made, path)
        survives(path, load_transcripts, lambda found: found == made, [], guarded=False)
        survives(path, load_transcripts, lambda found: all(isinstance(t, Transcript) for t in found), changes)


@bounded(60)
@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=4), PLAIN), min_size=1, max_size=3, unique_by=lambda x: x[0]), CHANGES)
def test_label_and_note_files_with_a_changed_byte(folder, drawn, changes):
    with shapes_unchecked():
        (folder / "c.csv").write_text("label,region\n" + "".join(f"{label},r\n" for label, _ in drawn))
        survives(folder / "c.csv", LabelSpace.load, lambda found: isinstance(found, LabelSpace), changes)
        save_notes([Note(label, f"n{text}", (label,), spans=(Span("evidence", 0, 1, label),)) for label, text in drawn], folder / "c.jsonl")
        survives(folder / "c.jsonl", load_notes, lambda found: all(isinstance(n, Note) for n in found), changes)
