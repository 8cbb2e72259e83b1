"""A run that is killed, has no memory or no disk left goes on where it was, and ends in the same tables."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from decisionheads import DecisionModel, InputError, discover, tiny
from decisionheads import _packs as packs
from decisionheads._keeping import keeping, kept, note
from decisionheads._reading import fingerprint
from decisionheads.ablation import measure
from decisionheads.branches import Branch, branch_logits, clean_z
from decisionheads.cli import main
from decisionheads.evidence.reading import pooled_rows
from decisionheads.heads import HeadSet
from decisionheads.reads import pooled_attention
from decisionheads.run_check import check_run
from decisionheads.run_folder import RunFolder, write
from decisionheads.survey import split

from .conftest import shapes_unchecked

OPTIONS = dict(caliper=1, minimum=2, draws=499, random_sets=20, held_out=4, cue=tiny.CUE)
TABLES = (".csv", ".parquet", ".safetensors")


class Killed(Exception):
    """Stands for SIGKILL: nothing that the program does reacts to it."""


# -- what is kept -------------------------------------------------------------------------------------------


class Memory:
    """A store in memory that counts, and dies after so many new pieces."""

    def __init__(self, dies_after: int = 10**9):
        self.pieces, self.parts, self.saved, self.dies_after = {}, {}, 0, dies_after

    def load_kept(self, name):
        return self.pieces.get(name)

    def save_kept(self, name, arrays):
        if self.saved >= self.dies_after:
            raise Killed
        self.saved += 1
        self.pieces[name] = {k: np.array(v) for k, v in arrays.items()}

    def load_part(self, name):
        return self.parts.get(name)

    def save_part(self, name, arrays):
        self.parts[name] = arrays


@pytest.fixture(scope="module")
def texts():
    return tiny.generate(DecisionModel.from_pretrained(tiny.path("llama")), 14, seed=4)


@pytest.fixture(scope="module")
def llama():
    return DecisionModel.from_pretrained(tiny.path("llama"))


def tables_of(found):
    return {**{name: frame.to_csv() for name, frame in found.standing.tables().items()}, "heads": found.to_frame().to_csv()}


@pytest.mark.whole
def test_a_run_that_is_killed_twice_in_late_stages_ends_in_the_same_tables(llama, texts, space):
    """Killed early among random sets and late among lead cuts; the third time it gets through."""
    with shapes_unchecked():
        whole = Memory()
        expected = tables_of(discover(llama, texts, space, store=whole, **OPTIONS))
        store, kills = Memory(dies_after=whole.saved // 4), 0
        while True:
            try:
                found = tables_of(discover(llama, texts, space, store=store, **OPTIONS))
                break
            except Killed:
                kills += 1
                store.dies_after = 9 * whole.saved // 10 if kills == 1 else whole.saved
    assert kills == 2 and found == expected
    assert store.saved == whole.saved == len(whole.pieces) > 60  # nothing that was kept is measured twice
    stages = {name.rpartition(" ")[0] for name in whole.pieces}
    assert stages == {"slopes", "sets", "before and note", "lead cuts"}


def test_nothing_is_taken_for_something_else():
    z = np.arange(6, dtype=np.float32)
    about = ["text", 3, z]
    assert fingerprint(*about) == fingerprint("text", 3, z.copy()) == fingerprint("text", np.int64(3), z)
    others = [["text", 4, z], ["text", "3", z], ["text3", z], ["text", 3, z.reshape(2, 3)], ["text", 3, z.astype(np.float64)], ["text", 3, z[::-1]], ["text", 3, z, ""], ["text", (3, z)], ["text", True, z]]
    assert len({fingerprint(*o) for o in [about, *others]}) == len(others) + 1
    assert fingerprint({"a": z, "b": 1}) == fingerprint({"b": 1, "a": z}) != fingerprint({"a": z, "b": 2})
    with pytest.raises(TypeError, match="a Branch has no content hash"):  # its text is short, and alike for many
        fingerprint(Branch(3))
    store, calls = Memory(), []
    measured = lambda: calls.append(1) or {"x": z}  # noqa: E731
    with keeping(store):
        for of in (about, about, *others):
            kept("stage", of, measured)
        kept("other stage", about, measured)
    assert len(calls) == len(others) + 2
    kept("stage", about, measured)  # outside of a run nothing is kept
    assert len(calls) == len(others) + 3


def test_notes_come_once_and_as_warnings_outside_of_a_run(capsys):
    with keeping(None) as notes:
        note("memory is short")
        note("memory is short")
        with keeping(None) as inner:
            note("inside")
        assert inner == ["inside"]
    assert notes == ["memory is short"] and capsys.readouterr().err.count("note: memory is short") == 1
    with pytest.warns(UserWarning, match="alone"):
        note("alone")


# -- no memory ----------------------------------------------------------------------------------------------


@pytest.fixture
def short_of_memory(monkeypatch):
    """Packs of more than five branches fail, wherever they are run, halfway through."""
    failed = []

    def of(module):
        real = module.run_pack

        def run_pack(hooked, prefix, branches, *more, **named):
            if len(branches) > 5:
                failed.append(len(branches))
                if "on_pattern" in named:  # after some of the work is done
                    real(hooked, prefix, branches, *more, **named)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return real(hooked, prefix, branches, *more, **named)

        monkeypatch.setattr(module, "run_pack", run_pack)

    from decisionheads import attribution, branches, reads, spans
    from decisionheads.evidence import reading

    for module in (branches, reads, spans, attribution, reading):
        of(module)
    return failed


def everything(model, reading, means):
    """Every verb that runs packs, on one text."""
    positions = [e.position for e in reading.events]
    rows = [Branch(p) for p in positions] * 3
    probes_of = model.mean_ablate(reading, means)
    attributed = model.attribute(reading, means, steps=2)
    return [probes_of.scores.values, attributed.gradient.values, attributed.direct.values, clean_z(model.hooked, reading.prefix, positions * 3).numpy(),
            pooled_attention(model.hooked, reading.prefix, rows, [(0, 5), (5, 30)]).numpy(), pooled_rows(model.hooked, reading.prefix, positions * 3, [HeadSet([(1, 2)]), HeadSet.all(4, 8)]),
            torch.cat([x for _, x in sorted(branch_logits(model.hooked, reading.prefix, rows))]).numpy()]


def test_out_of_memory_halves_the_pack_and_changes_nothing(model, readings, means, request):
    expected = everything(model, readings[7], means)
    failed = request.getfixturevalue("short_of_memory")
    with pytest.warns(UserWarning, match="out of memory with .* rows at once: going on with"):
        found = everything(model, readings[7], means)
    assert len(failed) >= 7
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-5, atol=5e-5)
        assert np.abs(one).max() > 0.01


def test_after_a_pack_was_halved_those_that_follow_are_small_from_the_start(model, readings, monkeypatch):
    branches, seen = [Branch(readings[0].events[0].position)] * 40, []

    def work(pack):
        seen.append(len(pack))
        if len(pack) > 6:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
        return len(pack)

    with pytest.warns(UserWarning, match="out of memory"):
        done = [i for pack, _ in packs.in_packs(model.hooked, branches, 2**30, work) for i in pack]
    assert sorted(done) == list(range(40)) and seen[:4] == [40, 20, 10, 5] and max(seen[3:]) <= 5


def test_no_memory_for_a_single_row_is_said_and_other_errors_pass(model, readings):
    def fails(error):
        def work(pack):
            raise error
        return lambda: list(packs.in_packs(model.hooked, [Branch(3), Branch(4)], 2**30, work))

    with pytest.warns(UserWarning, match="out of memory"), pytest.raises(InputError, match="out of memory for a single row at position 3; take a machine with more"):
        fails(MemoryError())()
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        fails(RuntimeError("shapes do not fit"))()


def test_one_text_without_memory_is_set_aside_and_counted(llama, texts, space, monkeypatch):
    from decisionheads import discovery

    real, bad = discovery.survey, split(texts, 0)["selection"][1].id

    def survey(model, t, *more):
        if t.id == bad:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, t, *more)

    monkeypatch.setattr(discovery, "survey", survey)
    with shapes_unchecked():
        found = discover(llama, texts, space, together=False, caliper=1, minimum=2, draws=199)
    assert list(found.set_aside) == [bad] and "out of memory while it was read" in found.set_aside[bad]


# -- no disk ------------------------------------------------------------------------------------------------


def test_a_full_disk_names_the_file_and_leaves_nothing_half_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "kept.csv").write_text("before")

    def full(self, content):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as error:
        write(tmp_path / "kept.csv", "after")
    assert error.value.filename == str(tmp_path / "kept.csv")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["kept.csv"] and (tmp_path / "kept.csv").read_text() == "before"


def test_a_full_disk_ends_the_command_in_a_sentence(tmp_path, monkeypatch, capsys):
    from decisionheads import workflow

    monkeypatch.setattr(workflow, "run_demo", lambda *a, **k: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device", "out/heads.csv")))
    assert main(["demo", "--out", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err == "decisionheads: out/heads.csv: no space left on device; mend that, or name another file or folder\n"


# -- a folder that belongs together ---------------------------------------------------------------------------


def test_what_was_only_for_going_on_is_gone(demo):
    assert not (demo / "parts" / "going").exists() and not [p for p in demo.rglob(".*") if p.is_file() and p.name != ".lock"]


def test_a_finished_run_belongs_together(demo, capsys):
    assert check_run(demo) == []
    assert main(["show", str(demo), "--check"]) == 0 and "belong together" in capsys.readouterr().out


def _edit(name: str, old: str, new: str):
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))
    return change


@pytest.mark.parametrize("change, said", [
    (lambda f: (f / "reads.csv").unlink(), "reads.csv is missing"),
    (lambda f: (f / "texts.csv").write_bytes((f / "texts.csv").read_bytes() + b"\n"), "texts.csv was changed"),
    (lambda f: (f / "more.csv").write_text("a\n1\n"), "more.csv was not written by the run"),
    (_edit("heads.csv", "True", "False"), "name different selected heads"),
    (_edit("sets.json", '"L', '"L1'), "does not have its digest"),
    (_edit("run.json", '"splits"', '"parts"'), "does not hold what was written there"),
    (lambda f: shutil.copy(f / "null_max.safetensors", f / "effects.safetensors"), "effects.safetensors was changed")])
def test_a_change_is_found(demo, tmp_path, capsys, change, said):
    shutil.copytree(demo, tmp_path / "run")
    change(tmp_path / "run")
    assert main(["show", str(tmp_path / "run"), "--check"]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_half_written_files_of_a_killed_run_are_cleared_away(tmp_path, demo):
    store = RunFolder(tmp_path / "run", {})
    store.make()
    write(store.path / "a.csv", "1")
    for left in (store.path / f".heads.csv.{os.getpid() + 1}", store.parts / ".abc.safetensors.123"):
        left.write_text("half")
    store.clear()
    assert sorted(p.name for p in store.path.rglob("*")) == ["a.csv", "parts", "run.json"]


def test_effects_are_measured_once(llama, texts, space, monkeypatch):
    """The parts of scored transcripts are not measured again either."""
    from decisionheads import scoring

    store, calls = Memory(), []
    monkeypatch.setattr(scoring, "measure", lambda *a, **k: calls.append(1) or measure(*a, **k))
    with shapes_unchecked():
        discover(llama, texts, space, store=store, together=False, caliper=1, minimum=2, draws=199)
        first, before = len(calls), len(store.parts)
        discover(llama, texts, space, store=store, together=False, caliper=1, minimum=2, draws=199)
    assert first == len(calls) and before == len(store.parts) >= 10
