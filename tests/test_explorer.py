"""The explorer: every answer against a full forward with plain hooks, what the page says, and what its controls do."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from decisionheads import DecisionModel, HeadSet, InputError, Transcript, mean_ablate, tiny
from decisionheads.ablation import ReferenceMeans
from decisionheads.events import DecisionEvent
from decisionheads.explorer import Bench, Explorer, bench, live, runs
from decisionheads.explorer.page import STYLE, WHOLE, Hand, opened, page, pieces, visible
from decisionheads.heads import HeadScores
from decisionheads.run_folder import read_json
from decisionheads.transcripts import load_transcripts

from . import oracle
from .conftest import save_random, shapes_unchecked

FAMILIES = {"region": HeadSet(["L1H4", "L1H5"]), "near-miss": HeadSet(["L1H7"])}
NONE = HeadSet()


@pytest.fixture
def explorer(model, readings, means):
    return Explorer(model, readings[6:], means, FAMILIES)


def departure(readings) -> tuple[str, int]:
    """The first departure among some texts: id, and number of the event."""
    return next((r.transcript.id, n) for r in readings for n, e in enumerate(r.events) if e.kind == "departure")


def forward(hf, ids, position, off=NONE, zbar=None, blocked=NONE, keys=()):
    """Logits and attention at a position from one full eager forward: z of `off` replaced there, `keys` masked there for `blocked`."""
    layers = [b.attn for b in hf.transformer.h] if hasattr(hf, "transformer") else [b.self_attn for b in hf.model.layers]
    handles = []
    for layer, (attention, projection) in enumerate(zip(layers, oracle.output_projections(hf), strict=True)):

        def masked(module, args, kwargs, layer=layer):
            mask = kwargs["attention_mask"].expand(1, hf.config.num_attention_heads, -1, -1).clone()
            for h in blocked:
                if h.layer == layer:
                    mask[0, h.head, position, list(keys)] = torch.finfo(mask.dtype).min
            return args, {**kwargs, "attention_mask": mask}

        def replaced(module, args, layer=layer):
            z = args[0].clone()
            for h in off:
                if h.layer == layer:
                    z[0, position].view(hf.config.num_attention_heads, -1)[h.head] = torch.as_tensor(zbar[layer, h.head])
            return (z,)

        handles += [attention.register_forward_pre_hook(masked, with_kwargs=True), projection.register_forward_pre_hook(replaced)]
    try:
        with torch.no_grad():
            out = hf(input_ids=torch.as_tensor(ids)[None], use_cache=False, output_attentions=True)
        return out.logits[0, position].float(), torch.stack([a[0, :, position] for a in out.attentions])
    finally:
        for handle in handles:
            handle.remove()


CASES = {"one head": (["L1H7"], None, ()), "heads of three layers": (["L0H0", "L1H4", "L1H5", "L2H2"], None, ()), "a span for one head of either model": ([], "near-miss", ["L1H7", "L1H0"]),
         "a span of many parts for all": ([], "own mention", "all heads"), "a block for a family": ([], "own block", ["L1H4", "L1H5"]), "characters for all": ([], (10, 400), "all heads"),
         "both, other heads": (["L0H0", "L2H2"], "near-miss", ["L1H7", "L3H0"]), "both, the same head": (["L1H7"], "near-miss", ["L1H7", "L1H6"])}


@pytest.mark.parametrize("case", CASES)
def test_every_intervention_equals_one_full_forward(model, plain, readings, means, case):
    off, block, blocked = CASES[case]
    table = Bench(model, {r.transcript.id: r for r in readings[6:]}, means)
    off, blocked, moved = table.heads(off), table.heads(blocked), []
    for name, number in [(r.transcript.id, n) for r in readings[6:9] for n, e in enumerate(r.events) if block != "near-miss" or e.near_miss]:
        event, reading = table.events(name)[number], table.reading(name)
        t, text = event.position, reading.encoded
        spans = [] if block is None else [block] if isinstance(block, tuple) else [(a, b) for given, a, b in event.spans if given == block]
        keys = sorted({int(i) for a, b in spans for i in range(len(text)) if text.offsets[i, 0] < b and text.offsets[i, 1] > a and i < t})
        assert bool(keys) == (block is not None)
        clean, _ = forward(plain, text.ids[:t + 1], t)
        want, pattern = forward(plain, text.ids[:t + 1], t, off, means.means[event.kind], blocked, keys)
        found = table.outcome(name, number, off, block, blocked)
        margin = table.decision(name, number).margin
        assert abs(found.margin - float(margin(want))) <= 1e-3 and abs(found.m - float(margin(clean))) <= 1e-3
        for a in found.alternatives:
            assert abs(a.logit - float(want[a.token])) <= 1e-3 and abs(a.logit_before - float(clean[a.token])) <= 1e-3
            assert abs(a.probability - float(want.softmax(-1)[a.token])) <= 1e-3
        assert {int(i) for i in (*want.topk(3).indices, *clean.topk(3).indices)} <= {a.token for a in found.alternatives}
        moved.append(float(margin(clean) - margin(want)))
        for heads in (HeadSet(["L1H7"]), HeadSet(["L0H2", "L2H2", "L3H6"]), model.hooked.heads):
            read = table.reads(name, number, heads, off, block, blocked)
            np.testing.assert_allclose(read, torch.stack([pattern[h.layer, h.head] for h in heads]).mean(0), atol=1e-4)
            assert read.shape == (t + 1,) and abs(read.sum() - 1) < 1e-4
    assert max(map(abs, moved)) > 0.3, "the reference itself must move"


def test_margins_and_floors_are_those_of_mean_ablation(model, readings, means, explorer):
    want = mean_ablate(model, readings[6], means)
    for n, m in enumerate(explorer.bench.margins(readings[6].transcript.id)):
        o = explorer.pick(event=n).outcome
        np.testing.assert_allclose([o.m, o.m0, m], [want.margins[n], want.floors[n], want.margins[n]], atol=1e-4)
        for head in ("L1H7", "L1H4"):
            assert abs(explorer.off(head).outcome.effect - want.scores.values[n][explorer.bench.heads(head).to_list()[0]]) <= 1e-4
            explorer.reset()


def test_nothing_changed_is_exactly_the_clean_margin_and_back_is_back(explorer, readings):
    explorer.pick(*departure(readings[6:]))
    first, reads = explorer.outcome, explorer.reads
    assert first.margin == first.m and first.effect == 0 and all(a.logit == a.logit_before for a in first.alternatives)
    one = explorer.off("L1H7").off("L0H0", "L2H2").block("near-miss").outcome
    assert abs(one.effect) > 1
    other = explorer.reset().block("near-miss").off("L2H2, L0H0").off("L1H7").outcome
    assert one == other
    assert explorer.on("L1H7", "L0H0").on("L2H2").unblock().outcome == first and (explorer.reads == reads).all()
    assert explorer.off("region").on().outcome == first and explorer.bench.outcome(explorer.state.transcript, explorer.state.event, block="near-miss") == first


def test_an_intervention_is_one_branch_over_one_prefill(explorer, readings, monkeypatch):
    explorer.pick(*departure(readings[6:]))
    assert explorer.outcome.effect == 0
    calls, really = [], bench.branch_logits
    monkeypatch.setattr(bench, "branch_logits", lambda hooked, prefix, branches: calls.append(len(branches)) or really(hooked, prefix, branches))
    monkeypatch.setattr(explorer.bench.model.hooked, "prefill", lambda *a, **k: pytest.fail("the text was read again"))
    for change in (lambda: explorer.off("L1H7"), lambda: explorer.block("own mention"), lambda: explorer.on().block((5, 90), "region")):
        change()
        assert explorer.outcome == explorer.outcome and len(explorer._repr_html_()) > 1000
    assert calls == [1, 1, 1]


def test_what_is_off_stays_off_at_another_event_and_a_block_only_where_it_fits(explorer, readings):
    name, number = departure(readings[6:])
    explorer.pick(name, number).off("region").block("near-miss", "near-miss")
    state = explorer.pick(event=number - 1 if number else number + 1).state
    assert state.off == FAMILIES["region"] and (state.block == "near-miss") == ("near-miss" in explorer.spans)
    explorer.pick(name, number).block("own block")
    other = readings[-1].transcript.id
    assert explorer.pick(other).state.block == "own block"
    explorer.block((5, 60))
    assert explorer.pick(event=1).state.block == (5, 60) and explorer.pick(name).state.block is None


# -- wrong calls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call, said", [
    (lambda x: x.off("L9H3"), r"L9H3: (llama|gpt2) has layers 0 to 3 and heads 0 to 7; name one of those"), (lambda x: x.off("L1H8"), "L1H8: "), (lambda x: x.off((4, 0)), "L4H0: "),
    (lambda x: x.off("foo, L1H7"), "'foo' is not a head: write L1H7 for layer 1, head 7, and several with commas between, or a family: region, near-miss"),
    (lambda x: x.off(""), "'' is not a head"), (lambda x: x.pick("zz"), "no transcript 'zz' here; 6 are, such as 't6'"), (lambda x: x.pick(event=99), "no event 99 in transcript 't6', which has 6; give a whole number from 0 to 5"),
    (lambda x: x.pick(event=-1), "no event -1"), (lambda x: x.pick(event=True), "no event True"), (lambda x: x.pick(event="1"), "no event '1'"), (lambda x: x.block("nope"), "'nope' is no span .* choose one of .*'own block'"),
    (lambda x: x.block((5, 3)), "characters 5:3 do not lie in a text of"), (lambda x: x.block(7), "7 is no span; give a name"),
    (lambda x: x.block((len(x.decision.reading.transcript.text) - 2, len(x.decision.reading.transcript.text))), "stand where the decision cannot read them; it is written after character"),
    (lambda x: x.block("own block", "L7H0"), "L7H0: "), (lambda x: x.colour_by("blue"), "'blue' is not a head")])
def test_a_wrong_call_is_one_sentence_and_changes_nothing(explorer, call, said):
    before = explorer.off("L1H7").state
    with pytest.raises(InputError, match=said), shapes_unchecked():
        call(explorer)
    assert explorer.state == before


def test_what_does_not_belong_together_is_refused(model, readings, means, space):
    with pytest.raises(InputError, match="'t0' is in the reference split"):
        Explorer(model, readings, means)
    with pytest.raises(InputError, match="'strange' is of another model: L5H1"):
        Explorer(model, readings[6:], means, {"strange": HeadSet(["L5H1", "L0H0"])})
    other = ReferenceMeans({"region": np.zeros((3, 9, 8), np.float32)}, {"region": 30}, frozenset())
    with pytest.raises(InputError, match="means are of a model of 3 layers by 9 heads of width 8"):
        Explorer(model, readings[6:], other)
    with pytest.raises(InputError, match="'t6' is used more than once"):
        Explorer(model, [readings[6], readings[6]], means)
    with pytest.raises(InputError, match="a str is neither a Reading nor a Transcript"), shapes_unchecked():
        Explorer(model, ["t6"], means)
    with pytest.raises(InputError, match="'t6' is not read yet .* pass labels="):
        Explorer(model, [readings[6].transcript], means)
    with pytest.raises(InputError, match="no transcript to explore"):
        Explorer(model, [], means)
    grouped = replace(means, groups=frozenset({"ward 3"}))
    with pytest.raises(InputError, match="is of group ward 3, which is in the reference split too"):
        Explorer(model, [replace(readings[6], transcript=replace(readings[6].transcript, group="ward 3"))], grouped)
    only = replace(means, means={"departure": means.means["departure"]})
    bare = replace(readings[6], events=tuple(e for e in readings[6].events if e.kind != "departure"))
    with pytest.raises(InputError, match="'t6' has no decision event of a kind that has reference means"):
        Explorer(model, [bare], only)


def test_transcripts_are_read_when_they_are_picked(model, readings, means, space, monkeypatch):
    lazy = Explorer(model, [r.transcript for r in readings[6:]], means, FAMILIES, labels=space)
    ready = Explorer(model, readings[6:], means, FAMILIES)
    reads, really = [], model.read
    monkeypatch.setattr(type(model), "read", lambda self, t, events: reads.append(t.id) or really(t, events))
    assert lazy.pick("t8", 1).off("region").outcome == ready.pick("t8", 1).off("region").outcome
    assert lazy.pick("t8", 2).outcome and reads == ["t8"]


# -- the page ---------------------------------------------------------------------------------------


class Seen(HTMLParser):
    """Tags with their attributes, text outside styles, and the text of every token."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.text, self.tokens, self.stack = [], "", {}, []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("input", "br"):
            self.stack.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop()[0] == tag, f"{tag} does not close what was opened last"

    def handle_data(self, data):
        if not any(tag == "style" for tag, _ in self.stack):
            self.text += data
        if self.stack and "data-i" in self.stack[-1][1]:
            i = int(self.stack[-1][1]["data-i"])
            self.tokens[i] = self.tokens.get(i, "") + data

    def marked(self, name: str) -> set[int]:
        return {int(a["data-i"]) for _, a in self.tags if "data-i" in a and name in (a.get("class") or "").split()}

    def strength(self) -> dict[int, float]:
        return {int(a["data-i"]): float(re.search(r"rgba\(1,133,123,([\d.]+)\)", a["style"])[1]) for _, a in self.tags if "data-i" in a and "style" in a}


