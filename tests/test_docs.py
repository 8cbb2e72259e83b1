"""The documentation: links, navigation, floors, public names, sentences, commands and code, without mkdocs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer

import decisionheads
from decisionheads.cli import app

from .test_house import FLOORS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [ROOT / "README.md", *PAGES]
BOX = ["Formula", "Sign", "Units", "Cost", "Caveats"]
VERBS = ["margin", "ablation", "attribution", "calibration", "head_sets", "knock_in", "reads", "read_blocking", "elicitation"]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(text: str) -> str:
    """A page without its code: fenced blocks, indented ones that follow an empty line, and code in a line."""
    text = re.sub(r"(?<=\n\n)(?:    [^\n]*\n)+", "", FENCE.sub("", text))
    return re.sub(r"`[^`\n]*`", "``", text)


def anchors(page: Path) -> set[str]:
    """What can be linked to on a page: its headings, as the table of contents writes them."""
    from_heading = lambda words: re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words.replace("`", "")).strip().lower())  # noqa: E731
    return {from_heading(line.lstrip("#").strip()) for line in FENCE.sub("", page.read_text()).splitlines() if re.match(r"#{1,6} ", line)}


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_every_link_and_picture_is_there(page):
    for target in re.findall(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", prose(page.read_text())):
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), target
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.is_file(), f"{target} is not there"
        assert there.is_relative_to(DOCS) or page.parent == ROOT, f"{target} is not part of the site"
        if anchor:
            assert anchor in anchors(there), f"{target}: no such heading"


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    entries = re.findall(r"^ +- (?:[^#\n]*: )?([\w/]+\.md)$", nav, re.MULTILINE)
    assert sorted(entries) == sorted(str(p.relative_to(DOCS)) for p in PAGES)  # each once


def test_nothing_is_fetched_when_a_page_is_read():
    config = (ROOT / "mkdocs.yml").read_text()
    assert re.search(r"^  font: false$", config, re.MULTILINE)
    assert "://" not in config and "repo_url" not in config
    for file in DOCS.rglob("*"):
        if file.suffix in (".css", ".js", ".html"):
            assert "//" not in re.sub(r"/\*.*?\*/", "", file.read_text(), flags=re.DOTALL), file
    for page in PAGES:
        assert not re.search(r"!\[[^\]]*\]\(https?:|<(?:script|img|link|iframe)\b", prose(page.read_text())), page


def test_the_floors_of_the_page_are_those_of_the_house():
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(len(FLOORS)))
    assert [re.findall(r"`(\w+)`", rooms) for _, rooms in rows] == FLOORS


def test_every_public_name_stands_in_the_reference():
    shown = re.findall(r"^::: (\S+)$", (DOCS / "api" / "index.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted([*(f"decisionheads.{module}.{name}" for name, module in decisionheads._WHERE.items()), "decisionheads.tiny"])
    assert {s.rpartition(".")[2] for s in shown} == set(decisionheads.__all__)


@pytest.mark.parametrize("page", sorted((DOCS / "api").glob("*.md")), ids=name_of)
def test_what_the_reference_names_is_in_the_code(page):
    """Modules are files, and names are classes or functions of them."""
    shown = re.findall(r"^::: decisionheads\.(\S+)\n(?:    .*\n)*", page.read_text(), re.MULTILINE)
    assert shown
    for name in shown:
        path = ROOT / "decisionheads" / name.replace(".", "/")
        module = next((p for p in (path.with_suffix(".py"), path / "__init__.py", path.parent.with_suffix(".py"), path.parent / "__init__.py") if p.is_file()), None)
        assert module is not None, name
        last = name.rpartition(".")[2]
        if module.stem != last and module.parent.name != last:
            assert last in {n.name for n in ast.parse(module.read_text()).body if isinstance(n, ast.ClassDef | ast.FunctionDef)}, name


def test_every_room_that_is_not_private_is_in_the_reference():
    shown = {name for page in (DOCS / "api").glob("*.md") for name in re.findall(r"^::: decisionheads\.(\w+)", page.read_text(), re.MULTILINE)}
    assert {room for floor in FLOORS for room in floor if not room.startswith("_")} - shown == {"cli", "words"}


def commands(group=None, before: str = "") -> dict[str, set[str]]:
    """Every command with its options, groups among them."""
    group = group or typer.main.get_command(app)
    found: dict[str, set[str]] = {}
    for name, command in group.commands.items():
        found[before + name] = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
        if hasattr(command, "commands"):
            found |= commands(command, f"{before}{name} ")
    return found


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_every_command_and_option_exists(page):
    known = commands()
    # code in a line, or a line of a block that begins with a program; the `\` at the end of a line goes on
    text = page.read_text().replace("\\\n", " ")
    code = [*re.findall(r"`([^`\n]+)`", FENCE.sub("", text)), *re.findall(r"^    (\S.*)$", text, re.MULTILINE), *(line for _, block in FENCE.findall(text) for line in block.splitlines())]
    for line in code:
        for said in re.findall(r"(?:^|&& |-m )decisionheads ([a-z][^&|;#]*)", line.strip()):
            words = said.split()
            name = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
            assert name in known, said
            for option in re.findall(r"(?<!\S)--[a-z][\w-]*", said):
                assert option in known[name], f"{name} has no {option}"


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_python_blocks_compile(page):
    for language, block in FENCE.findall(page.read_text()):
        if language in ("python", "py"):
            compile(block, name_of(page), "exec") if not block.rstrip().endswith('"""') else compile(block + "    ...\n", name_of(page), "exec")


def imported(block: str):
    for node in ast.walk(ast.parse(block if not block.rstrip().endswith('"""') else block + "    ...\n")):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "decisionheads":
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_what_blocks_import_is_there(page):
    from importlib import import_module

    for language, block in FENCE.findall(page.read_text()):
        for module, name in imported(block) if language in ("python", "py") else ():
            there = import_module(module)
            if not hasattr(there, name):
                import_module(f"{module}.{name}")


def sentences() -> set[str]:
    """Every text of the code, with `…` for what is filled in."""
    found = set()
    for path in (ROOT / "decisionheads").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_errors_are_quoted_as_they_are_said():
    quoted = re.findall(r"^\| `([^`]+)` \|", (DOCS / "errors.md").read_text(), re.MULTILINE)
    known = sentences()
    assert len(quoted) >= 50 and len(set(quoted)) == len(quoted)
    assert [q for q in quoted if q not in known] == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_says_the_same_things_in_the_same_order(verb):
    title, box = (DOCS / f"{verb}.md").read_text().split("\n\n")[:2]
    assert title.startswith("# ") and box == '<div class="verb" markdown>'
    table = (DOCS / f"{verb}.md").read_text().split("\n\n")[2]
    rows = re.findall(r"^\| \*\*(\w+)\*\* \| (.+) \|$", table, re.MULTILINE)
    assert [name for name, _ in rows] == BOX and all(len(said) > 5 for _, said in rows)
