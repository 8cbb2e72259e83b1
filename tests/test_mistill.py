"""The loss, the rows it is taken from, targets in any tokenizer, and training with one more term."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from decisionheads import DecisionModel, HeadSet, InputError, tiny
from decisionheads.distillation.arms import Training, arm_of, train_student
from decisionheads.distillation.groups import GROUPS, character_groups, key_groups
from decisionheads.distillation.loss import FLOOR, floored, mistill_loss
from decisionheads.distillation.pool import Pool
from decisionheads.distillation.rows import EventAttention, EventBatch, check_attention
from decisionheads.distillation.targets import MERGED, NOTHING, Targets, misdirected, place, shuffled, teacher_targets
from decisionheads.distillation.trainer import Collator, MistillTrainer, all_kinds, examples
from decisionheads.errors import ExactnessError
from decisionheads.spans import Sinks
from decisionheads.tiny.clinic import TOKENS
from decisionheads.transcripts import Transcript, encode

from .conftest import random_hf, save_random, shapes_unchecked
from .test_processes import launch

NEAR, BLOCK, REST = GROUPS.index("near-miss"), GROUPS.index("own block"), GROUPS.index("rest")
SINKS = Sinks(frozenset(range(4)))
HEADS = {"region": HeadSet(["L1H4", "L2H2"]), "label": HeadSet(["L1H2"]), "departure": HeadSet(["L1H7"])}


@pytest.fixture(scope="module")
def teacher():
    return DecisionModel.from_pretrained(tiny.path("llama"))


@pytest.fixture(scope="module")
def texts():
    return [tiny.transcript(f"t{i}", drawn) for i, drawn in enumerate(tiny.draw(10, seed=7))]


@pytest.fixture(scope="module")
def targets(teacher, texts, space):
    return teacher_targets(teacher, texts, space, HEADS, SINKS)


@pytest.fixture(scope="module")
def pool():
    return Pool(HEADS, dict.fromkeys(HEADS, "calibrated"), SINKS, (4, 8))


@pytest.fixture(scope="module")
def data(targets, space, teacher, pool):
    return examples(targets, space, teacher.tokenizer, pool)[0]


# -- the loss ----------------------------------------------------------------------------------------------


def rows(*masses) -> torch.Tensor:
    return torch.tensor(masses)


def test_the_distance_is_kl_of_teacher_to_student_in_nats():
    p, q = rows([.7, .2, .1]), rows([.5, .25, .25])
    assert float(mistill_loss(p, q)) == pytest.approx(0.09927, abs=1e-5)
    assert float(mistill_loss(q, p)) == pytest.approx(0.11662, abs=1e-5)  # the other direction
    assert float(mistill_loss(p, p)) == 0
    assert float(mistill_loss(torch.cat([p, p]), torch.cat([q, p]))) == pytest.approx(0.09927 / 2, abs=1e-5)  # mean over events, not over groups


def test_weights_sum_and_padding_counts_nothing():
    p, q = rows([.7, .2, .1], [.0, .0, .0]), rows([.5, .25, .25], [math.nan] * 3).requires_grad_()
    found = mistill_loss(p, q, torch.tensor([.5, 0.]))
    found.backward()
    assert float(found.detach()) == pytest.approx(0.09927 / 2, abs=1e-5)
    assert torch.equal(q.grad[1], torch.zeros(3)) and q.grad[0].abs().sum() > 0
    assert float(mistill_loss(p[:0], q[:0].detach())) == 0


def test_masses_are_renormalised_and_floored():
    assert floored(rows([2., 2., 0.]))[0].tolist() == pytest.approx([.5, .5, FLOOR], abs=1e-4)
    assert float(mistill_loss(rows([.5, .5, 0.]), rows([.001, .001, 0.]))) == pytest.approx(0, abs=1e-7)  # the floor is of shares, whatever a row sums to
    assert float(mistill_loss(rows([1., 0.]), rows([0., 1.]))) == pytest.approx(math.log(1 / FLOOR), rel=1e-2)
    assert float(mistill_loss(rows([.35, .1, .05]), rows([.5, .25, .25]))) == pytest.approx(0.09927, abs=1e-5)


def test_no_gradient_flows_into_the_teacher():
    p, q = rows([.7, .2, .1]).requires_grad_(), rows([.5, .25, .25]).requires_grad_()
    mistill_loss(p, q).backward()
    assert p.grad is None and q.grad.abs().sum() > 0


def test_what_does_not_fit_is_refused():
    for case in ((rows([.5, .5]), rows([1.])), (rows([.5, .5]), rows([.5, .5]), torch.ones(2)), (rows([.5, .5]), rows([.5, .5]), torch.tensor([-1.]))):
        with shapes_unchecked(), pytest.raises(ValueError, match="fit each other|negative"):
            mistill_loss(*case)


# -- groups ------------------------------------------------------------------------------------------------


def test_every_character_belongs_to_the_group_it_should(texts, teacher, space):
    t = texts[0]
    event = next(e for e in teacher.find_events(t, space) if e.kind == "departure")
    groups = character_groups(t, event)
    group_of = lambda part, after=0: {GROUPS[g] for g in groups[t.text.index(part, after):][:len(part)]}  # noqa: E731
    start, end = next((a, b) for name, a, b in event.spans if name == "near-miss")
    assert t.text[start:end] == event.near_miss and {GROUPS[g] for g in groups[start:end]} == {"near-miss"}
    blocks = {s.of: (s.start, s.end) for s in t.spans if s.name == "block"}
    for region, (a, b) in blocks.items():
        assert {GROUPS[g] for g in groups[a:b]} == {"own block" if region == event.region else "other blocks"}
    own = next(s for s in t.spans if s.name == "mention" and s.of == event.label and s.end <= t.reasoning_start)
    assert {GROUPS[g] for g in groups[own.start:own.end]} == {"evidence"}
    again = [s for s in t.spans if s.name == "mention" and s.of == event.label and s.start >= t.reasoning_start]
    assert again and all({GROUPS[g] for g in groups[s.start:s.end]} == {"reasoning"} for s in again)  # what restates it is no evidence
    assert group_of("step 1:") == {"reasoning"} and group_of("answer", t.answer_start) == {"rest"} and group_of("think", t.text.index("note\n")) == {"rest"}
    assert "note" in group_of(t.text[t.text.index("note\n"):t.text.index("think\n")])


def test_a_token_belongs_to_the_group_of_its_first_letter_and_sinks_to_none(texts, teacher, space):
    t = texts[0]
    event, encoded = next(e for e in teacher.find_events(t, space) if e.kind == "departure"), encode(texts[0], teacher.tokenizer)
    line_break = teacher.tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    groups = key_groups(t, encoded, event, event.position, Sinks(SINKS.ids | {line_break}))
    assert len(groups) == event.position + 1 and groups[0] == -1 and groups[-1] == REST  # its own key counts
    near = encoded.tokens_in(*next((a, b) for name, a, b in event.spans if name == "near-miss"))
    assert (groups[near] == NEAR).all() and len(near) == 2  # the first of them begins with a space that is outside the span
    sinks = np.isin(encoded.ids[:event.position + 1], [*SINKS.ids, line_break])
    assert sinks.sum() > 10 and (groups[sinks] == -1).all() and (groups[~sinks] >= 0).all()


# -- rows --------------------------------------------------------------------------------------------------


def batch_of(model, texts: int = 3, seed: int = 0, length: int = 40):
    """Padded random texts with events anywhere, and groups at random."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, len(TOKENS), (texts, length), generator=g)
    seen = torch.ones_like(ids)
    for i in range(texts):
        seen[i, length - 5 * i:] = 0
    positions = torch.tensor([[3, length - 5 * i - 2, length - 5 * i - 1] for i in range(texts)])
    kinds = torch.tensor([[0, 1, 0]] * texts)
    kinds[-1, -1] = -1
    groups = torch.randint(-1, len(GROUPS), (texts, 3, length), generator=g, dtype=torch.int8)
    for i in range(texts):
        for j in range(3):
            groups[i, j, positions[i, j] + 1:] = -1
    return {"input_ids": ids, "attention_mask": seen}, EventBatch(positions, kinds, groups)