def test_tokens_are_coloured_by_what_is_read_and_marked_where_they_stand(explorer, readings):
    explorer.pick(*departure(readings[6:])).colour_by("L1H7, L1H4, L0H2").block("own mention", "region")
    decision, mass = explorer.decision, explorer.reads
    seen = Seen(page(explorer, Hand()))
    text, encoded, t = decision.reading.transcript.text, decision.reading.encoded, decision.event.position
    for i, shown in seen.tokens.items():
        a, b = encoded.offsets[i]
        assert shown.replace("↵", "") == (text[a:b] or "<bos>")
    assert seen.marked("c") == {t + 1} and encoded.ids[t + 1] == decision.event.chosen
    near = next((a, b) for name, a, b in decision.event.spans if name == "near-miss")
    assert seen.marked("n") == set(encoded.tokens_in(*near).tolist())
    wanted = {int(i) for name, a, b in decision.event.spans if name == "own mention" for i in encoded.tokens_in(a, b) if i < t}
    assert seen.marked("x") == wanted and wanted
    strength = seen.strength()
    assert set(strength) == {i for i in range(t + 1) if mass[i] >= 0.005}
    order = sorted(strength, key=lambda i: mass[i])
    assert all(strength[a] <= strength[b] for a, b in zip(order, order[1:], strict=False)) and strength[order[-1]] > 2 * strength[order[0]]
    assert seen.marked("later") and min(seen.marked("later")) == t + 2


