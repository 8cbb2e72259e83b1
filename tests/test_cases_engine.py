"""Known failures of this trade, each a test named after its case: which head, where the edit lands, hooks and caches.

The value that is right, and beside it what the usual fault gives instead, so that the two are told apart. Longer
tests of the same kinds lie beside the modules.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from decisionheads import (
    AddToZ,
    DecisionModel,
    HeadSet,
    InputError,
    KnockIn,
    MeanAblate,
    _ways,
    find_events,
    interventions,
    reference_means,
    tiny,
)
from decisionheads._rows import Rows
from decisionheads.ablation import ReferenceMeans, event_margin
from decisionheads.branches import Branch, branch_logits, clean_z
from decisionheads.heads import kv_group
from decisionheads.interventions import ReplaceValues
from decisionheads.model import _bridge
from decisionheads.tiny.clinic import clinic_tokenizer

from . import oracle
from .cases import EXACT, IDS, hf_of, run, z_at

RENAMED = tuple(map(int, version("transformers").split(".")[:2])) >= (5, 24)  # layers are handed their cache by another name

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
    clean, bridged = z_at(built), z_at(built, on_pattern=lambda layer, pattern: None)  # values are replaced in the bridge
    for head in range(built.hooked.n_heads):
        for change in (MeanAblate, KnockIn, AddToZ):
            moved = (z_at(built, change(HeadSet([(1, head)]), built.values)) - clean).abs().amax(-1)
            assert moved[1, head] > 0 and torch.cat([moved[0], moved[1, :head], moved[1, head + 1:]]).max() == 0
        # values replaced for one query head are its own alone, although its group shares them
        moved = (z_at(built, ReplaceValues(HeadSet([(1, head)]), 5, 30)) - bridged).abs().amax(-1)
        assert moved[1, head] > 0 and torch.cat([moved[0], moved[1, :head], moved[1, head + 1:]]).max() == 0


@pytest.mark.parametrize("built", ["9 to 3", "8 to 2", "4 to 4"], indirect=True)  # the other projects values with queries and keys
def test_a2_zeroing_a_value_head_changes_its_whole_group(built):
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


@pytest.mark.parametrize("built", ["9 to 3", "4 to 4"], indirect=True)  # a W_Q of its own, and no bias
def test_a7_zeroing_w_q_leaves_a_head_that_averages_its_values(built):
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
    monkeypatch.setattr(_ways, "repair_cache_argument", lambda bridge, layers: [])
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


@pytest.mark.parametrize("way, name", [("copied", "projections"), ("bridged", "z_points")])
def test_b3_each_hook_fires_once_or_its_name_is_said(built, monkeypatch, way, name):
    monkeypatch.setattr(built.hooked, "copies", way == "copied")
    way, change = getattr(built.hooked, way), MeanAblate(HeadSet([(1, 0)]), built.values)
    points = getattr(way, name)
    monkeypatch.setattr(way, name, {**points, 1: torch.nn.Identity()})
    with pytest.raises(RuntimeError, match=r"hook blocks\.1\.attn\.hook_z fired 0 times"):
        run(built, change)
    monkeypatch.setattr(way, name, points)
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
