"""The report: self-contained, in order, every claim beside its table, text escaped."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser

import pandas as pd
import pytest
from plotly.offline import get_plotlyjs

from decisionheads.report import build_report
from decisionheads.report_page import MOST_ROWS, Tables, claims, figures
from decisionheads.report_page import page as write_page


class Reader(HTMLParser):
    """Everything that a browser would act on, outside of scripts."""

    def __init__(self):
        super().__init__()
        self.tags, self.ids, self.links, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if "id" in attrs:
            self.ids.append(attrs["id"])
        if tag == "a":
            self.links.append(attrs["href"])

    def handle_data(self, data):
        if not self.tags or self.tags[-1][0] not in ("script", "style"):
            self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


@pytest.fixture(scope="module")
def page(demo):
    return build_report(demo)


def test_it_tells_the_story_in_order(page):
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["What was decided", "Which heads", "How sure", "Which controls", "Tables", "How this was made"]
    assert page.index("One decision") < page.index("Families</h3>") < page.index("All decisions together") < page.index("knocked in</h3>")


def test_nothing_is_fetched(page):
    for tag, attrs in read(page).tags:
        assert not any(str(attrs.get(name, "")).startswith(("http", "//")) for name in ("src", "href")), (tag, attrs)
        assert tag not in ("link", "iframe", "img")


def test_every_claim_links_to_a_table_that_is_there(page, demo):
    reader = read(page)
    assert len(reader.ids) == len(set(reader.ids))
    inside = [link[1:] for link in reader.links if link.startswith("#")]
    assert set(inside) <= set(reader.ids) and sum(link.startswith("table-") for link in inside) > 10
    for link in reader.links:
        assert link.startswith("#") or (demo / link).is_file(), link
    tables = {name.removeprefix("table-"): name for name in reader.ids if name.startswith("table-")}
    assert set(tables) == {p.stem for p in demo.glob("*.csv")} - {"labels"}


def test_numbers_of_tables_stand_in_it(page, demo):
    heads = pd.read_csv(demo / "heads.csv")
    said = "".join(read(page).text)
    best = heads.iloc[0]
    assert f"{best.effect:+.3f}" in said and f"({len(heads)} rows)" in said


def test_a_long_table_is_cut_and_says_so(demo, tmp_path):
    again = tmp_path / "run"
    shutil.copytree(demo, again)
    texts = pd.read_csv(again / "texts.csv")
    pd.concat([texts] * 40).to_csv(again / "texts.csv", index=False)
    assert len(texts) * 40 > MOST_ROWS and f"({len(texts) * 40} rows, of which the first {MOST_ROWS} are here)" in build_report(again)


def test_the_same_run_gives_the_same_page(page, demo):
    assert build_report(demo) == page


def test_hostile_names_stay_text(demo, tmp_path):
    """Ids of transcripts, labels and warnings come from files that others wrote."""
    again = tmp_path / "run"
    shutil.copytree(demo, again)
    hostile = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    texts = pd.read_csv(again / "texts.csv")
    texts.loc[0, "transcript"] = hostile
    texts.to_csv(again / "texts.csv", index=False)
    summary = (again / "summary.json").read_text()
    (again / "summary.json").write_text(summary.replace('"warnings": [', '"warnings": ["' + hostile + '", ', 1))
    reader = read(build_report(again))
    assert not any(tag == "img" for tag, _ in reader.tags) and "".join(reader.text).count(hostile) == 2
    assert not any("onerror" in attrs for _, attrs in reader.tags)


def test_figures_stand_under_captions_that_wrap():
    import plotly.graph_objects as go

    from decisionheads.looks import layout

    figure = layout(go.Figure(), "Finding & <b>more</b> " + "words " * 30, "x", "y", narrowest=500)
    html, = figures(figure)
    assert "<figcaption>Finding &amp; &lt;b&gt;more&lt;/b&gt; words" in html and "min-width:500px" in html and figure.layout.title.text
    assert "class=deep" in claims(["    deep"], "heads")
    of_kind = figures(*(layout(go.Figure(), f"{kind}: nothing stands out", "x", "y") for kind in ("Region", "Label")))
    assert len({re.search(r'id="(figure-\w+)"', html)[1] for html in of_kind}) == 2  # or the second would be drawn over the first


def test_whatever_comes_from_a_file_is_escaped_wherever_it_stands():
    hostile = "<b onclick=x>& deep"
    said = [claims([hostile, f"    {hostile}"], "heads"), Tables({"heads": pd.DataFrame({"head": [hostile]})}).html()]
    said.append(write_page(hostile, "", [hostile], {}).replace(get_plotlyjs(), ""))
    for html, times in zip(said, (2, 1, 3), strict=True):
        assert "<b onclick" not in html and html.count("&lt;b onclick=x&gt;&amp; deep") == times