def test_the_static_page_says_the_state(explorer, readings):
    explorer.pick(*departure(readings[6:])).off("region").block("near-miss", "near-miss")
    o, seen = explorer.outcome, Seen(explorer._repr_html_())
    for said in (f"Margin {o.m:+.2f} → {o.margin:+.2f} logits", "Heads off (2): L1H4, L1H5.", "Not read: near-miss, by near-miss.", f"{o.m0:+.2f} with every head off", "rival", "chosen",
                 f"{o.alternatives[0].probability:.1%}", f"{o.alternatives[0].logit:.2f}", visible(o.alternatives[0].text)):
        assert said in seen.text, said
    assert not {tag for tag, _ in seen.tags} & {"button", "select", "input", "script", "link", "img"} and "http" not in explorer._repr_html_()
    assert "nothing is changed" in Seen(explorer.reset()._repr_html_()).text
    assert repr(explorer).startswith(f"Explorer({explorer.state.transcript!r}, event ") and "nothing changed" in repr(explorer) and "\n" not in repr(explorer)
    assert "L1H7 off" in repr(explorer.off("L1H7")) and repr(explorer.outcome).startswith("Outcome(margin ")


HOSTILE = "<script>alert(1)</script> & <img src=x onerror='alert(2)'> \"quoted\" é漢字🙂 "