POOLS = {"region": HeadSet(["L0H1", "L2H0", "L2H5"]), "departure": HeadSet(["L1H3"])}


def from_patterns(model, inputs, events, pool):
    """The same masses from whole eager patterns, head by head."""
    patterns = model(**inputs, output_attentions=True).attentions
    out = torch.zeros(*events.kinds.shape, len(GROUPS))
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            if events.kinds[i, j] >= 0:
                heads = list(pool[list(pool)[events.kinds[i, j]]])
                for h in heads:
                    for key, group in enumerate(events.groups[i, j].tolist()):
                        if group >= 0:
                            out[i, j, group] += patterns[h.layer][i, h.head, events.positions[i, j], key] / len(heads)
    return out


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_equal_whole_patterns_and_their_gradients(family, implementation):
    model = random_hf(family)
    inputs, events = batch_of(model)
    model.set_attn_implementation("eager")
    slow = from_patterns(model, inputs, events, POOLS)
    weights = torch.randn(slow.shape, generator=torch.Generator().manual_seed(1))
    (slow * weights).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.set_attn_implementation(implementation)
    watched = EventAttention(model, POOLS)
    with watched.reading(events):
        model(**inputs)
    fast = watched.mass * (events.kinds >= 0)[..., None]
    assert slow.detach().abs().max() > 0.1 and float((fast - slow).abs().max().detach()) < 1e-5
    (fast * weights).sum().backward()
    for name, gradient in expected.items():
        own = model.get_parameter(name).grad
        assert float((gradient - (0 if own is None else own)).abs().max()) < 1e-4 * max(1, float(gradient.abs().max())), name
    assert any(float(g.abs().max()) > 1e-3 for name, g in expected.items() if "k_proj" in name or "c_attn" in name)
    assert check_attention(model, watched, inputs, events) < 1e-5
    assert check_attention(model, watched, *batch_of(model, texts=1)) < 1e-5  # without pads sdpa is given no mask


