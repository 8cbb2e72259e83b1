"""`HookedTransformer` objects give what the bridge gives; run with transformer-lens 3.9."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decisionheads import BlockReads, DecisionModel, HeadSet, InputError, KnockIn, reference_means, tiny
from decisionheads.branches import Branch, branch_logits, clean_z
from decisionheads.knock_in import knock_in

pytestmark = [pytest.mark.classic, pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")]
CLOSE = 1e-3  # logits: processed weights round elsewhere


@pytest.fixture(scope="module")
def classic(family):
    from .classic import hooked_transformer

    return DecisionModel(hooked_transformer(tiny.path(family)))


@pytest.fixture(scope="module")
def classic_readings(classic, space):
    texts = [tiny.transcript(f"t{i}", drawn) for i, drawn in enumerate(tiny.draw(12, seed=5))]
    return [classic.read(t, classic.find_events(t, space)) for t in texts]


@pytest.fixture(scope="module")
def classic_means(classic, classic_readings):
    with pytest.warns(UserWarning, match="are advised"):
        return reference_means(classic, classic_readings[:6], minimum=3)


def centred(logits):
    """The unembedding of a HookedTransformer is centred: logits agree up to a constant."""
    return logits - logits.mean(-1, keepdim=True)


def test_it_is_slow_but_exact(classic):
    assert classic.tested.verdict == "slow" and classic.tested.error < 2e-5


def test_effects_margins_and_attributions_equal_the_bridge(model, readings, means, classic, classic_readings, classic_means):
    ours, theirs = classic.mean_ablate(classic_readings[7], classic_means), model.mean_ablate(readings[7], means)
    assert len(ours.margins) >= 3 and ours.measured == theirs.measured
    for a, b in ((ours.margins, theirs.margins), (ours.floors, theirs.floors), (ours.scores.values, theirs.scores.values)):
        assert np.abs(a - b).max() <= CLOSE and np.abs(b).max() > 0.5
    for steps in (0, 2):
        a, b = classic.attribute(classic_readings[7], classic_means, steps=steps), model.attribute(readings[7], means, steps=steps)
        assert np.abs(a.gradient.values - b.gradient.values).max() <= CLOSE and np.abs(b.gradient.values).max() > 0.5
        assert np.abs(a.direct.values - b.direct.values).max() <= CLOSE and np.abs(b.direct.values).max() > 0.5


def test_branches_of_several_tokens_and_blocked_reads_equal_the_bridge(model, readings, classic, classic_readings):
    t = readings[0].events[0].position
    heads = HeadSet([(1, 0), (1, 1)])
    tokens = tuple(readings[0].prefix.ids[[t, t - 1, t - 2]].tolist())
    branches = [Branch(t, tokens), Branch(t, (), (BlockReads(heads, 2, t - 3),)), Branch(t)]
    ours, theirs = (dict(branch_logits(m.hooked, r[0].prefix, branches)) for m, r in ((classic, classic_readings), (model, readings)))
    for i in range(3):
        assert (centred(ours[i]) - centred(theirs[i])).abs().max() <= CLOSE
    assert (centred(theirs[1]) - centred(theirs[2])).abs().max() > 10 * CLOSE


def test_knock_in_equals_the_bridge_and_its_identity_is_zero(model, readings, classic, classic_readings):
    heads = HeadSet([(0, 1), (1, 0)])
    ours, theirs = knock_in(classic, classic_readings, heads, "region"), knock_in(model, readings, heads, "region")
    assert ours.pairs == theirs.pairs and ours.donors == theirs.donors and len(ours.pairs) > 3
    assert np.array_equal(np.isnan(ours.shift), np.isnan(theirs.shift)) and np.nanmax(np.abs(theirs.shift)) > 0.01
    assert np.nanmax(np.abs(ours.shift - theirs.shift)) <= CLOSE
    assert ours.of("identity").max() == 0


def test_an_own_z_put_in_changes_nothing(classic, classic_readings):
    prefix, t = classic_readings[0].prefix, classic_readings[0].events[0].position
    own = clean_z(classic.hooked, prefix, [t])[0].numpy()
    a, b = (dict(branch_logits(classic.hooked, prefix, [branch]))[0] for branch in (Branch(t), Branch(t, (), (KnockIn(classic.hooked.heads, own),))))
    assert torch.equal(a, b)


def test_it_writes_what_the_bridge_writes(model, classic):
    prompt = tiny.transcript("p", tiny.draw(1, seed=11)[0]).prompt
    assert classic.generate(prompt, 12) == model.generate(prompt, 12) != ""


def test_it_is_left_as_found(classic, classic_readings):
    inner = classic.hooked.model
    handle = inner.blocks[0].hook_resid_post.register_forward_hook(lambda *_: None)
    count = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in inner.modules())  # noqa: E731
    before = count()
    inner.train()

    def fail(layer, z):
        raise KeyError("in the middle")

    from decisionheads._rows import Rows

    with pytest.raises(KeyError):
        classic.hooked.run(classic_readings[0].prefix, Rows.single(classic_readings[0].prefix.ids, torch.tensor([5])), fail)
    assert inner.training and count() == before
    handle.remove()
    inner.eval()


def test_sixteen_bits_are_refused(family):
    from .classic import hooked_transformer

    with pytest.raises(InputError, match="in bfloat16 is not supported; load it in float32"):
        DecisionModel(hooked_transformer(tiny.path(family)).to(torch.bfloat16))