@pytest.fixture(scope="module")
def hostile(bpe_folder):
    """An explorer of a text, a label, an id and a family that would all like to be markup."""
    model = DecisionModel.from_pretrained(bpe_folder)
    transcript = Transcript("<b>id</b>'", HOSTILE, "thinks <i>I50.2</i> ", "I50.9 </div><script>")
    ids = model.tokenizer(transcript.text)["input_ids"]
    start = transcript.text.index("<i>")
    event = DecisionEvent(transcript.id, "departure", len(ids) - 4, ids[-3], (ids[-3], ids[0]), (ids[0],), "<u>label</u>", "<s>", 0, 1, near_miss="<em>near</em>",
                          spans=(("<script>span", start, start + 6), ("near-miss", start, start + 6)))
    encoded = model.read(transcript, []).encoded
    event = replace(event, position=len(encoded) - 4, chosen=int(encoded.ids[-3]), alternatives=(5, int(encoded.ids[-3])), competitors=(5,))
    shape = (model.n_layers, model.n_heads, model.hooked.d_head)
    means = ReferenceMeans({"departure": np.zeros(shape, np.float32)}, {"departure": 30}, frozenset())
    return Explorer(model, [model.read(transcript, [event])], means, {"<script>family": HeadSet(["L0H1"])})


