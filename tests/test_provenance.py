"""A run names what it hangs on, and is not mixed from two models, two versions or two commits."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decisionheads import DecisionModel, InputError, provenance, tiny
from decisionheads.cli import main
from decisionheads.generation import Parts
from decisionheads.provenance import hash_file, hash_files, model_hash, same_versions, versions
from decisionheads.run_folder import RunFolder

ROOT = Path(__file__).parent.parent
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The cache of a model hub with `someone/tiny`, in two commits that differ in one weight; main stands at the first."""
    from huggingface_hub import constants

    from decisionheads import _sources

    model = tmp_path / "models--someone--tiny"
    for commit in (OLD, NEW):
        shutil.copytree(tiny.path("llama"), model / "snapshots" / commit)
    weights = load_file(model / "snapshots" / NEW / "model.safetensors")
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"] * 2}, model / "snapshots" / NEW / "model.safetensors", {"format": "pt"})
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(OLD)
    (model / "refs" / "v2").write_text(NEW)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    _sources.hub_commit.cache_clear()
    yield model
    _sources.hub_commit.cache_clear()


def norm(name: str) -> torch.Tensor:
    """The weights that the two commits differ in, as loaded."""
    state = DecisionModel.from_pretrained(name, test=False).bridge.original_model.state_dict()
    return next(v for k, v in state.items() if re.fullmatch(r"(model\.)?norm\.(_original_component\.)?weight", k))


def test_a_hub_name_is_known_by_its_commit_and_loaded_at_it(hub):
    assert model_hash("someone/tiny") == f"someone/tiny@{OLD}" and model_hash("someone/tiny@v2") == f"someone/tiny@{NEW}"
    one = norm("someone/tiny")
    (hub / "refs" / "main").write_text(NEW)
    assert model_hash("someone/tiny") == f"someone/tiny@{OLD}" and torch.equal(norm("someone/tiny"), one)  # a run that is going on stays where it was
    from decisionheads import _sources

    _sources.hub_commit.cache_clear()
    assert model_hash("someone/tiny") == f"someone/tiny@{NEW}" and torch.equal(norm("someone/tiny"), 2 * one)
    assert torch.equal(norm(f"someone/tiny@{OLD}"), one) and float(one.abs().max()) > 0


@pytest.mark.parametrize("name", ["someone/other", "someone/tiny@no-such-branch", "lama"])
def test_a_name_that_nobody_knows_is_one_sentence(hub, name, capsys):
    assert main(["verify", "--model", name]) == 2
    error = capsys.readouterr().err
    assert f"{name}: there is no such folder, and no such model on the hub or in its cache" in error and error.count("\n") == 1
    with pytest.raises(InputError, match="no such folder"):
        model_hash(name)


def test_a_folder_is_known_by_the_bytes_of_its_files(tmp_path):
    folder = Path(shutil.copytree(tiny.path("llama"), tmp_path / "model"))
    before = model_hash(str(folder))
    assert before == model_hash(str(tiny.path("llama"))) != model_hash(str(tiny.path("gpt2")))
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert model_hash(str(folder)) != before
    assert hash_files([folder / "config.json", folder / "model.safetensors"]) != hash_files([folder / "model.safetensors", folder / "config.json"])
    assert len(hash_file(folder / "config.json")) == 64


def test_every_library_that_the_package_stands_on_is_named_with_its_version():
    needed = {re.split(r"[<>=\[ ]", line)[0] for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]}
    assert needed <= set(versions()) and {"python", "tokenizers", "pyarrow"} <= set(versions()) and all(versions().values())


def test_the_version_of_a_checkout_changes_with_its_source(tmp_path, monkeypatch):
    package = Path(shutil.copytree(ROOT / "decisionheads", tmp_path / "p", ignore=shutil.ignore_patterns("*.safetensors", "__pycache__")))
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    source = provenance._source.__wrapped__
    before = source()
    assert versions()["decisionheads"].endswith(f"+{before}") and len(before) == 8
    with open(package / "tiny" / "clinic.py", "a") as file:
        file.write("\n")
    assert source() != before


def other(**changed: str) -> dict[str, str]:
    return versions() | changed


def test_what_other_versions_began_is_not_gone_on_with(tmp_path):
    RunFolder(tmp_path / "run", {"seed": 1}).make()
    manifest = tmp_path / "run" / "run.json"
    RunFolder(tmp_path / "run", {"seed": 1})
    state = json.loads(manifest.read_text())
    assert state["versions"] == versions()
    manifest.write_text(json.dumps(state | {"versions": other(torch="1.0", gone="3")}))
    with pytest.raises(InputError, match=r"begun with other versions \(gone 3, now not there; torch 1.0, now 2\.\S+\); install those to go on with it, or name a new folder$"):
        RunFolder(tmp_path / "run", {"seed": 1})
    manifest.write_text(json.dumps({"inputs": {"seed": 1}, "finished": False}))
    with pytest.raises(InputError, match="does not hold what was written there"):
        RunFolder(tmp_path / "run", {"seed": 1})
    manifest.write_text(json.dumps(state | {"versions": other(torch="1.0"), "finished": True}))
    assert RunFolder(tmp_path / "run", {"seed": 1}).finished  # what is finished is shown by any version


def test_texts_that_other_versions_began_to_write_are_not_gone_on_with(tmp_path):
    parts = Parts(tmp_path / "t.jsonl", {"a": 1})
    parts.save("n", [[1], None])
    assert Parts(tmp_path / "t.jsonl", {"a": 1}).load("n") == [[1], None]
    kept = parts.folder / "inputs.json"
    kept.write_text(json.dumps({"inputs": {"a": 1}, "versions": other(transformers="4.0")}))
    with pytest.raises(InputError, match=r"begun with other versions \(transformers 4.0, now \S+\); install those to go on with it, or remove it"):
        Parts(tmp_path / "t.jsonl", {"a": 1})
    kept.write_text('{"a": 1}')
    with pytest.raises(InputError, match="does not hold what was written there"):
        Parts(tmp_path / "t.jsonl", {"a": 1})
    same_versions(tmp_path, versions(), "-")


def test_a_run_names_its_machine_and_the_time_of_each_stage(demo):
    manifest = json.loads((demo / "run.json").read_text())
    assert re.fullmatch(r"\S+ \S+, \d+ cores, \d+ threads, cpu", manifest["machine"]) and manifest["versions"] == versions()
    stages = manifest["timings"]["stages"]
    assert {"reading reference", "reading selection", "ablating every head", "reading evaluation"} <= set(stages)
    assert all(seconds >= 0 for seconds in stages.values()) and 0 < sum(stages.values()) <= manifest["timings"]["seconds"] + 0.1 * len(stages)
