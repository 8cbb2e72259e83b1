"""A wrong call is answered by a sentence that repeats it and says what to do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from decisionheads import DecisionModel, Events, HeadScores, HeadSet, InputError, discover, tiny
from decisionheads.branches import Branch, branch_logits
from decisionheads.head_sets import cases_of
from decisionheads.interventions import BlockReads, MeanAblate
from decisionheads.necessity import judge
from decisionheads.spans import Sinks
from decisionheads.transcripts import encode

from .conftest import shapes_unchecked


@pytest.mark.parametrize("head", [(4, 0), (0, 8), (9, 3)])
def test_a_head_out_of_range(model, readings, means, head):
    heads = HeadSet([(0, 0), head])
    said = f"L{head[0]}H{head[1]} is not in .* of 4 layers by 8 heads \\(L0H0 to L3H7\\)"
    held = readings[6:]
    for call in (lambda: model.knock_in(held, heads, "region"), lambda: judge(model, cases_of(held, "region", means), heads), lambda: heads.to_mask(4, 8),
                 lambda: model.block_reads(held, heads, "region", "own block", means, Sinks(frozenset())),
                 lambda: list(branch_logits(model.hooked, held[0].prefix, [Branch(held[0].events[0].position, interventions=(BlockReads(heads, 0, 4),))])),
                 lambda: list(branch_logits(model.hooked, held[0].prefix, [Branch(held[0].events[0].position, interventions=(MeanAblate(heads, means.means["region"]),))]))):
        with pytest.raises(InputError, match=said):
            call()


def test_a_kind_misspelt(model, space, readings, means):
    said = "kind='regoin' is no kind of event; choose region, label or departure"
    held = readings[6:]
    ablation = model.mean_ablate(held[0], means)
    for call in (lambda: Events(held[0].events).of_kind("regoin"), lambda: ablation.of_kind("regoin"), lambda: model.knock_in(held, HeadSet(), "regoin"),
                 lambda: cases_of(held, "regoin", means), lambda: model.block_reads(held, HeadSet(), "regoin", "own block", means, Sinks(frozenset())),
                 lambda: discover(model, [r.transcript for r in readings], space, kinds=("region", "regoin"))):
        with shapes_unchecked(), pytest.raises(InputError, match=said):  # as users call it: the annotations would refuse it first
            call()


def test_a_span_misspelt(model, readings, means):
    with pytest.raises(InputError, match="span='own blok': .* there are .*near-miss.*own block"):
        model.block_reads(readings[6:], HeadSet([(1, 2)]), "region", "own blok", means, Sinks(frozenset()))


def test_a_head_set_of_another_model(model, tmp_path):
    heads = HeadSet([(1, 2), (3, 0)])
    heads.save(tmp_path / "set.json", model)
    assert HeadSet.load(tmp_path / "set.json", model) == heads == HeadSet.load(tmp_path / "set.json")

    class Other:
        name, n_layers, n_heads = "another-model", 4, 8

    with pytest.raises(InputError, match=f"is a head set of {model.name} \\(4 layers by 8 heads\\) and not of another-model"):
        HeadSet.load(tmp_path / "set.json", Other())
    HeadSet([(9, 9)]).save(tmp_path / "plain.json")  # of no model in particular
    with pytest.raises(InputError, match="L9H9 is not in"):
        HeadSet.load(tmp_path / "plain.json", model)
    (tmp_path / "odd.json").write_text('{"a": 1}')
    with pytest.raises(InputError, match="odd.json does not hold what was written there .* HeadSet.save writes one"):
        HeadSet.load(tmp_path / "odd.json")


def test_a_transcript_of_another_tokenizer(model, readings):
    ids = tuple(int(i) for i in readings[0].encoded.ids)
    moved = dataclasses.replace(readings[0].transcript, token_ids=(*ids[:9], (ids[9] + 1) % 50, *ids[10:]))
    with pytest.raises(InputError, match="transcript t0: its token_ids do not decode to its text; were they made by another tokenizer"):
        encode(moved, model.tokenizer)


def test_events_of_another_tokenizer_or_transcript(space, readings):
    """The student of another tokenizer has other positions; its own events are taken."""
    student = DecisionModel.from_pretrained(tiny.path("gpt2-student"))
    transcript, events = readings[6].transcript, readings[6].events
    with pytest.raises(InputError, match=f"event {events[0].name} was found with another tokenizer than that of .*: model.find_events"):
        student.read(transcript, events)
    assert student.read(transcript, student.find_events(transcript, space)).events
    with pytest.raises(InputError, match="is of transcript 't7' and not of 't6'"):
        student.read(transcript, readings[7].events)


def test_several_texts_at_once_are_the_same_one_by_one(model, readings, means):
    held = readings[6:9]
    together, apart = model.mean_ablate(held, means), [model.mean_ablate(r, means) for r in held]
    np.testing.assert_array_equal(together.scores.values, np.concatenate([a.scores.values for a in apart]))
    assert together.scores.events == tuple(n for a in apart for n in a.scores.events) and np.abs(together.scores.values).max() > 0.1
    np.testing.assert_array_equal(model.attribute(held, means).gradient.values, np.concatenate([model.attribute(r, means).gradient.values for r in held]))
    with pytest.raises(ValueError, match="different names"):
        HeadScores.join([together.scores, dataclasses.replace(together.scores, name="other")])


def test_a_text_that_another_model_read(readings, means):
    """Of the same shape and vocabulary, so that numbers would come out."""
    other = DecisionModel.from_pretrained(tiny.path("llama-student"))
    for call in (lambda: other.mean_ablate(readings[7], means), lambda: other.knock_in(readings[6:], HeadSet([(1, 2)]), "region"), lambda: other.attribute(readings[7], means)):
        with pytest.raises(InputError, match="this text was read with another model \\(.*\\) than .*llama-student; read it again with model.read"):
            call()


def test_the_run_of_another_model(demo):
    """The student has the teacher's shape, and none of its heads."""
    from decisionheads import load_transcripts
    from decisionheads.explorer import Explorer

    other = DecisionModel.from_pretrained(tiny.path("llama-student"))
    with pytest.raises(InputError, match="is a run of llama and the files of .*llama-student are not the same; load the model of the run"):
        Explorer.of_run(demo, other, load_transcripts(demo / "transcripts.jsonl"), tiny.labels())


def test_an_option_misspelt(model, space, readings):
    texts = [r.transcript for r in readings]
    with pytest.raises(TypeError, match="discover\\(\\) has no option 'calliper'; did you mean 'caliper'"):
        discover(model, texts, space, calliper=0.5)
    with pytest.raises(TypeError, match="has no option 'zzz'; see survey.Options"):
        discover(model, texts, space, zzz=1)


def test_a_set_that_is_no_list_no_file_or_no_fit(tmp_path, means):
    with pytest.raises(InputError, match=r"HeadSet\('L1H4'\): give a list of heads, such as HeadSet\(\['L1H4'\]\)"):
        HeadSet("L1H4")
    with pytest.raises(InputError, match="nope.json: no such file; HeadSet.save writes one"):
        HeadSet.load(tmp_path / "nope.json")
    with pytest.raises(InputError, match="L1H99 is not in a model of 4 layers by 8 heads"):
        HeadSet(["L1H99"]).hooks(means.means["region"])