def test_rows_that_differ_from_the_models_own_patterns_are_refused(monkeypatch):
    model = random_hf("llama")
    watched, (inputs, events) = EventAttention(model, POOLS), batch_of(model)
    real = watched._rows
    monkeypatch.setattr(watched, "_rows", lambda *given: real(*given) + 0.001)
    with pytest.raises(ExactnessError, match="differs from the student's own patterns by 3.0e-03"):
        check_attention(model, watched, inputs, events)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_models_own_output_is_the_same_to_the_bit_while_it_is_watched(family):
    model = random_hf(family)
    inputs, events = batch_of(model)
    plain = model(**inputs).logits
    watched = EventAttention(model, POOLS)
    with watched.reading(events):
        assert torch.equal(model(**inputs).logits, plain)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert not ALL_ATTENTION_FUNCTIONS._local_mapping


def test_sliding_windows_are_read_as_they_are():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(vocab_size=len(TOKENS), hidden_size=48, intermediate_size=48, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, sliding_window=8, max_position_embeddings=64)).eval()
    inputs, events = batch_of(model)
    watched = EventAttention(model, POOLS)
    assert check_attention(model, watched, inputs, events) < 1e-5
    far = EventBatch(events.positions, events.kinds, torch.where(torch.arange(40) < events.positions[..., None] - 8, 0, -1).to(torch.int8))
    with watched.reading(far):
        model(**inputs)
    assert float(watched.mass.detach().abs().max()) == 0  # nothing behind the window


def test_architectures_whose_attention_does_not_come_by_are_refused():
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=len(TOKENS), hidden_size=32, n_layer=3, n_head=8)).eval()
    inputs, events = batch_of(model)
    watched = EventAttention(model, {"region": HeadSet(["L1H1"]), "departure": HeadSet(["L1H3"])})
    with pytest.raises(ExactnessError, match="interface"):
        check_attention(model, watched, inputs, events)


def test_heads_that_are_not_there_and_checkpointed_activations_are_refused():
    model = random_hf("llama")
    with pytest.raises(InputError, match="no head L3H0"):
        EventAttention(model, {"region": HeadSet(["L3H0"])})
    with pytest.raises(InputError, match="no head for departure"):
        EventAttention(model, {"departure": HeadSet()})
    watched, (_, events) = EventAttention(model, POOLS), batch_of(model)
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
    with pytest.raises(InputError, match="checkpoints its activations"), watched.reading(events):
        pass


# -- targets -----------------------------------------------------------------------------------------------


def test_the_teachers_targets_say_what_its_heads_read(targets):
    assert not targets.dropped and {t.kind for mine in targets.of.values() for t in mine} == set(HEADS)
    for mine in targets.of.values():
        assert all(sum(t.mass) == pytest.approx(1, abs=1e-5) for t in mine)
    assert targets.mean()["departure"]["near-miss"] > 0.8  # the head that suppresses it reads it
    assert targets.mean()["label"]["own block"] > 0.8


