"""Marked texts for tests: the clinic with human-like evidence, invented releases of two corpora, and run folders written by hand."""

from __future__ import annotations

import json
import random
from dataclasses import replace

from decisionheads import HeadSet, Transcript, tiny
from decisionheads.provenance import model_hash
from decisionheads.transcripts import Span

from .test_corpora import EVENTS, chart_files, codiesp_release, mark, table

TITLES = {"I50.1": "heart failure", "I50.9": "failure of the heart", "J44.0": "lung disease", "J44.9": "disease of the lung", "E11.9": "diabetes"}
FILLER = ["slept well", "walks alone", "eats well", "seen today", "no fever", "calm"]


def clinic(n: int, seed: int, where: str = "note") -> list[Transcript]:
    """Right texts of the clinic with evidence spans.

    `note`: a code's evidence is the line of its finding in the note. `list`: the note spans the candidate list, too,
    and a code's evidence is the block of its region, which is what heads of region decisions read there.
    """
    found = []
    for i, drawn in enumerate(tiny.draw(n, seed)):
        t = tiny.transcript(f"clinic-{i:03d}", drawn)
        note = next(s for s in t.spans if s.name == "note")
        if where == "note":
            evidence = [s._replace(name="evidence") for s in t.spans if s.name == "mention" and s.end <= len(t.prompt)]
        else:
            blocks, note = {s.of: s for s in t.spans if s.name == "block"}, note._replace(start=0)
            evidence = [blocks[tiny.labels().region(code)]._replace(name="evidence", of=code) for code in t.labels]
        found.append(replace(t, spans=(*(s for s in t.spans if s.name != "note"), note, *evidence)))
    return found


def flippable(n: int, seed: int) -> list[Transcript]:
    """Texts of the clinic whose evidence can be edited: the words of each finding in the note.

    `near-miss evidence` of a code is the entry of another label of its region in the list: the words that would lead there.
    """
    found = []
    for i, drawn in enumerate(tiny.draw(n, seed)):
        t = tiny.transcript(f"clinic-{i:03d}", drawn)
        spans = [s for s in t.spans if s.name in ("block", "note")]
        for f in drawn.findings:
            line = next(s for s in t.spans if s.name == "mention" and s.of == f.right.label and s.end <= len(t.prompt))
            words = " ".join((f.concept, *f.qualifiers))
            start = t.prompt.index(words, line.start)
            spans.append(Span("evidence", start, start + len(words), f.right.label))
            block = next(b for b in drawn.blocks if b[0].region == f.right.region)
            other = next(e for e in block if e.label != f.right.label)
            at = t.prompt.index(f"{other.concept} {other.qualifier} {other.label}")
            spans.append(Span("near-miss evidence", at, at + len(f"{other.concept} {other.qualifier}"), f.right.label))
        found.append(replace(t, spans=tuple(spans)))
    return found


def rotated(text: Transcript) -> Transcript:
    """The same text, each code's evidence given to the next code."""
    own = [s for s in text.spans if s.name == "evidence"]
    moved = [s._replace(of=own[(i + 1) % len(own)].of) for i, s in enumerate(own)]
    return replace(text, spans=(*(s for s in text.spans if s.name != "evidence"), *moved))


def run_folder(path, model, heads: dict[str, list[str]], shape=(4, 8), sinks=(0, 1, 2, 3), hashed=None):
    """A finished run folder of `discover`'s format, as far as evidence looks at it: these heads, best first, in front of all others."""
    path.mkdir()
    everything = [str(h) for h in HeadSet.all(*shape)]
    lines = ["kind,layer,head,rank"]
    for kind, named in heads.items():
        for rank, head in enumerate([*named, *(h for h in everything if h not in named)], 1):
            lines.append(f"{kind},{head[1:].split('H')[0]},{head.split('H')[1]},{rank}")
    (path / "heads.csv").write_text("\n".join(lines) + "\n")
    (path / "sets.json").write_text(json.dumps({kind: {"heads": sorted(named), "selected": {"heads": sorted(named)}} for kind, named in heads.items()}))
    (path / "summary.json").write_text(json.dumps({"kinds": {}, "families": {"sinks": list(sinks)}}))
    (path / "null_max.safetensors").write_bytes(b"")
    (path / "run.json").write_text(json.dumps({"inputs": {"model": hashed or model_hash(str(model))}, "finished": True, "model": "m", "layers": shape[0], "heads": shape[1]}))
    return path


def invented_note(rng: random.Random, codes: list[str], newline: str = "\n") -> tuple[str, dict[str, tuple[int, int]]]:
    """A note, and where in it the words for each code stand."""
    text, spans = f"Chief Complaint:{newline}", {}
    for code in codes:
        text += f"{rng.choice(FILLER)}; "
        spans[code] = (len(text), len(text) + len(TITLES[code]))
        text += TITLES[code] + f", {rng.choice(FILLER)}.{newline}"
    return text, spans


def mdace_shaped(root, n: int = 8, seed: int = 0):
    """An invented release of MDACE's format, with line ends of two characters."""
    rng, charts, rows = random.Random(seed), {}, []
    for i in range(n):
        codes = rng.sample(sorted(TITLES), 2)
        text, spans = invented_note(rng, codes, "\r\n")
        charts[str(100 + i)] = [{"note_id": i + 1, "category": "Discharge summary", "description": "Report", "annotations": [mark(*spans[code], code) for code in codes]}]
        rows.append((str(i + 1), str(70 + i // 2), str(100 + i), "2100-01-01", "", "", "Discharge summary", "Report", "", "", text))
    chart_files(root, charts)
    table(root / "NOTEEVENTS.csv.gz", EVENTS, rows)
    return root


def codiesp_shaped(root, n: int = 8, seed: int = 1):
    """An invented release of CodiEsp's format."""
    rng, texts, codes, words = random.Random(seed), {}, [], []
    for i in range(n):
        given = rng.sample(sorted(TITLES), 2)
        texts[f"c-{i}"], spans = invented_note(rng, given)
        codes += [(f"c-{i}", code.lower()) for code in given]
        words += [(f"c-{i}", "DIAGNOSTICO", code.lower(), TITLES[code], f"{spans[code][0]} {spans[code][1]}") for code in given]
    return codiesp_release(root, "train", codes, words, texts)
