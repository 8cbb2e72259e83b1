"""Exact effects and attribution on the trained embedded models, against the literal oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from decisionheads import DecisionModel, HeadSet, InputError, MeanAblate, reference_means
from decisionheads.ablation import Ablation
from decisionheads.branches import Branch, branch_logits
from decisionheads.errors import ExactnessError
from decisionheads.model import Reading

from . import oracle
from .conftest import plain_hf, save_random

EXACT = 2e-5


@pytest.fixture(scope="module")
def ablations(model, readings, means):
    return [model.mean_ablate(r, means) for r in readings[6:]]


def literal_effects(plain, reading, event, margin, zbar):
    """Effect of every head at one event: one full forward each."""
    ids, t = reading.encoded.ids, event.position
    clean = float(margin(oracle.logits(plain, ids)[t]))
    effects = [[clean - float(margin(oracle.ablated(plain, ids, t, layer, head, zbar[layer, head])))
                for head in range(zbar.shape[1])] for layer in range(zbar.shape[0])]
    return clean, np.array(effects)


def test_effects_equal_one_full_forward_per_head(plain, readings, means, ablations):
    a, reading = ablations[0], readings[6]
    kinds = {e.kind: i for i, e in enumerate(a.events)}
    assert set(kinds) == {"region", "label", "departure"}
    for i in kinds.values():
        clean, want = literal_effects(plain, reading, a.events[i], a.measured[i], means.of(a.events[i]))
        assert abs(a.margins[i] - clean) <= EXACT
        np.testing.assert_allclose(a.scores.values[i], want, atol=2 * EXACT)
        assert np.abs(want).max() > 1  # the reference is not zero
        floor = float(a.measured[i](oracle.all_ablated(plain, reading.encoded.ids, a.events[i].position, means.of(a.events[i]))))
        assert abs(a.floors[i] - floor) <= EXACT and a.margins[i] - floor > 1


def test_reference_means_equal_the_literal_ones(plain, readings, means):
    events = [(r, e) for r in readings[:6] for e in r.events if e.kind == "departure"]
    want = torch.stack([oracle.z_of(plain, r.encoded.ids, e.position) for r, e in events]).mean(0)
    assert means.counts["departure"] == len(events) >= 6
    np.testing.assert_allclose(means.means["departure"], want, atol=1e-5)
    assert np.abs(means.means["departure"] - means.means["label"]).max() > 0.1  # kinds have means of their own


def test_positive_means_the_head_supports_the_decision(model, readings, means, ablations):
    """Ablating the best head lowers the margin by its effect: the sign rule."""
    a = ablations[0]
    event = int(np.argmax(a.scores.values.reshape(len(a.events), -1).max(1)))
    layer, head = np.unravel_index(a.scores.values[event].argmax(), a.scores.values[event].shape)
    branch = Branch(a.events[event].position, (), (MeanAblate(HeadSet([(int(layer), int(head))]), means.of(a.events[event])),))
    ((_, logits),) = branch_logits(model.hooked, readings[6].prefix, [branch])
    effect = a.scores.values[event, layer, head]
    assert effect > 1 and float(a.measured[event](logits[0])) == pytest.approx(a.margins[event] - effect, abs=1e-4)


def test_swapping_chosen_and_competitor_negates(model, readings, means, ablations):
    a = ablations[0]
    i = next(i for i, e in enumerate(a.events) if e.kind == "departure")
    branches = [Branch(a.events[i].position, (), (MeanAblate(HeadSet([(1, h)]), means.of(a.events[i])),)) for h in range(8)]
    rows = torch.stack([logits[0] for _, logits in sorted(branch_logits(model.hooked, readings[6].prefix, branches))])
    assert torch.equal(a.measured[i](rows), -a.measured[i].swapped()(rows)) and a.measured[i](rows).abs().min() > 0


def test_a_batch_of_events_equals_one_at_a_time(model, readings, means, ablations):
    reading, a = readings[6], ablations[0]
    for i, event in enumerate(reading.events[:4]):
        alone = model.mean_ablate(Reading(reading.transcript, reading.encoded, (event,), reading.prefix), means, memory=4 * 10**5)
        np.testing.assert_allclose(alone.scores.values[0], a.scores.values[i], atol=2 * EXACT)


def test_the_empty_set_and_keeping_all_are_exactly_the_clean_margin(model, readings, means):  # F4
    from decisionheads import Keep

    reading = readings[6]
    event = reading.events[0]
    zbar = means.of(event)
    everything = HeadSet.all(model.n_layers, model.n_heads)
    for idle in (MeanAblate(HeadSet(), zbar), Keep(everything, zbar)):
        (_, clean), = branch_logits(model.hooked, reading.prefix, [Branch(event.position)])
        (_, edited), = branch_logits(model.hooked, reading.prefix, [Branch(event.position, (), (idle,))])
        assert torch.equal(clean, edited)


def test_joined_effects_by_kind(ablations):
    joined = Ablation.join(ablations)
    assert len(joined.margins) == sum(len(a.margins) for a in ablations) == sum(len(joined.of_kind(k).margins) for k in ("region", "label", "departure"))
    assert list(joined.to_frame()["kind"].unique()) and "median m" in repr(joined)
    assert 0.5 < joined.attention_share.mean() < 1.5


def test_a_reference_transcript_may_not_be_scored(model, readings, means):
    with pytest.raises(InputError, match="is in the reference split and is scored too"):
        model.mean_ablate(readings[0], means)


def test_too_few_reference_events_are_refused(model, readings):
    with pytest.raises(InputError, match="30 are needed"):
        reference_means(model, readings[:2])


def test_unknown_options_are_errors(model, readings, means):  # B2
    with pytest.raises(TypeError):
        model.mean_ablate(readings[6], means, batch=3)
    loud = model.mean_ablate(readings[6], means, rule="vocabulary")
    assert not np.array_equal(loud.scores.values, model.mean_ablate(readings[6], means).scores.values)


def test_rows_that_differ_from_the_plain_model_stop_the_transcript(model, readings, means):
    reading = readings[6]
    wrong = Reading(reading.transcript, reading.encoded, reading.events,
                    type(reading.prefix)(reading.prefix.ids, reading.prefix.layers, reading.prefix.logits.roll(1, 0), reading.prefix.positions))
    with pytest.raises(ExactnessError, match=f"transcript {reading.transcript.id}, position"):
        model.mean_ablate(wrong, means)


def test_processed_weights_leave_margins_where_they_were(model, family, readings, means):  # E11
    """Folded and centred weights move logits, not margins; doing it twice changes nothing."""
    from decisionheads import tiny
    from decisionheads.model import _bridge

    bridge = _bridge(plain_hf(tiny.path(family)).requires_grad_(False))
    for _ in range(2):
        bridge.enable_compatibility_mode(disable_warnings=True)
        folded = DecisionModel(bridge, model.tokenizer)
        reading = folded.read(readings[6].transcript, readings[6].events)
        moved = float((reading.prefix.logits - readings[6].prefix.logits).abs().max())
        for event in reading.events:
            i, j = event.chosen, event.competitors[0]
            ours, theirs = reading.clean(event), readings[6].clean(event)
            assert abs(float(ours[i] - ours[j]) - float(theirs[i] - theirs[j])) <= 1e-3
        assert moved > 1e-2


# -- attribution -----------------------------------------------------------------------------------


def test_gradients_match_central_differences_in_float64(family, space):  # B6
    from decisionheads import tiny

    model = DecisionModel.from_pretrained(tiny.path(family), dtype="float64")
    t = tiny.transcript("t", tiny.draw(1, seed=5)[0])
    reading = model.read(t, [e for e in model.find_events(t, space) if e.primary][:1])
    zero = np.zeros((model.n_layers, model.n_heads, model.hooked.d_head))
    from decisionheads.ablation import ReferenceMeans

    got = model.attribute(reading, ReferenceMeans({e.kind: zero for e in reading.events}, {}, frozenset())).gradient.values[0]
    event = reading.events[0]
    from decisionheads.ablation import event_margin
    from decisionheads.branches import clean_z

    margin = event_margin(reading, event)
    z = clean_z(model.hooked, reading.prefix, [event.position])[0].numpy()

    def slope(layer, head, step):
        """Along z itself (attribution against zero is grad . z), from one edited row on either side."""
        sides = [Branch(event.position, (), (MeanAblate(HeadSet([(layer, head)]), z * (1 + side)),)) for side in (step, -step)]
        up, down = (logits[0, margin.chosen] - logits[0, margin.against[0]] for _, logits in branch_logits(model.hooked, reading.prefix, sides))
        return float(up - down) / (2 * step)

    for layer in range(model.n_layers):
        for head in range(0, model.n_heads, 3):
            # norms of Llama compute in float32 whatever the weights: wide steps, the curvature extrapolated away
            want = (4 * slope(layer, head, 0.01) - slope(layer, head, 0.02)) / 3
            assert got[layer, head] == pytest.approx(want, rel=1e-4, abs=1e-4 * float(np.abs(got).max()))
    assert np.abs(got).max() > 0.1


def test_attribution_follows_the_exact_effect(model, readings, means, ablations):
    exact = np.concatenate([a.scores.values for a in ablations]).ravel()
    one, many, direct = [], [], []
    for reading in readings[6:]:
        a = model.attribute(reading, means)
        one.append(a.gradient.values), direct.append(a.direct.values)
        many.append(model.attribute(reading, means, steps=4, memory=10**7).gradient.values)
    agreement = {name: spearmanr(exact, np.concatenate(x).ravel()).statistic for name, x in (("one", one), ("four", many), ("direct", direct))}
    assert agreement["one"] > 0.5 and agreement["four"] > 0.6 and agreement["direct"] > 0.3


def test_integration_of_the_last_layer_is_complete(random_model, random_folder, space):
    """Along the path of a layer in which only one head differs from its mean, the integral is the exact effect."""
    from decisionheads import tiny
    from decisionheads.ablation import ReferenceMeans
    from decisionheads.branches import clean_z

    t = tiny.transcript("t", tiny.draw(1, seed=5)[0])
    reading = random_model.read(t, [random_model.find_events(t, space).events[0]])
    event = reading.events[0]
    z = clean_z(random_model.hooked, reading.prefix, [event.position])[0].numpy()
    means = z.copy()
    means[-1, 2] = 0.0
    means = ReferenceMeans({event.kind: means}, {}, frozenset())
    got = random_model.attribute(reading, means, steps=64).gradient.values[0]
    want = random_model.mean_ablate(reading, means).scores.values[0]
    assert got[-1, 2] == pytest.approx(want[-1, 2], rel=2e-3) and abs(want[-1, 2]) > 0.02
    assert np.abs(np.delete(got[-1], 2)).max() < 1e-5


def test_on_a_linear_model_all_three_agree_and_sum(tmp_path, space):  # F2
    """One layer of attention and nothing else is linear in z but for the last norm: attribution is exact to first
    order, direct attribution equals it where the norm's scale is held, and the signs are the effect's."""
    from decisionheads import tiny
    from decisionheads.ablation import ReferenceMeans

    model = DecisionModel.from_pretrained(save_random("gpt2", tmp_path, n_layer=1, n_inner=1))
    with torch.no_grad():
        for name, p in model.hooked.plain.named_parameters():
            if "mlp" in name:
                p.zero_()  # weights are shared with the bridge
    t = tiny.transcript("t", tiny.draw(1, seed=5)[0])
    reading = model.read(t, [model.find_events(t, space).events[0]])
    event = reading.events[0]
    from decisionheads.branches import clean_z

    z = clean_z(model.hooked, reading.prefix, [event.position])[0].numpy()
    means = ReferenceMeans({event.kind: z - 1e-3}, {}, frozenset())  # a small step: the norm hardly moves
    exact = model.mean_ablate(reading, means)
    a = model.attribute(reading, means)
    np.testing.assert_allclose(a.gradient.values, exact.scores.values, atol=2e-4)
    assert a.gradient.values.sum() == pytest.approx(exact.margins[0] - exact.floors[0], abs=1e-3)
    assert np.abs(a.gradient.values).max() > 1e-3
    assert spearmanr(a.direct.values.ravel(), a.gradient.values.ravel()).statistic > 0.5


def test_direct_attribution_equals_unembedding_by_hand(model, plain, readings, means):
    """W_O (z - zbar) through the frozen final norm and the unembedding, written out for one head."""
    reading = readings[6]
    event, i = reading.events[0], 0
    got = model.attribute(reading, means).direct.values[i]
    from decisionheads.ablation import event_margin

    margin = event_margin(reading, event)
    ids, t = reading.encoded.ids, event.position
    norm = plain.transformer.ln_f if hasattr(plain, "transformer") else plain.model.norm
    seen = []
    handle = norm.register_forward_pre_hook(lambda m, args: seen.append(args[0][0, t]))
    z = oracle.z_of(plain, ids, t)
    handle.remove()
    x = seen[0]
    row = (plain.lm_head.weight[margin.chosen] - plain.lm_head.weight[margin.against[0]]).detach()
    for layer, head in ((1, 3), (3, 0)):
        projection = oracle.output_projections(plain)[layer]
        w = projection.weight if projection.__class__.__name__ == "Conv1D" else projection.weight.T  # [head * d_head, d_model]
        d = z.shape[-1]
        written = (z[layer, head] - torch.as_tensor(means.of(event)[layer, head])) @ w[head * d:(head + 1) * d]
        if hasattr(norm, "bias") and norm.bias is not None:
            written, scale = written - written.mean(), (x - x.mean()).pow(2).mean().add(1e-5).sqrt()
        else:
            scale = x.pow(2).mean().add(1e-6).sqrt()
        assert got[layer, head] == pytest.approx(float(((written / scale * norm.weight) @ row).detach()), abs=1e-3)
    assert np.abs(got).max() > 0.1


def test_no_gradient_is_left_on_a_callers_parameters(random_folder, random_model, space):
    from decisionheads import tiny
    from decisionheads.ablation import ReferenceMeans
    from decisionheads.model import _bridge

    hf = plain_hf(random_folder)
    model = DecisionModel(_bridge(hf), random_model.tokenizer)
    t = tiny.transcript("t", tiny.draw(1, seed=5)[0])
    reading = model.read(t, model.find_events(t, space).events[:2])
    zero = np.zeros((model.n_layers, model.n_heads, model.hooked.d_head), np.float32)
    model.attribute(reading, ReferenceMeans({e.kind: zero for e in reading.events}, {}, frozenset()), steps=2)
    assert all(p.grad is None and p.requires_grad for p in hf.parameters())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_noise_floor_is_the_size_of_the_real_error_of_sixteen_bits(family, model, readings, means, space, dtype):
    from decisionheads import DecisionModel, tiny
    from decisionheads.ablation import mean_ablate, noise_floor

    half = DecisionModel.from_pretrained(tiny.path(family), dtype=dtype)
    error, floor = [], []
    for reading in readings[6:]:
        ours = half.read(reading.transcript, reading.events)
        a, b = (mean_ablate(m, r, means) for m, r in ((half, ours), (model, reading)))
        same = [i for i, (x, y) in enumerate(zip(a.measured, b.measured, strict=True)) if x == y]
        error.append((a.scores.values - b.scores.values)[same].ravel())
        floor.append(noise_floor(half, ours)[same])
    error, floor = (float(np.sqrt((np.concatenate(x).astype(float) ** 2).mean())) for x in (error, floor))
    assert 0.3 < floor / error < 3
    assert error > {"float16": 1e-3, "bfloat16": 1e-2}[dtype]
    assert noise_floor(model, readings[6]).max() == 0


def test_attribution_needs_no_grad_mode_and_no_events(model, readings, means):
    with torch.no_grad():
        again = model.attribute(readings[7], means)
    assert np.array_equal(again.gradient.values, model.attribute(readings[7], means).gradient.values)
    empty = model.attribute(model.read(readings[7].transcript, []), means)
    assert empty.gradient.values.shape == empty.direct.values.shape == (0, model.n_layers, model.n_heads)


@pytest.mark.parametrize("touch", ["hook", "weight"])
def test_a_callers_own_hook_or_weight_on_the_bridge_is_noticed(model, readings, means, monkeypatch, touch):
    """The prefix comes from the plain copy: rows of a bridge that somebody edits would be a mixture, and rows of the copy would not know."""
    from decisionheads.errors import ExactnessError
    from decisionheads.knock_in import knock_in
    from decisionheads.reads import read_attention

    attention = model.bridge.blocks[1].attn
    handle = attention.hook_z.register_forward_hook(lambda module, args, out: out * 0.5) if touch == "hook" else None
    if handle is None:
        projection = attention.o.original_component
        monkeypatch.setitem(projection._parameters, "weight", torch.nn.Parameter(projection.weight * 0.5, requires_grad=False))
    try:
        for call in (lambda: model.mean_ablate(readings[7], means), lambda: model.attribute(readings[7], means),
                     lambda: knock_in(model, readings[6:], HeadSet([(1, 4)]), "region"), lambda: reference_means(model, readings[:6], minimum=3),
                     lambda: read_attention(model, readings[7], [(0, 5)])):
            with pytest.raises(ExactnessError, match="packed rows differ from the plain model"):
                call()
    finally:
        if handle is not None:
            handle.remove()


def test_enough_reference_events_are_no_reason_to_warn(model, readings):
    """Warnings are errors here: what is asked for at least may be less than what is advised, if there are enough."""
    from dataclasses import replace

    regions = [replace(r, events=tuple(e for e in r.events if e.kind == "region")) for r in readings]
    assert reference_means(model, regions, minimum=5).counts["region"] >= 30