def test_targets_equal_plain_patterns(targets, texts, teacher, space):
    plain = AutoModelForCausalLM.from_pretrained(tiny.path("llama"), attn_implementation="eager")
    t = texts[0]
    encoded = encode(t, teacher.tokenizer)
    patterns = plain(torch.tensor(encoded.ids)[None], output_attentions=True).attentions
    for target, event in zip(targets.of[t.id], sorted((e for e in teacher.find_events(t, space) if e.primary), key=lambda e: (e.position, e.kind)), strict=True):
        row = np.mean([patterns[h.layer][0, h.head, event.position].detach().numpy() for h in HEADS[event.kind]], 0)
        groups = key_groups(t, encoded, event, event.position, SINKS)
        slow = np.array([row[:len(groups)][groups == g].sum() for g in range(len(GROUPS))])
        assert target.mass == pytest.approx(tuple(slow / slow.sum()), abs=1e-4) and target.kind == event.kind
        assert target.keys == tuple((groups == g).sum() for g in range(len(GROUPS)))
        assert t.text[target.start:target.end].strip() in event.label


def test_targets_go_to_a_file_and_come_back(targets, tmp_path):
    targets.save(tmp_path / "targets.jsonl")
    back = Targets.load(tmp_path / "targets.jsonl")
    assert back.of == targets.of and back.heads == targets.heads and back.transcripts == targets.transcripts
    (tmp_path / "bad.jsonl").write_text('{"id": "a", "prompt": "x", "answer": "y"}\n')
    with pytest.raises(InputError, match="line 1: no transcript with targets"):
        Targets.load(tmp_path / "bad.jsonl")


def test_a_decision_is_found_in_other_tokens_by_its_characters(targets, texts, space):
    tokenizer = DecisionModel.load_tokenizer(tiny.path("gpt2-student"))
    for t in texts:
        encoded = encode(t, tokenizer)
        placed, lost = place(t, targets.of[t.id], space, tokenizer, SINKS, encoded=encoded)
        assert not lost and len(placed) == len(targets.of[t.id])
        for p in placed:
            start, end = encoded.offsets[p.position + 1]
            assert t.text[start:end].strip() == t.text[p.target.start:p.target.end].strip()
            assert int(encoded.ids[p.position + 1]) < len(tokenizer)
            assert (start, end) != (p.target.start, p.target.end) or p.target.kind != "region"  # spaces stand elsewhere


def test_a_decision_is_found_by_what_it_is_and_where_it_is(targets, texts, space, teacher):
    t = texts[0]
    mine = targets.of[t.id]
    forth, back = (place(t, order, space, teacher.tokenizer, SINKS)[0] for order in (mine, mine[::-1]))
    assert [(p.target, p.position) for p in forth] == [(p.target, p.position) for p in reversed(back)]
    elsewhere = replace(mine[0], start=0, end=len("list"))
    assert place(t, [elsewhere], space, teacher.tokenizer, SINKS) == ([], {NOTHING: 1})
    assert len(place(t, [mine[0], mine[0]], space, teacher.tokenizer, SINKS)[0]) == 1  # one decision stands for one target


