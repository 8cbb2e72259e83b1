"""Known failures of this trade, each a test named after its case: which head, hooks, pads, blocking, patching.

One small input each, with the value that is right, and beside it what the usual fault gives instead, so that
the two are told apart. Longer tests of the same kinds lie beside the modules.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decisionheads import (
    AddToZ,
    BlockReads,
    DecisionModel,
    HeadSet,
    InputError,
    Keep,
    KnockIn,
    MeanAblate,
    _hooked,
    find_events,
    interventions,
    reference_means,
    tiny,
)
from decisionheads._hooked import Hooked
from decisionheads._rows import Rows
from decisionheads.ablation import ReferenceMeans, event_margin
from decisionheads.branches import Branch, branch_logits, clean_z, run_pack
from decisionheads.heads import HeadScores, kv_group
from decisionheads.interventions import ReplaceValues
from decisionheads.model import _bridge, _sharing_copy
from decisionheads.tiny.clinic import clinic_tokenizer

from . import oracle
from .conftest import plain_hf, random_hf

EXACT = 2e-5  # logits, float32
RENAMED = tuple(map(int, version("transformers").split(".")[:2])) >= (5, 24)  # layers are handed their cache by another name
IDS = torch.randperm(80, generator=torch.Generator().manual_seed(3)) + 8
SHAPES = [("llama", {}), ("llama", dict(hidden_size=40, num_attention_heads=8, num_key_value_heads=2, attention_bias=True)),
          ("llama", dict(num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2)), ("gpt2", {})]


def hf_of(family, **changes):
    """A random model whose biases are not zero either, so that one counted twice shows."""
    hf = random_hf(family, **changes)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in hf.named_parameters():
            if name.endswith("bias"):
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return hf


@pytest.fixture(scope="module", params=SHAPES, ids=["9 to 3", "8 to 2", "4 to 4", "gpt2"])
def built(request):
    """A model, its plain twin, a text that it has read, and values to put in."""
    family, changes = request.param
    hf, plain = hf_of(family, **changes), hf_of(family, **changes)
    copy = _sharing_copy(hf)
    model = DecisionModel(_bridge(hf), clinic_tokenizer(), plain=copy)
    plain.set_attn_implementation("eager")
    h = model.hooked
    values = np.random.default_rng(0).normal(size=(h.n_layers, h.n_heads, h.d_head)).astype(np.float32)
    return SimpleNamespace(model=model, hooked=h, plain=plain, prefix=h.prefill(IDS), values=values,
                           groups=getattr(plain.config, "num_key_value_heads", h.n_heads))


def run(b, *changes, at=40, prefix=None):
    """Logits at a position under some interventions."""
    ((_, logits),) = branch_logits(b.hooked, prefix or b.prefix, [Branch(at, (), changes)])
    return logits[0]


def z_at(b, *changes, at=40, prefix=None):
    """z `[layer, head, d_head]` at a position as later parts of the model see it."""
    seen = {}
    with torch.no_grad():
        run_pack(b.hooked, prefix or b.prefix, [Branch(at, (), changes)], lambda layer, z: seen.setdefault(layer, z)[:])
    return torch.stack([seen[layer][0] for layer in range(b.hooked.n_layers)])


def pattern_at(b, *changes, at=40):
    """Attention weights `[layer, head, key]` of the row at a position, its own key last."""
    seen = []
    with torch.no_grad():
        run_pack(b.hooked, b.prefix, [Branch(at, (), changes)], on_pattern=lambda layer, pattern: seen.append(pattern[:, 0]))
    return torch.stack(seen)


# -- which head, and where the edit lands ------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 40])
def test_a1_a_head_is_a_slice_of_the_output_projections_input(built, at):
    clean = run(built, at=at)
    for layer in range(built.hooked.n_layers):
        for head in range(built.hooked.n_heads):
            ours = run(built, MeanAblate(HeadSet([(layer, head)]), 0 * built.values), at=at)
            assert (ours - oracle.ablated(built.plain, IDS, at, layer, head, 0.0)).abs().max() <= 1e-4

            def slice_output(module, args, out, head=head):
                out, width = out.clone(), out.shape[-1] // built.hooked.n_heads
                out[0, at, head * width:(head + 1) * width] = 0
                return out

            handle = oracle.output_projections(built.plain)[layer].register_forward_hook(slice_output)
            wrong = oracle.logits(built.plain, IDS)[at]
            handle.remove()
            assert torch.cosine_similarity(ours - clean, wrong - clean, dim=0) < 0.9


def test_a2_an_edit_of_one_query_head_changes_no_other(built):
    clean = z_at(built)
    for head in range(built.hooked.n_heads):
        for change in (MeanAblate, KnockIn, AddToZ):
            moved = (z_at(built, change(HeadSet([(1, head)]), built.values)) - clean).abs().amax(-1)
            assert moved[1, head] > 0 and torch.cat([moved[0], moved[1, :head], moved[1, head + 1:]]).max() == 0
        # values replaced for one query head are its own alone, although its group shares them
        moved = (z_at(built, ReplaceValues(HeadSet([(1, head)]), 5, 30)) - clean).abs().amax(-1)
        assert moved[1, head] > 0 and torch.cat([moved[0], moved[1, :head], moved[1, head + 1:]]).max() == 0


def test_a2_zeroing_a_value_head_changes_its_whole_group(built):
    if not hasattr(built.plain, "model"):
        pytest.skip("every head has values of its own")
    before, width = oracle.z_of(built.plain, IDS, 40)[1], built.hooked.d_head
    for group in range(built.groups):

        def zero(module, args, out, group=group):
            out = out.clone()
            out[..., group * width:(group + 1) * width] = 0
            return out

        handle = built.plain.model.layers[1].self_attn.v_proj.register_forward_hook(zero)
        after = oracle.z_of(built.plain, IDS, 40)[1]
        handle.remove()
        changed = [h for h in range(built.hooked.n_heads) if not torch.equal(before[h], after[h])]
        assert changed == [h for h in range(built.hooked.n_heads) if kv_group(h, built.hooked.n_heads, built.groups) == group]


def test_a3_the_group_of_a_head_is_a_quotient_and_no_remainder(built):
    assert [kv_group(h, 9, 3) for h in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [kv_group(h, 8, 2) for h in range(8)] == [0] * 4 + [1] * 4 and [kv_group(h, 4, 4) for h in range(4)] == [0, 1, 2, 3]
    for heads, groups in ((7, 3), (3, 7), (9, 0)):
        with pytest.raises(ValueError, match=f"{heads} query heads do not divide into {groups}"):
            kv_group(1, heads, groups)
    for head in range(built.hooked.n_heads):  # where the engine itself looks a group up
        ours = run(built, ReplaceValues(HeadSet([(1, head)]), 5, 30))
        assert (ours - oracle.values_replaced(built.plain, IDS, 40, [(1, head)], list(range(5, 30)))).abs().max() <= 5 * EXACT


def test_a5_heads_and_the_bias_once_sum_to_the_attention_block(built):
    for layer, projection in enumerate(oracle.output_projections(built.plain)):
        seen = []
        handle = projection.register_forward_hook(lambda m, args, out, seen=seen: seen.append(out[0, 40]))
        z = oracle.z_of(built.plain, IDS, 40)[layer]
        handle.remove()
        parts, bias = built.hooked.head_outputs(layer, z), built.hooked.output_bias(layer)
        assert (parts.sum(0) + bias - seen[0]).abs().max() <= 1e-5
        assert parts.abs().max() > 0.1 and (getattr(projection, "bias", None) is None) == (float(bias.abs().max()) == 0)


def test_a7_zeroing_w_q_leaves_a_head_that_averages_its_values(built):
    if hasattr(built.plain, "transformer") or getattr(built.plain.config, "attention_bias", False):
        pytest.skip("one projection holds queries, keys and values, or has a bias")
    weight = built.plain.model.layers[1].self_attn.q_proj.weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.zero_()
        z, values = oracle.z_of(built.plain, IDS, 40)[1], oracle.values_of(built.plain, IDS)[1]
        assert (z - values[:, :41].mean(1)).abs().max() <= 1e-4 and z.abs().max() > 0.1  # the running mean, and not nothing
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    page = (Path(__file__).parent.parent / "docs" / "events.md").read_text()
    assert "Zeroing W_Q" in page and "zeroing W_Q" in interventions.__doc__


# -- hooks and caches -----------------------------------------------------------------------------------


def test_b1_a_cached_token_equals_the_full_run_and_a_lone_one_does_not(built, monkeypatch):
    for at in (1, 17, 40, 79):
        full, lone = oracle.logits(built.plain, IDS[:at + 1])[-1], built.hooked.full_logits(IDS[at:at + 1], start=at)[0]
        assert (run(built, at=at) - full).abs().max() <= 1e-3
        assert (lone - full).abs().max() > 1
    monkeypatch.setattr(_hooked, "_repair_cache_argument", lambda bridge, layers: [])
    if RENAMED:
        with pytest.raises(InputError) as caught:
            DecisionModel(built.model.bridge, built.model.tokenizer, plain=built.hooked.plain)
        assert all(version(name) in str(caught.value) for name in ("transformers", "transformer-lens")) and "\n" not in str(caught.value)


OPTIONS = {"mean_ablate": {"rule": "vocabulary"}, "attribute": {"steps": 3, "rule": "vocabulary"}, "find_events": {"closers": (5, 9), "exclude_emitted": True}, "reference_means": {"minimum": 3}}


def test_b2_every_public_option_changes_the_result_and_an_unknown_one_is_an_error(model, readings, means, space):
    import inspect

    from decisionheads.ablation import mean_ablate
    from decisionheads.attribution import attribute

    verbs = {"mean_ablate": mean_ablate, "attribute": attribute, "find_events": find_events, "reference_means": reference_means}
    idle = {"memory", "encoded"}  # what changes nothing is tested to change nothing elsewhere
    for name, verb in verbs.items():  # an option that comes has to be tried here
        assert {p.name for p in inspect.signature(verb).parameters.values() if p.kind == p.KEYWORD_ONLY} - idle == set(OPTIONS[name])
        with pytest.raises(TypeError):
            verb(*{"mean_ablate": (model, readings[6], means), "attribute": (model, readings[6], means)}.get(name, (model, readings[:6])), nonsense=1)
    for name in ("mean_ablate", "attribute"):
        scores = lambda found: getattr(found, "scores", None) or found.gradient  # noqa: E731
        plain = scores(verbs[name](model, readings[6], means)).values
        for option, value in OPTIONS[name].items():
            assert not np.array_equal(scores(verbs[name](model, readings[6], means, **{option: value})).values, plain), (name, option)
    with pytest.raises(InputError, match="are needed"):
        reference_means(model, readings[:2])
    with pytest.warns(UserWarning, match="are advised"):
        assert min(reference_means(model, readings[:6], minimum=3).counts.values()) >= 3


def test_b2_options_of_events_change_events():
    from decisionheads import LabelSpace, Transcript

    from .bpe import bpe, token

    twice, prefix = Transcript("t", "codes:\n", "", "answer: I50.9, I10\n"), Transcript("t", "codes:\n", "", "answer: I50.9\n")
    events = lambda t, labels, **options: find_events(t, LabelSpace(labels), bpe(), **options)  # noqa: E731
    assert len(events(twice, ["I50.9", "I10"])) > len(events(twice, ["I50.9", "I10"], exclude_emitted=True))
    assert len(events(prefix, ["I50", "I50.9"], closers=(token("\n"),))) == 1 > len(events(prefix, ["I50", "I50.9"]))
    with pytest.raises(TypeError):
        events(twice, ["I50.9", "I10"], exclude=True)


def test_b3_each_hook_fires_once_or_its_name_is_said(built, monkeypatch):
    points, change = built.hooked.z_points, MeanAblate(HeadSet([(1, 0)]), built.values)
    monkeypatch.setattr(built.hooked, "z_points", {**points, 1: torch.nn.Identity()})
    with pytest.raises(RuntimeError, match=r"hook blocks\.1\.attn\.hook_z fired 0 times"):
        run(built, change)
    monkeypatch.setattr(built.hooked, "z_points", points)
    inside = []

    def twice(module, args):
        if not inside:
            inside.append(1)
            module(*args)
            inside.clear()

    handle = points[1].register_forward_pre_hook(twice)
    try:
        with pytest.raises(RuntimeError, match=r"hook blocks\.1\.attn\.hook_z fired 2 times"):
            run(built, change)
    finally:
        handle.remove()
    assert torch.isfinite(run(built, change)).all()


def test_b4_after_a_hook_that_raised_the_next_forward_is_bitwise_the_first(built):
    hf = built.model.bridge.original_model
    count = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in hf.modules())  # noqa: E731
    fired = []
    mine = built.model.bridge.blocks[1].attn.register_forward_hook(lambda *_: fired.append(1))
    try:
        hooks, clean = count(), run(built)

        def fail(*_):
            raise KeyError("in the middle")

        for where in ({"z_hook": fail}, {"blocked": fail}, {"on_pattern": fail}):
            with pytest.raises(KeyError):
                built.hooked.run(built.prefix, Rows.single(built.prefix.ids, torch.tensor([5])), **where)
            assert count() == hooks
            fired.clear()
            assert torch.equal(run(built), clean) and len(fired) == 1
    finally:
        mine.remove()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_b6_gradients_equal_central_differences(family, space):
    model = DecisionModel(_bridge(hf_of(family).double()), clinic_tokenizer())
    t = tiny.transcript("t", tiny.draw(1, seed=5)[0])
    reading = model.read(t, model.find_events(t, space).events[:1])
    (event,) = reading.events
    margin, z = event_margin(reading, event), clean_z(model.hooked, reading.prefix, [event.position])[0].numpy()
    one = lambda layer, head, d: np.eye(z.size)[np.ravel_multi_index((layer, head, d), z.shape)].reshape(z.shape)  # noqa: E731

    def slope(heads, direction, step):
        sides = [Branch(event.position, (), (AddToZ(heads, side * direction),)) for side in (step, -step)]
        up, down = (float(margin_of(logits[0], margin)) for _, logits in sorted(branch_logits(model.hooked, reading.prefix, sides), key=lambda x: x[0]))
        return (up - down) / (2 * step)

    margin_of = lambda row, m: row[m.chosen] - row[m.against[0]]  # noqa: E731 (in float64)
    rng, got, want = np.random.default_rng(0), [], []
    for _ in range(12):
        layer, head, d = (int(rng.integers(n)) for n in z.shape)
        heads, direction = HeadSet([(layer, head)]), one(layer, head, d)  # against a mean one step away attribution is one coordinate of the gradient
        got.append(model.attribute(reading, ReferenceMeans({event.kind: z - direction}, {}, frozenset())).gradient.values[0, layer, head])
        # norms of Llama compute in float32 whatever the weights: wide steps, the curvature extrapolated away
        want.append((4 * slope(heads, direction, 0.02) - slope(heads, direction, 0.04)) / 3)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    assert np.abs(want).max() > 0.01 and np.all(got)


# -- padding and positions ------------------------------------------------------------------------------


def test_c1_pads_on_either_side_move_no_margin(built):
    ours = run(built)
    for left in range(9):
        for right in range(0, 9, 2):
            ids = torch.cat([torch.zeros(left, dtype=torch.long), IDS[:41], torch.zeros(right, dtype=torch.long)])
            mask = torch.cat([torch.zeros(left), torch.ones(41), torch.zeros(right)]).long()
            with torch.no_grad():
                row = built.plain(input_ids=ids[None], attention_mask=mask[None], position_ids=(mask.cumsum(0) - 1).clamp(min=0)[None]).logits[0, left + 40]
            assert abs(float((row[9] - row[11]) - (ours[9] - ours[11]))) <= 1e-4
    with torch.no_grad():
        unmasked = built.plain(input_ids=ids[None]).logits[0]
    assert (unmasked[left + 40] - ours).abs().max() > 0.1 and (unmasked[-1] - ours).abs().max() > 0.1  # left pads seen, a right pad read


def test_c3_a_mean_counts_events_and_nothing_else(model, readings, monkeypatch):
    """z values 1 and 3 with two pads of 100 behind them, and 2, 4, 6, 8: their mean is 4.0, not 28.0, nor the 3.5 of a mean of means."""
    from dataclasses import replace

    import decisionheads.ablation as ablation

    tables = {"a": [1.0, 3.0, 100.0, 100.0], "b": [2.0, 4.0, 6.0, 8.0]}
    event = readings[0].events[0]
    given = [replace(readings[i], transcript=replace(readings[i].transcript, id=name, group=None),
                     events=tuple(replace(event, transcript=name, kind="label", position=p, primary=True) for p in range(n))) for i, (name, n) in enumerate((("a", 2), ("b", 4)))]
    names = {id(r.prefix): r.transcript.id for r in given}
    monkeypatch.setattr(ablation, "check_events", lambda *_: None)
    monkeypatch.setattr(ablation, "clean_z", lambda hooked, prefix, positions, memory: torch.tensor(tables[names[id(prefix)]])[list(positions)].view(-1, 1, 1, 1))
    with pytest.warns(UserWarning, match="are advised"):
        found = reference_means(model, given, minimum=1)
    assert found.means["label"].ravel().tolist() == [4.0] and found.counts == {"label": 6}


# -- blocking and patterns --------------------------------------------------------------------------------


def test_d1_a_head_that_may_read_nothing_reads_itself_and_no_nan(built):
    values = oracle.values_of(built.plain, IDS)
    other = built.hooked.prefill(torch.cat([IDS[:41], IDS[41:].flip(0)]))
    for head in range(built.hooked.n_heads):
        block = BlockReads(HeadSet([(0, head)]), 0, 1000)
        row, z = run(built, block), z_at(built, block)
        assert torch.isfinite(row).all() and (z[0, head] - values[0, head, 40]).abs().max() <= EXACT
        assert pattern_at(built, block)[0, head, :40].sum() == 0 and torch.equal(row, run(built, block, prefix=other))  # nothing later is read instead
    everything = BlockReads(built.hooked.heads, 0, 1000)
    assert torch.isfinite(run(built, everything)).all() and not everything.keys(80, 40)[40] and everything.keys(80, 40).sum() == 79
    assert torch.equal(run(built, everything, everything), run(built, everything))  # blocked twice is blocked


def test_d1_a_masked_key_weighs_nothing_however_large_the_scores():
    """Scores of more than 1e5 apart: a mask of -1e5, or one in a format of 16 bits, would still let the best key win."""
    hf = hf_of("llama")
    with torch.no_grad():
        for layer in hf.model.layers:
            layer.self_attn.q_proj.weight.mul_(2e5)
    model = DecisionModel(_bridge(hf), clinic_tokenizer(), test=False)
    b = SimpleNamespace(hooked=model.hooked, prefix=model.hooked.prefill(IDS))
    scores = []
    handle = model.bridge.blocks[0].attn.hook_attn_scores.register_forward_hook(lambda m, a, out: scores.append(out[0, :, 0]))
    clean = pattern_at(b)
    handle.remove()
    assert (scores[0].max(-1).values - scores[0].min(-1).values).min() > 1e5
    for head in range(9):
        best = int(clean[0, head].argmax())
        if best < 40:
            cut = pattern_at(b, BlockReads(HeadSet([(0, head)]), best, best + 1))[0, head]
            assert cut[best] == 0 and abs(float(cut.sum()) - 1) <= 1e-6 and clean[0, head, best] > 0.5


def test_d3_blocked_before_softmax_rows_sum_to_one_and_zeroed_after_it_they_are_another_option(built):
    for layer, head in [(0, 0), (1, 2), (1, built.hooked.n_heads - 1)]:
        span = (HeadSet([(layer, head)]), 5, 30)
        rows = pattern_at(built, BlockReads(*span))
        assert (rows.sum(-1) - 1).abs().max() <= 1e-6 and rows[layer, head, 5:30].sum() == 0
        clean, blocked, zeroed = run(built), run(built, BlockReads(*span)), run(built, ReplaceValues(*span))
        assert min((a - b).abs().max() for a, b in ((clean, blocked), (clean, zeroed), (blocked, zeroed))) > 1e-4
        z, at = z_at(built), z_at(built, ReplaceValues(*span))
        given = torch.einsum("k,kd->d", pattern_at(built)[layer, head, 5:30], oracle.values_of(built.plain, IDS)[layer, head, 5:30])
        assert (z[layer, head] - given - at[layer, head]).abs().max() <= EXACT  # no weight was handed on


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_d4_patterns_of_a_model_loaded_with_sdpa_are_there_and_margins_are_the_same(family, tmp_path):
    from transformers import AutoModelForCausalLM

    hf_of(family).save_pretrained(tmp_path)
    sdpa, eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval(), plain_hf(tmp_path)
    assert sdpa.config._attn_implementation == "sdpa"
    want, ours = oracle.logits(eager, IDS)[40], oracle.logits(sdpa, IDS)[40]
    assert (ours - want).abs().max() <= 1e-4
    model = DecisionModel(_bridge(sdpa), clinic_tokenizer())
    b = SimpleNamespace(hooked=model.hooked, prefix=model.hooked.prefill(IDS))
    rows = pattern_at(b)
    assert len(rows) == model.n_layers and (rows - oracle.attention_of(eager, IDS)[:, :, 40, :41]).abs().max() <= EXACT
    assert (run(b) - want).abs().max() <= 1e-4 and (run(b, BlockReads(HeadSet([(1, 0)]), 5, 30)) - want).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["OPT", "GPT-J"])
def test_b3_d4_a_bridge_that_was_booted_in_sdpa_gives_patterns_or_raises(name):
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    from .families import FAMILIES

    hf = FAMILIES[name].make()
    hf.set_attn_implementation("sdpa")
    hooked = Hooked(build_bridge_from_module(hf, type(hf).__name__, hf_config=hf.config))
    b = SimpleNamespace(hooked=hooked, prefix=hooked.prefill(IDS[:41] % 50))
    with pytest.raises(RuntimeError, match=r"hook blocks\.0\.attn\.hook_pattern fired 0 times"):
        pattern_at(b)
    hf.set_attn_implementation("eager")
    assert (pattern_at(b).sum(-1) - 1).abs().max() <= 1e-6


# -- attribution and patching -----------------------------------------------------------------------------


def test_f1_contexts_of_eighteen_and_seventeen_tokens_are_aligned_by_decision(built):
    donor, recipient = IDS[:18], IDS[30:47]
    a, b = built.hooked.prefill(donor), built.hooked.prefill(recipient)
    z = clean_z(built.hooked, a, [17])[0].numpy()
    heads = [(0, 1), (1, 3)]
    ours = run(built, KnockIn(HeadSet(heads), z), at=16, prefix=b)
    every = [(layer, head) for layer in range(built.hooked.n_layers) for head in range(built.hooked.n_heads) if (layer, head) not in heads]
    literal = oracle.z_of(built.plain, donor, 17)
    assert (ours - oracle.all_ablated(built.plain, recipient, 16, literal, keep=every)).abs().max() <= EXACT
    shifted = oracle.all_ablated(built.plain, recipient, 16, oracle.z_of(built.plain, donor, 16), keep=every)
    assert (ours - shifted).abs().max() > 0.01  # the same place in the text is another thing
    with pytest.raises(ValueError, match="18 event names for 17 rows"):
        HeadScores(np.zeros((17, 1, 1)), "x", events=tuple(map(str, range(18))))
    with pytest.raises(ValueError, match=r"position 18 does not fit a prefix of 17 tokens"):
        run(built, KnockIn(HeadSet(heads), z), at=18, prefix=b)


def linear(slopes):
    """A Llama that is linear in z and whose logit `i` is `sum slopes[i][layer, head] * z[layer, head, 0]`; z is 2 everywhere.

    Norms with a vast epsilon only scale; values are a bias, so that they are the same at every key.
    """
    layers, heads = next(iter(slopes.values())).shape
    hf = random_hf("llama", hidden_size=32, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, attention_bias=True, rms_norm_eps=1e12, tie_word_embeddings=False)
    with torch.no_grad():
        hf.lm_head.weight.zero_()
        hf.model.embed_tokens.weight[:, :layers * heads] = 0
        hf.model.norm.weight.fill_(1e6)
        for token, row in slopes.items():
            hf.lm_head.weight[token, :layers * heads] = torch.as_tensor(row.ravel()).float()
        for number, layer in enumerate(hf.model.layers):
            layer.mlp.down_proj.weight.zero_(), layer.self_attn.v_proj.weight.zero_()
            layer.self_attn.v_proj.bias.fill_(2.0), layer.self_attn.o_proj.bias.zero_(), layer.self_attn.o_proj.weight.zero_()
            for head in range(heads):
                layer.self_attn.o_proj.weight[number * heads + head, head * hf.config.head_dim] = 1.0
    return hf


@pytest.mark.parametrize("steps", [0, 3])
def test_f2_nine_are_lost_by_attribution_and_by_exact_patch_alike(space, steps):
    t = tiny.transcript("t", tiny.draw(1, seed=5)[0])
    event = find_events(t, space, clinic_tokenizer()).events[0]
    slopes = np.zeros((2, 4))
    slopes[0, 3], slopes[1, 0], slopes[1, 2] = 3.0, -1.0, 0.5
    model = DecisionModel(_bridge(linear({event.chosen: slopes})), clinic_tokenizer(), test=False)
    reading = model.read(t, [event])
    corrupt = np.full((2, 4, model.hooked.d_head), 2.0, np.float32)
    corrupt[0, 3, 0] = corrupt[1, 2, 0] = 5.0
    corrupt[1, 0, 0] = 4.0
    means = ReferenceMeans({event.kind: corrupt}, {}, frozenset())
    exact, found = model.mean_ablate(reading, means), model.attribute(reading, means, steps=steps)
    want = np.zeros((2, 4))
    want[0, 3], want[1, 0], want[1, 2] = -9.0, 2.0, -1.5  # 3 x (2 - 5), and never at (3, 0)
    for scores in (exact.scores, found.gradient, found.direct):
        np.testing.assert_allclose(scores.values[0], want, atol=1e-4)
    assert exact.margins[0] == pytest.approx(2 * slopes.sum(), abs=1e-4)
    assert found.gradient.values.sum() == pytest.approx(float(exact.margins[0] - exact.floors[0]), abs=1e-4) == want.sum()


def test_f4_what_changes_nothing_is_exactly_zero(built):
    for at in (1, 17, 40, 79):
        clean, own = run(built, at=at), clean_z(built.hooked, built.prefix, [at])[0].numpy()
        for idle in (KnockIn(HeadSet(), built.values), MeanAblate(HeadSet(), built.values), Keep(built.hooked.heads, built.values), AddToZ(HeadSet(), built.values),
                     BlockReads(HeadSet(), 0, 50), BlockReads(built.hooked.heads, 90, 99), KnockIn(built.hooked.heads, own)):
            assert torch.equal(run(built, idle, at=at), clean), idle
        assert not torch.equal(run(built, KnockIn(built.hooked.heads, own + np.float32(1e-3)), at=at), clean)
        assert (run(built, Keep(HeadSet(), built.values), at=at) - clean).abs().max() > 0.1