def test_hostile_text_stays_text(hostile):
    hostile.reset().off("<script>family").block("<script>span")
    allowed = {"div", "style", "p", "b", "small", "span", "code", "table", "tr", "th", "td", "i", "u", "h4", "button", "select", "option", "label", "input", "details", "summary"}
    desk = live.Desk(hostile)
    desk.do("entry-off", "<script>typed")
    assert "'<script>typed' is not a head" in desk.error
    for html in (hostile._repr_html_(), desk.page(), live.bundle(hostile)["text/html"]):
        seen = Seen(html)
        assert {tag for tag, _ in seen.tags} <= allowed and "<script" not in html
        assert not [a for _, a in seen.tags if any(name.startswith("on") or name in ("src", "href") for name in a)]
        for text in ("<script>alert(1)</script> & <img src=x onerror='alert(2)'> \"quoted\" é漢字🙂", "<b>id</b>'", "<u>label</u>", "<em>near</em>", "<script>family", "<script>span"):
            assert text in seen.text, text
    assert "<script>typed" in [a.get("value") for tag, a in Seen(desk.page()).tags if tag == "input"]


def test_characters_of_several_tokens_are_shown_once(hostile):
    decision = hostile.decision
    found = pieces(decision, hostile)
    special = len(decision.reading.encoded) and decision.reading.encoded.offsets[0, 1] == 0
    assert "".join(before + text for _, _, before, text in found[int(special):]) == decision.reading.transcript.text[:decision.reading.encoded.offsets[found[-1][1] - 1, 1]]
    assert any(end - first > 1 for first, end, _, _ in found) and [a[1] for a in found[:-1]] == [b[0] for b in found[1:]]
    seen = Seen(page(hostile, Hand()))
    hostile.reset()
    assert len(seen.marked("c")) == 1


# -- long texts ---------------------------------------------------------------------------------------