def test_decisions_that_the_students_tokenizer_merges_are_counted(targets, texts, space):
    """A tokenizer with whole labels decides regions and labels in one token; both are then its region decision."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({w for t in texts for w in re.findall(r" ?[A-Za-z]+(?:-[a-z]+)?| ?[0-9]+|\n| ?[^\sA-Za-z0-9]|\s", t.text)} | set(space.labels) | {f" {label}" for label in space.labels})
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+(?:-[a-z]+)?| ?[0-9]+|\n| ?[^\sA-Za-z0-9]|\s"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="\n")
    lost = sum((place(t, targets.of[t.id], space, tokenizer, SINKS)[1] for t in texts), Counter())
    kinds = Counter(t.kind for mine in targets.of.values() for t in mine)
    assert lost[MERGED] >= kinds["label"] and sum(lost.values()) < len(targets)


def test_ids_of_another_tokenizer_are_refused_even_if_vocabularies_are_equally_large(texts, space, teacher, targets, pool):
    from transformers import PreTrainedTokenizerFast

    state = json.loads(teacher.tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    names = [n for n in vocabulary if vocabulary[n] > 3]
    state["model"]["vocab"] = {**vocabulary, **dict(zip(names, [vocabulary[n] for n in reversed(names)], strict=True))}
    from tokenizers import Tokenizer

    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), bos_token="<bos>", eos_token="<end>", pad_token="<pad>", unk_token="<unk>")
    assert len(other) == len(teacher.tokenizer)
    mine = replace(texts[0], token_ids=tuple(map(int, encode(texts[0], teacher.tokenizer).ids)))
    assert examples(replace(targets, transcripts=(mine,)), space, teacher.tokenizer, pool)[0]  # its own are taken
    with pytest.raises(InputError, match="token_ids do not decode to its text"):
        examples(replace(targets, transcripts=(mine,)), space, other, pool)


def test_shuffled_targets_are_as_sharp_and_point_elsewhere(targets):
    found = shuffled(targets, 3)
    for name, mine in targets.of.items():
        for a, b in zip(mine, found.of[name], strict=True):
            assert sorted(a.mass) == sorted(b.mass) and np.argmax(a.mass) != np.argmax(b.mass)
            assert all(m == 0 for m, n in zip(b.mass, a.keys, strict=True) if n == 0)
            assert (a.kind, a.label, a.start) == (b.kind, b.label, b.start)
    assert shuffled(targets, 3).of == found.of and shuffled(targets, 4).of != found.of
    assert all(t.mass[REST] == 1 for mine in misdirected(targets).of.values() for t in mine)  # the clinic has no instruction


# -- training ----------------------------------------------------------------------------------------------


def test_a_student_that_copies_the_teacher_has_no_distance_and_one_that_swaps_the_near_miss_has_some(data, teacher, pool):
    model = AutoModelForCausalLM.from_pretrained(tiny.path("llama"))
    batch = Collator(2, all_kinds(pool))(data)
    watched = EventAttention(model, {kind: pool.heads[kind] for kind in all_kinds(pool)})
    with watched.reading(EventBatch(batch["event_positions"], batch["event_kinds"], batch["event_groups"])):
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    mass, wanted, weights = watched.mass.flatten(0, 1), batch["event_mass"].flatten(0, 1), batch["event_weights"].flatten()
    assert float(weights.sum()) == pytest.approx(1)
    mass = mass.detach()
    assert abs(float(mistill_loss(wanted, mass, weights))) < 1e-6
    swapped = mass.clone()
    swapped[:, [NEAR, BLOCK]] = mass[:, [BLOCK, NEAR]]
    assert float(mistill_loss(wanted, swapped, weights)) > 0.5


def arguments(out, **changes):
    return TrainingArguments(**dict(output_dir=str(out), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-3, report_to="none", remove_unused_columns=False, label_names=["labels"],
                                    disable_tqdm=True, dataloader_pin_memory=False, seed=1, data_seed=1, save_strategy="no", logging_strategy="no", dataloader_drop_last=True) | changes)


def student(seed: int = 0):
    set_seed(seed)
    return AutoModelForCausalLM.from_pretrained(tiny.path("llama-student"))


def trained(data, pool, out, lam, **changes):
    trainer = MistillTrainer(student(), arguments(out, **changes), Collator(2, all_kinds(pool)), data, pool=pool.heads, lam=lam)
    trainer.train()
    return trainer.model


def same(a, b) -> bool:
    return all(torch.equal(x, b.get_parameter(name)) for name, x in a.named_parameters())


def test_with_lambda_0_training_is_plain_training_bit_for_bit(data, pool, tmp_path):
    class Plain(Collator):
        def __call__(self, batch):
            return {k: v for k, v in super().__call__(batch).items() if not k.startswith("event")}

    plain = Trainer(student(), arguments(tmp_path / "a"), Plain(2, all_kinds(pool)), data)
    plain.train()
    assert not same(plain.model, student())
    assert same(plain.model, trained(data, pool, tmp_path / "b", 0.0))
    once, twice = (trained(data, pool, tmp_path / str(lam), lam) for lam in (1.0, 2.0))
    assert not same(plain.model, once) and not same(once, twice)


def test_the_gradient_reaches_queries_and_keys_of_the_pool_and_nothing_above_it(data, pool):
    model = student()
    heads = {"departure": HeadSet(["L1H7"])}
    departures = [replace(e, placed=tuple(p for p in e.placed if p.target.kind == "departure")) for e in data]
    batch = Collator(2, ["departure"])(departures)
    watched = EventAttention(model, heads)
    with watched.reading(EventBatch(batch["event_positions"], batch["event_kinds"], batch["event_groups"])):
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    mistill_loss(batch["event_mass"].flatten(0, 1), watched.mass.flatten(0, 1), batch["event_weights"].flatten()).backward()
    gradient = lambda name: getattr(model.model.layers[1].self_attn, name).weight.grad  # noqa: E731
    width = model.config.head_dim
    per_head = gradient("q_proj").view(8, width, -1).abs().sum((1, 2))
    assert per_head[7] > 0 and float(per_head[:7].sum()) == 0
    group = 7 // (8 // model.config.num_key_value_heads)
    assert gradient("k_proj").view(model.config.num_key_value_heads, width, -1)[group].abs().sum() > 0
    assert gradient("v_proj") is None or float(gradient("v_proj").abs().sum()) == 0
    assert model.model.layers[2].self_attn.q_proj.weight.grad is None and model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_accumulated_batches_are_one_batch(data, pool, tmp_path):
    whole = trained(data[:4], pool, tmp_path / "a", 1.0, max_steps=1, per_device_train_batch_size=4)
    parts = trained(data[:4], pool, tmp_path / "b", 1.0, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    moved = max(float((x - student().get_parameter(name)).detach().abs().max()) for name, x in whole.named_parameters())
    assert moved > 1e-4
    gradients = [float((x - parts.get_parameter(name)).detach().abs().mean()) for name, x in whole.named_parameters() if x.ndim > 1]
    assert np.mean(gradients) < 0.02 * moved  # AdamW's first step is a sign: rounding flips a few


def test_the_distance_falls_where_it_is_trained(data, pool, tmp_path):
    heads = {"departure": HeadSet(["L2H3"])}
    only = [replace(e, placed=tuple(p for p in e.placed if p.target.kind == "departure")) for e in data]
    trainer = MistillTrainer(student(), arguments(tmp_path, max_steps=30, logging_strategy="steps", logging_steps=5, learning_rate=2e-3), Collator(2, ["departure"]), only, pool=heads, lam=1.0)
    trainer.train()
    log = [row["distance"] for row in trainer.state.log_history if "distance" in row]
    assert len(log) == 6 and log[-1] < 0.5 * log[0]


class Stop(TrainerCallback):
    def __init__(self, at: int | None = None):
        self.at, self.steps = at, 0

    def on_step_end(self, args, state, control, **_):
        self.steps += 1
        if state.global_step == self.at:
            control.should_training_stop = True


@pytest.mark.parametrize("lora", [0, 2])
def test_an_interrupted_training_goes_on_to_the_same_weights(targets, pool, space, tmp_path, lora):
    training = Training(steps=6, batch=2, rate=1e-3, save_every=2, lora=lora)
    make = lambda where, **more: train_student(str(tiny.path("llama-student")), tmp_path / where, "mistill", targets, pool, space, training, 5, **more)  # noqa: E731
    assert make("broken", callbacks=[Stop(3)]) == {} and not (tmp_path / "broken" / "training.json").exists()
    (tmp_path / "broken" / "checkpoints" / "checkpoint-9").mkdir()  # torn: there is no state in it
    counted = Stop()
    whole, gone_on = make("whole"), make("broken", callbacks=[counted])
    assert counted.steps == 4  # from the checkpoint at step 2 on
    assert whole["steps"] == gone_on["steps"] == 6 and whole["events"] == len(targets) and whole["checked"] < 1e-4
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("whole", "broken"))
    assert same(a, b) and not same(a, student())
    assert not (tmp_path / "whole" / "checkpoints").exists()
    assert make("whole", callbacks=[counted]) == whole and counted.steps == 4  # done: nothing is trained again
    assert DecisionModel.from_pretrained(tmp_path / "whole" / "model").tested.verdict == "exact"


SCRIPT = """
import sys, torch
from pathlib import Path
from decisionheads import tiny
from decisionheads._processes import working_together
from decisionheads.distillation.arms import Training, train_student
from decisionheads.distillation.pool import Pool
from decisionheads.distillation.targets import Targets
torch.set_num_threads(1)
folder, out, batch = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
with working_together("cpu"):
    train_student(str(tiny.path("llama-student")), out, "mistill", Targets.load(folder / "targets.jsonl"), Pool.load(folder / "pool.json"), tiny.labels(), Training(steps=2, batch=batch, rate=1e-3), 0, device="cpu")
