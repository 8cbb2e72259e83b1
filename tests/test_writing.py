"""Texts written side by side, greedily and within the labels, against full forwards of one text at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decisionheads import InputError, LabelSpace, Transcript, tiny
from decisionheads._together import Together
from decisionheads.prefixes import Prefixes
from decisionheads.transcripts import encode
from decisionheads.writing import Answering, Answers, Greedy, end_tokens, write

from .families import FAMILIES, engine
from .oracle import logits
from .test_families import EVERY, SLOW


def greedy(hf, ids, longest: int, ends=frozenset()) -> list[int]:
    """One full forward a token."""
    written: list[int] = []
    while len(written) < longest and not (written and written[-1] in ends):
        written.append(int(logits(hf, torch.tensor([*ids, *written]))[-1].argmax()))
    return written


@pytest.fixture(scope="module")
def prompts(model):
    drawn = tiny.draw(7, seed=3)
    texts = [tiny.clinic.join(d.prompt()) for d in drawn]
    return [encode(Transcript("p", text, "", ""), model.tokenizer).ids for text in texts]


# -- greedily --------------------------------------------------------------------------------------------


def test_texts_written_together_are_those_written_alone(model, plain, prompts):
    ends = end_tokens(model)
    alone = [greedy(plain, ids, 80, ends) for ids in prompts[:3]]
    assert len({len(w) for w in alone}) > 1 and all(w[-1] in ends for w in alone)  # they end at different times
    for together in (1, 2, 3):
        found = list(write(model.hooked, prompts[:3], lambda n: Greedy(80, ends), together=together))
        assert [n for n, _, _ in found] == [0, 1, 2] and [w for _, w, _ in found] == alone


def test_order_and_company_change_nothing(model, prompts):
    ends = end_tokens(model)
    there = {n: w for n, w, _ in write(model.hooked, prompts, lambda n: Greedy(60, ends), together=4)}
    back = {n: w for n, w, _ in write(model.hooked, prompts[::-1], lambda n: Greedy(60, ends), together=7)}
    assert [there[n] for n in range(7)] == [back[6 - n] for n in range(7)]


def test_what_is_shared_is_held_once_and_changes_nothing(model, plain):
    begin = tiny.clinic.join(tiny.draw(1, seed=8)[0].prompt())
    head = encode(Transcript("p", begin, "", ""), model.tokenizer).ids
    prompts = [np.concatenate([head, np.array(extra)]) for extra in ([30, 31, 32], [40, 41], [50, 51, 52, 53])]
    shared = Prefixes(model.hooked).share(prompts).shared
    assert len(shared) == len(head)
    texts = Together(model.hooked, shared, 40)
    reads = [model.hooked.prefill(torch.tensor(p), (len(p) - 1,), shared=shared) for p in prompts]
    assert [texts.add(read) for read in reads] == [0, 1, 2]
    assert texts.cache.layers[0].keys.shape[2] == len(head) + 3 + 2 + 4  # one copy of the head
    ids = [list(map(int, p)) for p in prompts]
    for which, tokens in (([0, 1, 2], [60, 61, 62]), ([0, 2], [63, 64]), ([2, 1], [65, 66])):
        out = texts.step(torch.tensor(which), torch.tensor(tokens))
        for i, token, row in zip(which, tokens, out, strict=True):
            ids[i].append(token)
            reference = logits(plain, torch.tensor(ids[i]))[-1]
            assert (row - reference).abs().max() <= 1e-4 * reference.std() and reference.std() > 0.5
    with_shared = [w for _, w, _ in write(model.hooked, prompts, lambda n: Greedy(20, frozenset()), together=3, shared=shared)]
    assert with_shared == [greedy(plain, p, 20) for p in prompts]
    other = [*prompts[:2], prompts[2][5:]]  # one begins otherwise
    assert [w for _, w, _ in write(model.hooked, other, lambda n: Greedy(9, frozenset()), together=3, shared=shared)] == [greedy(plain, p, 9) for p in other]


def test_a_text_that_does_not_begin_alike_is_refused(random_model):
    ids = torch.arange(10, 80)
    with pytest.raises(ValueError, match="does not begin with"):
        Together(random_model.hooked, random_model.hooked.prefill(ids), 90).add(random_model.hooked.prefill(ids.flip(0)))


@pytest.mark.parametrize("name", EVERY)
def test_every_architecture_writes_what_full_forwards_write(name):
    hf = FAMILIES[name].make()
    hooked, tested = engine(hf)
    head = torch.randperm(100, generator=torch.Generator().manual_seed(5))[:70] + 8
    prompts = [np.concatenate([head, extra]) for extra in (np.array([20, 21, 22]), np.array([30]), np.arange(40, 60))]  # longer than any window
    shared = Prefixes(hooked).share(prompts).shared
    assert (shared is None) == (name in SLOW)
    written = [w for _, w, _ in write(hooked, prompts, lambda n: Greedy(6 + 3 * n, frozenset()), together=3, shared=shared)]
    assert written == [greedy(hf, p, 6 + 3 * n) for n, p in enumerate(prompts)]
    assert len({token for w in written for token in w}) > 3


def test_a_mask_that_shows_the_others_is_noticed(model, plain, prompts, monkeypatch):
    """What the tests above would say if texts saw each other."""
    real = Together.step
    monkeypatch.setattr(Together, "step", lambda self, which, tokens: (setattr(self, "owner", torch.full_like(self.owner, -1)), real(self, which, tokens))[1])
    found = [w for _, w, _ in write(model.hooked, prompts[:3], lambda n: Greedy(40, frozenset()), together=3)]
    assert found != [greedy(plain, p, 40) for p in prompts[:3]]


def test_a_text_that_cannot_fit_names_both_lengths(random_model):
    with pytest.raises(InputError, match=r"300 tokens and up to 40 written ones are longer than the 320"):
        list(write(random_model.hooked, [np.arange(300) % 90 + 8], lambda n: Greedy(40, frozenset())))


# -- within the labels --------------------------------------------------------------------------------------


CUE, BETWEEN = "answer", ","


def literal(hf, tokenizer, ids, space: LabelSpace, ends, reasoning: int, most: int) -> tuple[list[int], list[str]]:
    """The same answer by trying whole labels: which tokens go on to a label that was not given yet, one full forward each."""
    written, best = [], lambda: logits(hf, torch.tensor([*ids, *written]))[-1]
    while len(written) < reasoning and int(best().argmax()) not in ends:
        written.append(int(best().argmax()))
    written += tokenizer(CUE, add_special_tokens=False)["input_ids"]
    rest = {label: tokenizer(" " + label, add_special_tokens=False)["input_ids"] for label in space.labels}
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    given = []
    while True:
        done: list[int] = []
        while True:
            alive = {tokens[len(done)] for label, tokens in rest.items() if tokens[:len(done)] == done and len(tokens) > len(done)}
            whole = next((label for label, tokens in rest.items() if tokens == done), None)
            closing = {*ends, *newline} | (set(tokenizer(BETWEEN, add_special_tokens=False)["input_ids"]) if len(given) + 1 < most and len(rest) > 1 else set())
            allowed = sorted(alive | (closing if whole else set()))
            token = allowed[int(best()[allowed].argmax())]
            written.append(token)
            if token not in alive:
                break
            done.append(token)
        given.append(whole)
        del rest[whole]
        if token in ends or token in newline:
            return written, given


@pytest.mark.parametrize("most", [1, 4])
def test_answers_within_the_labels_are_the_best_live_tokens(model, plain, prompts, most):
    ends = end_tokens(model)
    space = LabelSpace([label for label in tiny.labels().labels if label[-2:] in ("mi", "ta", "so")], lambda label: label[:4])
    answers = Answers(space, model.tokenizer, ends, CUE, BETWEEN, most)
    # after a comma the embedded models go on with another label or end: both are seen
    for n, written, writer in write(model.hooked, prompts[:3], lambda n: Answering(answers, 25), together=2):
        expected, labels = literal(plain, model.tokenizer, prompts[n], space, ends, 25, most)
        assert written == expected
        given = [space.labels[i] for i in writer.labels]
        assert given == labels and 1 <= len(given) <= most and len(set(given)) == len(given)
        text = model.tokenizer.decode(written)
        assert [m.label for m in space.mentions(text, text.rindex(CUE))] == given


def test_reasoning_of_no_length_goes_straight_to_the_answer(model, prompts):
    answers = Answers(tiny.labels(), model.tokenizer, end_tokens(model), CUE, BETWEEN, 2)
    (_, written, _), = write(model.hooked, prompts[:1], lambda n: Answering(answers, 0))
    assert model.tokenizer.decode(written).startswith(CUE)


class Always:
    """Logits that want one thing wherever it is allowed, else another: to steer a writer by hand."""

    def __init__(self, *wanted):
        self.wanted = wanted

    def __call__(self, size=200):
        row = torch.zeros(size)
        for rank, token in enumerate(reversed(self.wanted), 1):
            row[token] = rank
        return row


def test_labels_that_begin_others_and_labels_given_already():
    """I50 and I50.9: after I50 the model may end, go on, or begin another; what was given is never alive again."""
    tokenizer = tiny.clinic.clinic_tokenizer()
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    vora, nexa, leaf, comma, end = ids(" Vora")[0], ids(" Nexa")[0], ids("-mi")[0], ids(",")[0], tokenizer.eos_token_id
    space = LabelSpace(["Vora", "Vora-mi", "Nexa-mi"], lambda label: label[:4])
    answers = Answers(space, tokenizer, frozenset([end]), CUE, BETWEEN, 5)
    writer, steer = Answering(answers, 0), Always(comma, leaf, vora, nexa)
    written = [writer.choose(steer()) for _ in range(7)]
    assert tokenizer.decode(written) == CUE + " Vora, Vora-mi, Nexa"  # Vora was given: at the second one only -mi is alive
    assert writer.choose(steer()) == leaf and writer.choose(steer()) != comma  # nothing is left to give
    assert writer.choose(steer()) is None and writer.labels == [0, 1, 2]
    again = Answering(answers, 0)
    assert tokenizer.decode([again.choose(Always(leaf, vora, end)()) for _ in range(4)]) == CUE + " Vora-mi" + tokenizer.eos_token
    two = Answering(Answers(space, tokenizer, frozenset([end]), CUE, BETWEEN, 2), 0)
    written = [two.choose(steer()) for _ in range(6)]
    assert tokenizer.decode(written[:5]) == CUE + " Vora, Vora-mi" and written[5] in (end, ids("\n")[0]) and two.choose(steer()) is None
    assert two.longest < 20 and Answering(Answers(space, tokenizer, frozenset([end]), CUE, BETWEEN, 10**6), 0).longest < 30  # room for what there is


def test_reasoning_ends_at_a_text_that_is_not_kept(model, prompts):
    tokenizer, ends = model.tokenizer, end_tokens(model)
    whole = Answers(tiny.labels(), tokenizer, ends, CUE, BETWEEN, 1)
    line = Answers(tiny.labels(), tokenizer, ends, CUE, BETWEEN, 1, until="\n")
    ((_, long, _),), ((_, short, writer),) = (list(write(model.hooked, prompts[:1], lambda n, a=a: Answering(a, 25))) for a in (whole, line))
    stop = long.index(tokenizer("\n", add_special_tokens=False)["input_ids"][0])
    assert 0 < stop < 25 and len(writer.thoughts) == stop and short[:stop] == long[:stop] and tokenizer.decode(short[stop:]).startswith(CUE)


def test_pieces_that_the_tokenizer_does_not_give_back_are_refused(model):
    ends = end_tokens(model)
    for cue in ("Codes:", "answer ", " "):  # unknown words, a space that would be doubled, nothing
        with pytest.raises(InputError, match=f"cue {cue!r}"):
            Answers(tiny.labels(), model.tokenizer, ends, cue)
    with pytest.raises(InputError, match="separator '-mi' or an end token is also how a label goes on"):
        Answers(tiny.labels(), model.tokenizer, ends, CUE, "-mi")


def test_labels_that_a_tokenizer_cannot_write_or_tell_apart_are_refused(model):
    ends = end_tokens(model)
    with pytest.raises(InputError, match="label 'Foo' cannot be told from others, or not be written"):
        Answers(LabelSpace(["Vora-mi", "Foo"], lambda label: "r"), model.tokenizer, ends, CUE)
    with pytest.raises(InputError, match="cannot be told"):
        Answers(LabelSpace(["Foo", "Bar"], lambda label: "r"), model.tokenizer, ends, CUE)


def test_an_end_of_several_tokens_and_one_beyond_the_vocabulary(model, prompts, monkeypatch):
    whole = Answers(tiny.labels(), model.tokenizer, end_tokens(model), CUE, BETWEEN, 1)
    (_, long, writer), = write(model.hooked, prompts[:1], lambda n: Answering(whole, 12))
    until = model.tokenizer.decode(writer.thoughts[5:8])
    line = Answers(tiny.labels(), model.tokenizer, end_tokens(model), CUE, BETWEEN, 1, until=until)
    (_, _, writer), = write(model.hooked, prompts[:1], lambda n: Answering(line, 12))
    assert writer.thoughts == long[:7]  # the token that completes it is not kept
    monkeypatch.setattr(model.hooked.model.generation_config, "eos_token_id", [2, 10**6])
    with pytest.raises(InputError, match="says that token 1000000 ends its texts"):
        end_tokens(model)


def test_a_model_that_brings_a_penalty_on_repetition_writes_greedily(model, plain, prompts, monkeypatch):
    """The slow way goes through Hugging Face's generate, which would follow the model's own generation config."""
    ends, hooked = end_tokens(model), model.hooked
    monkeypatch.setattr(hooked.model.generation_config, "repetition_penalty", 5.0)
    kept = hooked.model.generation_config
    found = {}
    for packed in (True, False):
        monkeypatch.setattr(hooked, "packed", packed)
        found[packed] = [w for _, w, _ in write(hooked, prompts[:1], lambda n: Greedy(80, ends))]
    assert found[True] == found[False] == [greedy(plain, prompts[0], 80, ends)] and len(found[True][0]) < 80 and hooked.model.generation_config is kept
    assert hooked.generate(torch.tensor(prompts[0]), 80).tolist() == found[True][0]
