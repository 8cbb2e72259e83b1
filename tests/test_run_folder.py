"""Files are whole or not there, and a folder belongs to its inputs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from decisionheads import InputError
from decisionheads.provenance import digest
from decisionheads.report import _example
from decisionheads.run_folder import RunFolder, open_run, write


def test_parts_come_back_as_they_were(tmp_path):
    store = RunFolder(tmp_path / "run", {"a": 1})
    assert store.load_part("x/../y") is None
    arrays = {"effects": np.arange(6, dtype=np.float32).reshape(2, 3)}
    store.save_part("x/../y", arrays)
    assert np.array_equal(store.load_part("x/../y")["effects"], arrays["effects"])
    assert all(p.parent == store.parts for p in store.parts.iterdir())  # names cannot leave the folder


def test_a_folder_belongs_to_its_inputs(tmp_path):
    RunFolder(tmp_path / "run", {"seed": 1, "model": "x"}).make()
    assert not RunFolder(tmp_path / "run", {"seed": 1, "model": "x"}).finished
    with pytest.raises(InputError, match=r"other inputs \(seed differ\)"):
        RunFolder(tmp_path / "run", {"seed": 2, "model": "x"})
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "file").write_text("mine")
    with pytest.raises(InputError, match="is not a run folder"):
        RunFolder(tmp_path / "else", {})
    with pytest.raises(InputError, match="is not finished"):
        open_run(tmp_path / "run")


def test_a_broken_manifest_is_one_sentence(tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        RunFolder(tmp_path, {})
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(InputError, match="is not a JSON object"):
        open_run(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    import os

    file = tmp_path / "f"
    write(file, "old")
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write(file, "new")
    assert file.read_text() == "old"


def test_digests_tell_parts_apart():
    assert digest("ab", "c") != digest("a", "bc") and digest("ab") == digest(b"ab")


def test_text_in_reports_is_escaped():
    example = {"tokens": ["<script>alert(1)</script>", "<script>", "<script>"], "chosen": 1, "near_miss": [0], "wrote": "<b>", "against": "'\"", "m": 1.0, "m0": 0.0, "kind": "region"}
    page = _example(json.loads(json.dumps(example)))
    assert "<script>" not in page and "&lt;script&gt;" in page and "&lt;b&gt;" in page


def test_a_torn_part_is_made_again(tmp_path):
    store = RunFolder(tmp_path / "run", {})
    store.save_part("t", {"x": np.ones(3)})
    assert store.load_part("t")["x"].sum() == 3 and store.load_part("other") is None
    path = store._part("t")
    path.write_bytes(path.read_bytes()[:10])
    assert store.load_part("t") is None