"""


@pytest.mark.whole
def test_two_processes_train_as_one_with_twice_the_batch(targets, pool, tmp_path):
    targets.save(tmp_path / "targets.jsonl"), pool.save(tmp_path / "pool.json"), (tmp_path / "script.py").write_text(SCRIPT)
    for name, processes, batch in (("one", 1, 4), ("two", 2, 2)):
        launch(str(tmp_path / "script.py"), str(tmp_path), str(tmp_path / name), str(batch), processes=processes)
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("one", "two"))
    apart = lambda a, b: sum(float((x - b.get_parameter(name)).detach().abs().sum()) for name, x in a.named_parameters())  # noqa: E731
    assert apart(one, two) < 1e-3 * apart(one, student())
    logged = [json.loads((tmp_path / name / "training.json").read_text())["log"][0]["distance"] for name in ("one", "two")]
    assert logged[0] == pytest.approx(logged[1], rel=1e-3)


def test_arms_differ_in_what_they_should_and_in_nothing_else(targets, pool):
    training = Training(lam=2.0)
    found = {name: arm_of(name, targets, pool, training, 1) for name in ("cot", "mistill", "shuffled", "random-pool", "all-heads", "wrong-group")}
    assert {name: lam for name, (_, _, lam) in found.items()} == {"cot": 0.0, **dict.fromkeys(("mistill", "shuffled", "random-pool", "all-heads", "wrong-group"), 2.0)}
    assert found["mistill"][:2] == (targets, pool) == found["cot"][:2]
    assert found["shuffled"][0].of != targets.of and found["shuffled"][1] == pool
    drawn = found["random-pool"][1]
    for kind, heads in pool.heads.items():
        assert drawn.heads[kind].per_layer() == heads.per_layer() or sum(8 - n for n in heads.per_layer().values()) < 20
        assert len(drawn.heads[kind]) == len(heads) and not len(drawn.heads[kind] & heads)
    assert arm_of("random-pool", targets, pool, training, 1)[1] == drawn
    assert all(len(h) == 32 for h in found["all-heads"][1].heads.values())
    with pytest.raises(InputError, match="unknown arm 'best'"):
        arm_of("best", targets, pool, training, 1)


def test_a_pool_is_kept_and_a_changed_one_refused(pool, tmp_path):
    pool.save(tmp_path / "pool.json")
    assert Pool.load(tmp_path / "pool.json") == pool
    (tmp_path / "pool.json").write_text((tmp_path / "pool.json").read_text().replace("L1H7", "L1H6"))
    with pytest.raises(InputError, match="changed since it was chosen"):
        Pool.load(tmp_path / "pool.json")


def test_texts_that_do_not_fit_are_counted_and_settings_that_make_no_sense_refused(targets, space, teacher, pool):
    lengths = sorted(len(encode(t, teacher.tokenizer)) for t in targets.transcripts)
    found, lost = examples(targets, space, teacher.tokenizer, pool, lengths[0])
    assert len(found) + lost["text longer than the student's context"] == len(targets.transcripts) and found
    with pytest.raises(InputError, match="longer context"):
        examples(targets, space, teacher.tokenizer, pool, 10)
    for bad, said in ((dict(steps=0), "at least 1"), (dict(rate=0.0), "positive"), (dict(precision="int8"), "unknown precision")):
        with pytest.raises(InputError, match=said):
            Training(**bad)


def test_another_tokenizer_makes_the_same_function_of_the_text(tmp_path):
    """The embedded cross-family student began as the other one, with its tokens renamed and its spaces moved."""
    from decisionheads.tiny.retokenize import other_tokenizer, retokenize, vocabulary

    folder = save_random("gpt2", tmp_path / "old")
    plain, other = AutoModelForCausalLM.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(retokenize(folder, tmp_path / "new"))
    text = tiny.transcript("x", tiny.draw(1, seed=3)[0]).text
    ids, new = DecisionModel.load_tokenizer(folder)(text)["input_ids"], other_tokenizer()(text)["input_ids"]
    old = [i for _, i in vocabulary()]
    assert [old[i] for i in new] == ids and new != ids
    assert torch.equal(plain(torch.tensor([ids])).logits[..., old], other(torch.tensor([new])).logits)


def test_a_prompt_is_never_trained_on(data, texts, teacher):
    batch = Collator(2, ["region", "label", "departure"])(data[:2])
    for row, ids, t in zip(batch["labels"], batch["input_ids"], texts, strict=False):
        written = teacher.tokenizer.decode(ids[row != -100])
        assert written == t.reasoning + t.answer
        assert isinstance(t, Transcript)