def test_of_a_long_text_the_read_stretches_and_the_end_are_shown():
    mass = np.zeros(2_000, np.float32)
    mass[0], mass[700], mass[1_200] = 0.5, 0.3, 0.19
    mass[300] = 0.01
    show = opened(mass, 2_000, {950}, 2_010)
    assert show[[0, 692, 700, 708, 1_200, 950, 1_921, 2_005]].all() and not show[[20, 300, 690, 710, 1_500, 1_919]].any()
    assert opened(mass[:WHOLE], WHOLE, set(), WHOLE).all()


def test_a_long_text_is_folded_and_can_be_opened(tmp_path):
    model = DecisionModel.from_pretrained(save_random("llama", tmp_path, max_position_embeddings=1_400))
    drawn = tiny.draw(1, seed=3)[0]
    short = tiny.transcript("long", drawn)
    line = "- denies gout late\n"
    cut = short.text.index("note\n") + 5
    long = replace(short, prompt=short.prompt[:cut] + line * 230 + short.prompt[cut:], spans=())
    reading = model.read(long, model.find_events(long, tiny.labels()))
    assert 1_000 < len(reading.encoded) < 1_400
    shape = (model.n_layers, model.n_heads, model.hooked.d_head)
    kinds = {e.kind for e in reading.events}
    explorer = Explorer(model, [reading], ReferenceMeans({k: np.zeros(shape, np.float32) for k in kinds}, dict.fromkeys(kinds, 30), frozenset()))
    desk = live.Desk(explorer)
    seen = Seen(desk.page())
    folds = [a for tag, a in seen.tags if tag == "button" and a.get("data-do") == "unfold"]
    assert folds and len(seen.tokens) < 900 and explorer.decision.event.position + 1 in seen.tokens
    static = explorer._repr_html_()
    whole = Seen(re.sub("<summary>.*?</summary>|↵", "", static)).text
    shown = len(seen.tokens) and int(reading.encoded.offsets[max(seen.tokens), 1])
    assert "<details>" in static and long.text[:shown] in whole, "nothing of the text is lost in the static page"
    start, end = max((tuple(map(int, a["data-value"].split(":"))) for a in folds), key=lambda fold: fold[1] - fold[0])
    desk.do("unfold", f"{start}:{end}")
    assert end - 1 in Seen(desk.page()).tokens and end - 1 not in seen.tokens
    desk.do("event", "1")
    assert desk.page() and not desk.unfolded


# -- the live view ------------------------------------------------------------------------------------


def test_controls_do_what_the_methods_do(explorer, readings):
    explorer.pick(*departure(readings[6:]))
    view = explorer.widget()
    assert explorer.widget() is view
    sent = []
    view.send = lambda content, buffers=None: sent.append(content)
    tell = lambda what, value="": view.handle({"do": what, "value": value})  # noqa: E731
    tell("hello")
    assert sent == [{"alive": True}]
    tell("head", "L1H7")
    assert explorer.state.off == HeadSet(["L1H7"]) and "Heads off (1): L1H7." in view.html and sent[-1] == {"done": True}
    tell("head", "L1H7"), tell("family", "region")
    assert explorer.state.off == FAMILIES["region"]
    tell("head", "L1H4"), tell("family", "region")
    assert explorer.state.off == FAMILIES["region"], "a family that is partly off is switched off whole"
    tell("family", "region"), tell("readers", "near-miss"), tell("span", "near-miss")
    assert (explorer.state.off, explorer.state.block, explorer.state.blocked) == (NONE, "near-miss", FAMILIES["near-miss"])
    tell("readers", "all heads")
    assert explorer.state.blocked == explorer.bench.model.hooked.heads
    tell("span", ""), tell("colour", "L0H3")
    assert explorer.state.block is None and explorer.shown == HeadSet(["L0H3"])
    tell("entry-off", "L1H7, L0H1"), tell("entry-on", "L0H1"), tell("entry-colour", "L1H7")
    assert explorer.state.off == HeadSet(["L1H7"]) == explorer.shown
    before = explorer.state
    tell("entry-off", "L12H7")
    assert explorer.state == before and "role=alert>L12H7: " in view.html and "value='L12H7'" in view.html
    tell("reset")
    assert explorer.state.off == NONE and "role=alert></div>" in view.html
    tell("event", "0"), tell("transcript", "t7")
    assert (explorer.state.transcript, explorer.state.event) == ("t7", 0)
    explorer.off("L3H3")
    assert "Heads off (1): L3H3." in view.html, "a method moves the view as well"


