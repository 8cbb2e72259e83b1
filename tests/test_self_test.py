"""Loading refuses what cannot be done exactly, and says why."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from decisionheads import DecisionModel, InputError, _ways
from decisionheads._self_test import self_test

from .conftest import save_random


@pytest.fixture(autouse=True)
def the_shared_model_keeps_its_paths(request):
    """What a test on a broken model chose is not for the tests after it."""
    hooked = request.getfixturevalue("random_model").hooked if "random_model" in request.fixturenames else None
    names = ("packed", "prefills", "skipping", "narrow", "weighted")
    before = {name: getattr(hooked, name) for name in names} if hooked is not None else {}
    yield
    for name, value in before.items():
        setattr(hooked, name, value)



def test_a_good_model_is_exact(random_model):
    result = self_test(random_model.hooked, random_model.tokenizer)
    assert result.verdict == "exact" and result.reason == ""
    assert len(result.checks) >= 11 and max(c.error for c in result.checks if not c.at_least) < 2e-5


def test_without_the_cache_repair_it_refuses_and_names_both_versions(random_folder, monkeypatch):  # B1
    monkeypatch.setattr(_ways, "repair_cache_argument", lambda bridge, layers: [])
    with pytest.raises(InputError) as caught:
        DecisionModel.from_pretrained(random_folder)
    assert version("transformers") in str(caught.value) and version("transformer-lens") in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_a_cached_token_equals_the_full_run_and_a_lone_one_does_not(random_model):  # B1
    checks = {c.name: c for c in self_test(random_model.hooked).checks}
    assert checks["first row equals one forward"].error <= 1e-3
    assert checks["a lone token differs"].error > 0.1


@pytest.mark.parametrize(("broken", "named"), [
    ("mask", "packed rows"), ("z", "editing z of one head changes nothing"), ("projection", "do not add up"), ("edit", "not an edit of the output projection")])
def test_each_fault_is_found(random_model, monkeypatch, broken, named):
    hooked = random_model.hooked
    for name in ("packed", "prefills", "skipping", "narrow"):
        monkeypatch.setattr(hooked, name, getattr(hooked, name))  # the path that it chooses is put back
    real = hooked.run
    if broken == "mask":  # every row is one branch: rows see each other
        monkeypatch.setattr(hooked, "run", lambda p, rows, *a, **k: real(p, replace(rows, branch=rows.branch * 0), *a, **k))
    elif broken == "z":
        monkeypatch.setattr(hooked, "run", lambda p, rows, z_hook=None, *a, **k: real(p, rows, None, *a, **k))
    elif broken == "edit":  # the edit lands on another head
        monkeypatch.setattr(hooked, "run", lambda p, rows, z_hook=None, *a, **k: real(
            p, rows, z_hook and (lambda layer, z: z_hook(layer, z.roll(1, 1)).roll(-1, 1)), *a, **k))
    else:
        real_outputs = hooked.head_outputs
        monkeypatch.setattr(hooked, "head_outputs", lambda layer, z: real_outputs(layer, z) * 1.1)
    result = self_test(hooked)
    assert result.verdict == "refused" and named in " ".join(c.sentence for c in result.checks if not c.ok)


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path):
    from decisionheads.tiny.clinic import clinic_tokenizer

    save_random("llama", tmp_path)
    tokenizer = clinic_tokenizer()
    tokenizer.add_tokens(["extra"])
    with pytest.raises(InputError, match="use the model's own tokenizer"):
        DecisionModel.from_pretrained(tmp_path, tokenizer=tokenizer)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    from .conftest import random_hf

    random_hf("llama").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no tokenizer could be loaded"):
        DecisionModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "nowhere.gguf"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_a_hub(name):
    with pytest.raises(InputError, match="no such"):
        DecisionModel.from_pretrained(name)


def test_an_object_of_another_kind_is_refused(random_plain):
    with pytest.raises(InputError, match="LlamaForCausalLM is not a TransformerBridge|GPT2LMHeadModel is not a TransformerBridge"):
        DecisionModel(random_plain)


def test_a_bridge_object_gives_the_same_rows_and_is_left_as_found(random_folder, random_model):
    """Without a plain copy the bridge itself prefills."""
    from decisionheads.model import _bridge

    from .conftest import plain_hf

    hf = plain_hf(random_folder)
    assert all(p.requires_grad for p in hf.parameters())
    model = DecisionModel(_bridge(hf), random_model.tokenizer)
    ids = torch.arange(10, 60)
    ours, theirs = (m.hooked.prefill(ids, (20, 49), chunk=16) for m in (model, random_model))
    assert (ours.logits - theirs.logits).abs().max() <= 2e-5
    assert all(p.requires_grad and p.grad is None for p in hf.parameters())


def test_an_unknown_option_is_an_error(random_folder):  # B2
    with pytest.raises(TypeError):
        DecisionModel.from_pretrained(random_folder, attn_implementation="sdpa")
    with pytest.raises(InputError, match="unknown dtype"):
        DecisionModel.from_pretrained(random_folder, dtype="float8")


def test_the_bridge_keeps_eager_and_the_plain_copy_runs_sdpa_on_the_same_weights(random_model):  # D4
    hooked = random_model.hooked
    assert hooked.plain.config._attn_implementation == "sdpa"
    assert hooked.config._attn_implementation == "eager"
    shared = {p.data_ptr() for p in hooked.plain.parameters()}
    assert shared & {p.data_ptr() for p in hooked.bridge.original_model.parameters()}
