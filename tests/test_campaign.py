"""Students trained in arms and judged blind to them: from files to tables, verdicts and a figure."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from decisionheads import DecisionModel, HeadSet, InputError, save_transcripts, tiny
from decisionheads.cli import main
from decisionheads.distillation.arms import Training
from decisionheads.distillation.campaign import Campaign, Plan, check_apart, held, tables_of, teacher_heads
from decisionheads.distillation.evaluation import Judging, decisions, evaluate, nested, sure_of
from decisionheads.distillation.pool import _band, choose_pool
from decisionheads.distillation.targets import teacher_targets
from decisionheads.head_sets import cases_of, set_margins
from decisionheads.necessity import LEAST

from .conftest import shapes_unchecked

ASKED = Judging(size=3, curve=8, write="answer", mark="answer\n", longest=60, random_sets=20, caliper=0.5, minimum=3, draws=199)


def clinic(n: int, seed: int, name: str):
    """Right texts of the clinic, whose gold labels are what they answer."""
    return [replace(tiny.transcript(f"{name}{i}", drawn)) for i, drawn in enumerate(tiny.draw(n, seed))]


@pytest.fixture(scope="module")
def judged(space):
    """The teacher itself, judged as a student is."""
    with shapes_unchecked():
        return evaluate(DecisionModel.from_pretrained(tiny.path("llama")), clinic(40, 21, "h"), space, ASKED)


# -- judging -----------------------------------------------------------------------------------------------


def test_a_model_that_decides_is_found_to_and_its_few_heads_recover_the_margin(judged):
    assert judged["right"] > 0.9 and judged["recovery"] > 0.5 > judged["random_recovery"]
    assert "L1H7" in judged["set"] and len(judged["set"]) == 3  # the head that suppresses the near-miss
    assert judged["task"]["micro_f1"] > 0.95 and judged["m"] > 5 > abs(judged["m0"])
    assert [p["size"] for p in judged["curve"]] == list(range(1, 9)) and judged["curve"][2]["recovery"] == judged["recovery"]
    assert sum(t["alone"] for t in judged["texts"]) / sum(t["carried"] for t in judged["texts"]) == pytest.approx(judged["recovery"], abs=1e-4)
    assert not any(c in json.dumps(judged) for c in ("fever", "maybe", "step 1"))  # ids and numbers


def test_a_model_that_tosses_a_coin_has_no_recovery_to_speak_of(space):
    with shapes_unchecked():
        found = evaluate(DecisionModel.from_pretrained(tiny.path("llama-student")), clinic(30, 22, "h"), space, ASKED)
    assert 0.2 < found["right"] < 0.8 and abs(found["m"] - found["m0"]) < LEAST
    assert found["recovery"] is None and all(p["recovery"] is None for p in found["curve"]) and found["m_alone"] is not None


def test_sets_of_every_size_are_nested_and_the_best_head_is_dropped_last(model, readings, means):
    cases = cases_of(readings[6:], "departure", means)
    candidates = HeadSet([(layer, head) for layer in (1, 2) for head in range(4)])
    order = nested(model, cases, candidates, lambda items, what: items, 2**27)
    assert HeadSet(order) == candidates and len(order) == len(candidates)
    left = HeadSet(order)
    for gone in reversed(order[1:]):  # each step drops the head without which the rest keeps most
        alone = {h: set_margins(model, cases, [left - HeadSet([h])], without=False).only.mean() for h in left}
        assert max(alone.values()) == pytest.approx(alone[gone], abs=1e-5)
        left = left - HeadSet([gone])


def test_how_sure_a_code_is_comes_from_its_least_sure_decision(model, space):
    t = clinic(1, 23, "x")[0]
    rows = sure_of(model, t, space, ())
    events = [e for e in model.find_events(t, space) if e.primary]
    reading = model.read(t, events)
    assert [r["label"] for r in rows] == list(dict.fromkeys(m.label for m in space.mentions(t.text, t.answer_start))) and all(r["right"] for r in rows)
    for r in rows:
        margins = [float(reading.clean(e)[e.chosen] - max(reading.clean(e)[c] for c in e.competitors)) for e in events if e.label == r["label"]]
        assert len(margins) == 2 and r["confidence"] == pytest.approx(min(margins), abs=1e-3)


def test_judging_asks_for_what_makes_sense():
    for bad, said in ((dict(write="some"), "unknown part"), (dict(size=5, curve=4), "must lie on the curve"), (dict(size=0), "must lie")):
        with pytest.raises(InputError, match=said):
            Judging(**bad)


# -- pools -------------------------------------------------------------------------------------------------


def test_a_student_without_departure_heads_lends_those_of_labels(space):
    student = DecisionModel.from_pretrained(tiny.path("llama-student"))
    teacher = {"label": HeadSet(["L1H2"]), "departure": HeadSet(["L1H7", "L2H1"])}
    with shapes_unchecked():
        pool = choose_pool(student, clinic(60, 24, "p"), space, teacher, 4, caliper=0.5, minimum=3, draws=999, kinds=("label", "departure"))
    assert pool.how["label"] == "calibrated" and len(pool.heads["label"])
    assert pool.how["departure"] == "none calibrated: the heads of labels" and pool.heads["departure"] == pool.heads["label"]
    assert 0 in pool.sinks.ids or len(pool.sinks.ids) > 0


def test_where_nothing_is_calibrated_the_teachers_depth_stands_in():
    class Nothing:
        kinds: dict = {}
        shape = (8, 4)

    with shapes_unchecked():
        band = _band(HeadSet(["L1H0", "L2H3", "L2H1"]), 4, Nothing, "label")
    assert len(band) == 3 and all(round(7 / 3) <= h.layer <= round(14 / 3) for h in band)


# -- campaigns ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(demo, tmp_path_factory):
    out = tmp_path_factory.mktemp("files")
    save_transcripts(clinic(14, 31, "t"), out / "training.jsonl")
    save_transcripts(clinic(14, 32, "h"), out / "held.jsonl")
    return {"teacher": str(tiny.path("llama")), "run": str(demo), "transcripts": str(out / "training.jsonl"), "held-out": str(out / "held.jsonl"), "labels": str(demo / "labels.csv")}


SHORT = ["--steps", "2", "--batch", "2", "--k", "2", "--write", "answer", "--mark", "answer\\n", "--longest", "60", "--minimum", "2", "--caliper", "0.5", "--pool-texts", "20"]


def command(files, out, *more, students=("llama-student",)) -> list[str]:
    return ["distill", *(part for name, value in files.items() for part in (f"--{name}", value)), *(part for s in students for part in ("--student", str(tiny.path(s)))), "--out", str(out), *SHORT, *more]


@pytest.fixture(scope="module")
def campaign(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("campaign") / "students"
    with shapes_unchecked():
        assert main(command(files, out, "--seeds", "1", "--arms", "cot,mistill", students=("llama-student", "gpt2-student"))) == 0
    return out


def test_one_command_makes_a_row_for_each_student_arm_and_seed(campaign, capsys):
    table = pd.read_csv(campaign / "mistill.csv")
    assert sorted(zip(table.student, table.arm, table.seed, strict=True)) == sorted((s, a, n) for s in ("llama-student", "gpt2-student") for a, n in (("teacher", -1), ("untrained", -1), ("cot", 0), ("mistill", 0)))
    trained = table[table.seed >= 0]
    assert (trained.steps == 2).all() and (trained.k == 2).all() and (trained.dropped == 0).all() and (trained.events > 50).all()
    assert table[table.arm != "teacher"].held_out_distance.between(0.001, 10).all() and table[table.arm != "teacher"].near_miss_share.between(0, 1).all()
    assert trained[trained.arm == "mistill"].distance.notna().all() and trained[trained.arm == "cot"].distance.isna().all()
    html = (campaign / "mistill.html").read_text()
    assert "no claim" in html.lower() and "plotly" in html
    for name in ("curves", "texts", "emitted", "gold", "matched", "verdicts_departures_right"):
        assert len(pd.read_csv(campaign / f"{name}.csv")), name
    assert json.loads((campaign / "run.json").read_text())["finished"] is True
    # every arm is judged on the same decisions
    texts = pd.read_csv(campaign / "texts.csv")
    assert {tuple(mine.text) for _, mine in texts.groupby(["student", "arm", "seed"])} == {tuple(texts[(texts.arm == "teacher") & (texts.student == "llama-student")].text)}
    assert not any("fever" in path.read_text() for path in campaign.glob("*.csv"))


def test_what_a_pool_reads_on_held_out_texts_is_the_distance_it_is_trained_on(campaign, space):
    from decisionheads.distillation.manipulation import held_out_distance
    from decisionheads.distillation.pool import Pool
    from decisionheads.distillation.targets import Targets

    heads = HeadSet(["L1H7"]), HeadSet(["L1H4"])
    targets = Targets.load(campaign / "held_out_targets.jsonl")
    own = Pool({"departure": heads[0], "region": heads[1]}, {}, Pool.load(campaign / "llama-student" / "pool.json").sinks, (4, 8))
    teacher = DecisionModel.from_pretrained(tiny.path("llama"))
    again = teacher_targets(teacher, targets.transcripts, space, own.heads, own.sinks)
    same = held_out_distance(str(tiny.path("llama")), own, again, space)
    assert max(found["distance"] for found in same.values()) < 1e-5 and same["departure"]["shares"]["near-miss"] > 0.8
    other = held_out_distance(str(tiny.path("llama-student")), own, again, space)
    assert other["departure"]["distance"] > 0.3 and other["departure"]["decisions"] == sum(t.kind == "departure" for mine in again.of.values() for t in mine)


def test_arms_of_a_seed_start_alike_and_see_the_same_texts_in_the_same_order(campaign):
    first = {arm: json.loads((campaign / "llama-student" / f"{arm}-0" / "training.json").read_text()) for arm in ("cot", "mistill")}
    loss = {arm: found["log"][0]["loss"] for arm, found in first.items()}
    assert loss["cot"] == pytest.approx(loss["mistill"] - first["mistill"]["log"][0]["distance"], abs=0.05)


def test_the_same_command_prints_it_again_and_more_seeds_go_on_from_there(campaign, files, capsys):
    before = (campaign / "llama-student" / "cot-0" / "result.json").stat().st_mtime_ns
    state = json.loads((campaign / "run.json").read_text())
    (campaign / "run.json").write_text(json.dumps(state | {"versions": state["versions"] | {"torch": "1.0"}}))
    with shapes_unchecked():
        assert main(command(files, campaign, "--seeds", "1", "--arms", "cot,mistill", students=("llama-student", "gpt2-student"))) == 0  # nothing is to be made
        assert json.loads((campaign / "run.json").read_text())["versions"]["torch"] == "1.0" and capsys.readouterr().out
        assert main(command(files, campaign, "--seeds", "1", "--arms", "cot,mistill,shuffled", students=("llama-student", "gpt2-student"))) == 2
        assert "begun with other versions (torch 1.0, now" in capsys.readouterr().err
        (campaign / "run.json").write_text(json.dumps(state))
        assert main(command(files, campaign, "--seeds", "1", "--arms", "cot,mistill,shuffled", students=("llama-student", "gpt2-student"))) == 0
    said = capsys.readouterr().out
    assert "6 of 6 runs are done" in said and "no claim" in said.lower() and "task at matched precision" in said
    assert (campaign / "llama-student" / "cot-0" / "result.json").stat().st_mtime_ns == before
    assert main(command(files, campaign, "--rate", "0.5", students=("llama-student", "gpt2-student"))) == 2
    assert "made from other inputs (plan differ)" in capsys.readouterr().err


def test_a_run_that_another_process_holds_is_left_to_it(tmp_path):
    path = tmp_path / "x.lock"
    code = f"from decisionheads.distillation.campaign import held\nfrom pathlib import Path\nwhile input():\n  with held(Path({str(path)!r})) as mine: print(mine, flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        def ask() -> str:
            other.stdin.write("?\n")
            other.stdin.flush()
            return other.stdout.readline().strip()

        with held(path) as mine:
            assert mine and ask() == "False"
        assert ask() == "True"
        other.communicate("\n")


def test_bad_input_is_one_sentence_before_anything_is_made(files, tmp_path, capsys):
    def refused(said: str, *more, **changed) -> None:
        out = tmp_path / "none"
        assert main(command({**files, **changed}, out, *more)) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1 and not out.exists(), error

    refused("keep them apart", **{"held-out": files["transcripts"]})
    refused("is not a run folder", run=str(tmp_path))
    refused("name each once, from cot", "--arms", "cot,cot")
    refused("unknown heads", "--heads", "best")
    refused("learning rate must be positive", "--rate", "0")
    refused("no such model folder", "--student", "/no/such/folder")
    refused("leaves no room for --longest 200; give at most", "--longest", "200")
    (tmp_path / "student").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "student" / name).write_bytes((tiny.path("llama-student") / name).read_bytes())
    refused("no weights in this folder", "--student", str(tmp_path / "student"))
    refused("is not trained; give the folder", "--student", str(tmp_path / "student.gguf"))
    refused("folders have different names", "--student", str(tiny.path("llama-student")))


def test_texts_of_one_group_or_one_prompt_are_not_held_out():
    a, b = clinic(2, 33, "a"), clinic(2, 34, "b")
    check_apart(a, b)
    with pytest.raises(InputError, match="group p1"):
        check_apart([replace(a[0], group="p1")], [replace(b[0], group="p1")])
    with pytest.raises(InputError, match="has the prompt of a training transcript"):
        check_apart(a, [replace(a[0], id="other")])


def test_frozen_heads_that_were_changed_are_refused(demo, tmp_path):
    import shutil

    shutil.copytree(demo, tmp_path / "run")
    heads, sinks, manifest = teacher_heads(tmp_path / "run", "selected")
    assert set(heads) == {"region", "label", "departure"} and sinks.ids and manifest["layers"] == 4
    sets = json.loads((tmp_path / "run" / "sets.json").read_text())
    sets["region"]["heads"] = ["L0H0"]
    (tmp_path / "run" / "sets.json").write_text(json.dumps(sets))
    with pytest.raises(InputError, match="not the one that was frozen"):
        teacher_heads(tmp_path / "run", "set")


def test_evaluate_judges_one_student_as_a_campaign_does(campaign, files, tmp_path, capsys):
    out = tmp_path / "judged.json"
    asked = ["evaluate", "--model", str(campaign / "llama-student" / "mistill-0" / "model"), "--held-out", files["held-out"], "--labels", files["labels"], "--out", str(out), "--k", "2",
             "--write", "answer", "--mark", "answer\\n", "--longest", "60", "--minimum", "2", "--caliper", "0.5"]
    with shapes_unchecked():
        assert main(asked) == 0
    assert "held-out decisions" in capsys.readouterr().out
    mine, theirs = json.loads(out.read_text()), json.loads((campaign / "llama-student" / "mistill-0" / "result.json").read_text())
    assert {k: mine[k] for k in theirs} == theirs
    assert main(asked) == 0 and main([*asked[:-1], "0.25"]) == 2
    assert "was made otherwise" in capsys.readouterr().err


def test_tables_hold_what_is_done_and_no_more(campaign):
    found = tables_of(campaign, ["llama-student"], [("llama-student", "cot", 0), ("llama-student", "cot", 7)])["mistill"]
    assert list(found.arm) == ["teacher", "untrained", "cot"] and np.isnan(found[found.arm == "teacher"].overlap).all()


def test_what_is_judged_is_blind_to_the_arm(judged):
    """The names of arms are nowhere in what judging is given."""
    import inspect

    assert "arm" not in " ".join(inspect.signature(evaluate).parameters) + " ".join(inspect.signature(decisions).parameters)
    assert not {"arm", "seed"} & set(judged)


def test_a_campaign_refuses_a_teacher_without_heads_of_the_kind(files, demo, tmp_path, space):
    plan = Plan(Training(), Judging(kind="departure"))
    import shutil

    shutil.copytree(demo, tmp_path / "run")
    sets = json.loads((tmp_path / "run" / "sets.json").read_text())
    sets["departure"]["selected"] = {"heads": [], "digest": HeadSet().digest}
    (tmp_path / "run" / "sets.json").write_text(json.dumps(sets))
    with pytest.raises(InputError, match="no departure heads"):
        Campaign(tmp_path / "out", files["teacher"], tmp_path / "run", clinic(2, 35, "a"), clinic(2, 36, "b"), {"s": str(tiny.path("llama-student"))}, space, plan, [])