def test_two_clicks_or_a_drag_block_the_tokens_between(explorer):
    desk, offsets = live.Desk(explorer), explorer.decision.reading.encoded.offsets
    desk.do("token", "30")
    assert desk.picked == 30 and Seen(desk.page()).marked("s") == {30} and explorer.state.block is None
    desk.do("token", "24")
    assert explorer.state.block == (offsets[24, 0], offsets[30, 1]) and desk.picked is None and Seen(desk.page()).marked("x") == set(range(24, 31))
    desk.do("token", "40"), desk.do("drop", "")
    assert desk.picked is None
    desk.do("range", "12:15")
    assert Seen(desk.page()).marked("x") == {12, 13, 14, 15}
    desk.do("range", f"{explorer.decision.event.position + 1}:{explorer.decision.event.position + 2}")
    assert "cannot read them" in desk.error and Seen(desk.page()).marked("x") == {12, 13, 14, 15}
    if offsets[0, 1] == 0:
        desk.do("range", "0:0")
        assert "stands for no character" in desk.error


def test_every_control_has_a_name_and_one_stop_by_keyboard(explorer):
    seen = Seen(live.Desk(explorer).page())
    stack = re.findall(r"<label>[^<]+<(select|input)", live.Desk(explorer).page())
    named = [a for tag, a in seen.tags if tag in ("select", "input") and "aria-label" in a]
    assert len(stack) + len(named) == sum(tag in ("select", "input") for tag, _ in seen.tags)
    assert sum(a.get("tabindex") == "0" for _, a in seen.tags if "data-i" in a) == 1
    assert sum(a.get("tabindex") == "0" for _, a in seen.tags if a.get("data-do") == "head") == 1
    keys = [a["data-k"] for _, a in seen.tags if "data-k" in a]
    assert len(keys) == len(set(keys))


def test_many_heads_and_texts_are_named_and_not_listed(explorer, monkeypatch):
    from decisionheads.explorer import page as module

    monkeypatch.setattr(module, "GRID", 31), monkeypatch.setattr(module, "LISTED", 5)
    desk = live.Desk(explorer.off("L2H5"))
    desk.do("entry-colour", "L2H5, L0H1"), desk.do("entry-block", "L2H5, L0H1"), desk.do("span", "own block")
    seen = Seen(desk.page())
    assert not [a for _, a in seen.tags if a.get("data-do") == "head"] and "Heads off (1): L2H5." in seen.text and "dhx-grid'" not in explorer._repr_html_()
    assert ("input", "transcript") in [(tag, a.get("data-do")) for tag, a in seen.tags]
    assert explorer.state.blocked == explorer.shown == HeadSet(["L2H5", "L0H1"])
    assert {"L2H5, L0H1"} <= {a["value"] for tag, a in seen.tags if tag == "option"} and "by L0H1, L2H5." in seen.text
    desk.do("transcript", "t99")
    assert desk.error.startswith("there is no transcript 't99' here; 6 are")


def test_html_is_shown_first_and_kept_up_to_date(explorer, readings, monkeypatch):
    import IPython.display

    explorer.pick(*departure(readings[6:]))
    shown, kept = [], []

    class Handle:
        def update(self, data, raw):
            kept.append(data)

    monkeypatch.setattr(IPython.display, "display", lambda data, raw, display_id=False: shown.append(data) or Handle())
    explorer._ipython_display_()
    page_, view = shown
    assert "Margin" in page_["text/html"] and live.VIEW not in page_ and f"data-dhx='{explorer.widget().key}'" in page_["text/html"]
    assert view[live.VIEW]["model_id"] == explorer.widget().model_id
    explorer.off("L1H7")
    assert "Heads off (1): L1H7." in kept[-1]["text/html"] and "L1H7 off" in kept[-1]["text/plain"]
    bundle = explorer._repr_mimebundle_()
    assert bundle[live.VIEW] == view[live.VIEW] and "Heads off (1): L1H7." in bundle["text/html"]


@pytest.mark.parametrize("missing", ["ipywidgets", "anywidget"])
def test_without_widgets_there_is_plain_html(explorer, missing, monkeypatch):
    import IPython.display

    monkeypatch.setattr(live, "find_spec", lambda name: None if name == missing else object())
    assert set(explorer._repr_mimebundle_()) == {"text/plain", "text/html"}
    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: shown.append(data))
    explorer._ipython_display_()
    assert len(shown) == 1 and "Margin" in shown[0]["text/html"] and live.VIEW not in shown[0]
    with pytest.raises(InputError, match="pip install ipywidgets anywidget"):
        explorer.widget()


def test_the_script_takes_nothing_from_outside():
    assert not re.search(r"https?:|\bimport\b(?!ant)|fetch\(|\burl\(", live.SCRIPT + STYLE)


# -- a finished run -----------------------------------------------------------------------------------


def test_a_run_is_opened_with_its_own_effects(demo, monkeypatch):
    used, really = set(), runs.survey
    monkeypatch.setattr(runs, "survey", lambda model, transcript, labels, closers, *rest: used.add(closers) or really(model, transcript, labels, closers, *rest))
    model, space = DecisionModel.from_pretrained(tiny.path("llama")), tiny.labels()
    texts = load_transcripts(demo / "transcripts.jsonl")
    with shapes_unchecked():
        explorer = Explorer.of_run(demo, model, texts, space)
        saved, manifest = HeadScores.load(demo / "effects.safetensors"), read_json(demo / "run.json")
        assert set(explorer.transcripts) <= {*manifest["splits"]["selection"], *manifest["splits"]["evaluation"]}
        checked = 0
        for name, effects in list(zip(saved.events, saved.values, strict=True))[:4]:
            text = name.split("@")[0]
            number = next(n for n, e in enumerate(explorer.bench.events(text)) if e.name == name)
            for head in [(0, 0), tuple(int(i) for i in np.unravel_index(np.abs(effects).argmax(), effects.shape))]:
                assert abs(explorer.pick(text, number).reset().off(head).outcome.effect - effects[head]) <= 1e-4
                checked += abs(effects[head]) > 0.5
        assert checked >= 4
    assert [list(closers) for closers in used] == [read_json(demo / "summary.json")["kinds"]["region"]["selection"]["closers"]] != [[]]
    sets = read_json(demo / "sets.json")
    assert explorer.families["global set"] == HeadSet(sets["global"]["heads"]) and all(len(heads) for heads in explorer.families.values())
    with pytest.raises(InputError, match="transcripts and 1 of them, such as .* are not among those given"):
        Explorer.of_run(demo, model, texts[1:], space)
    with pytest.raises(InputError, match="has no run.json"):
        Explorer.of_run(demo.parent, model, texts, space)


def test_a_run_of_another_model_or_with_other_sets_is_refused(demo, random_folder, tmp_path):
    texts, space = load_transcripts(demo / "transcripts.jsonl"), tiny.labels()
    with pytest.raises(InputError, match="is a run of llama, 4 layers by 8 heads"):
        Explorer.of_run(demo, DecisionModel.from_pretrained(random_folder), texts, space)
    sets = read_json(demo / "sets.json")
    sets["global"]["heads"] = ["L0H0"]
    (tmp_path / "sets.json").write_text(json.dumps(sets))
    with pytest.raises(InputError, match="the global set is not the one that was frozen"):
        runs.families_of(tmp_path / "sets.json")
