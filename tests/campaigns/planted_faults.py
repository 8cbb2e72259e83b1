"""Does the test suite notice? Plants one fault at a time in a copy of the checkout and runs the tests that must fail.

    python tests/campaigns/planted_faults.py [--only NAME] [--list] [--sample SECONDS] [--write docs/planted_faults.md]

A fault is one exact replacement in one module (`faults.py`); where the text is not found exactly once the fault has gone
stale, and the program stops with a sentence. At the end the tests that caught a fault are run without any: one that
fails then has caught nothing. Exit code 1 if a fault survives. `--sample` takes faults in a seeded order and starts no new
one when the time is up.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from faults import FAULTS, Fault  # noqa: E402

ROOT = Path(__file__).parent.parent.parent
COPIED = ("decisionheads", "tests", "docs", "pyproject.toml", "mkdocs.yml", "README.md")
LONGEST = 300  # seconds for the tests of one fault


def copy_to(folder: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)


def planted(fault: Fault, text: str) -> str:
    """A module with the fault in it.

    Raises:
        SystemExit: where the text to replace does not stand there exactly once.
    """
    found = text.count(fault.right)
    if found != 1:
        raise SystemExit(f"{fault.name}: {fault.right!r} stands {found} times in decisionheads/{fault.file} and not once; mend the fault in tests/campaigns/faults.py")
    return text.replace(fault.right, fault.wrong)


def failing(folder: Path, tests: tuple[str, ...], stop: bool = True) -> tuple[list[str], str]:
    """Which tests fail in a checkout, and the last of what was printed."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *(["-x"] if stop else []), *tests]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LONGEST, env=os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"})
    said = done.stdout + done.stderr
    found = re.findall(r"^(?:FAILED|ERROR) (tests/\S+?::\w+)", said, re.MULTILINE)
    if done.returncode not in (0, 1) or done.returncode == 1 and not found:
        raise SystemExit(f"pytest could not run {' '.join(tests)}: {said.strip()[-500:]}")
    return list(dict.fromkeys(found)), said


def page(rows: list[tuple[Fault, str]], seconds: float) -> str:
    lines = ["# Planted faults", "", "A test is worth what it can catch. Each fault below is planted in a copy of the code, one at a time, and a few tests are run: one must fail.",
             "", "    python tests/campaigns/planted_faults.py --write docs/planted_faults.md", "",
             f"{len(rows)} faults, {sum(bool(test) for _, test in rows)} caught; {seconds / 60:.0f} minutes, one after the other. The code of each is in `tests/campaigns/faults.py`, as an exact replacement: a fault that no longer",
             "fits the code stops the program, so that none goes stale. The tests that caught something pass without the fault.", "", "| fault | what is then wrong | planted in | caught by |", "|---|---|---|---|"]
    for fault, test in rows:
        file, _, name = test.partition("::")
        lines.append(f"| {fault.name} | {fault.what} | `{fault.file}` | {f'`{name}` in `{Path(file).name}`' if test else '**nothing**'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="NAME", help="one fault")
    parser.add_argument("--list", action="store_true", help="name the faults and run nothing")
    parser.add_argument("--sample", metavar="SECONDS", type=float, help="faults in a seeded order, until the time is up")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--write", metavar="PAGE", type=Path, help="write the table as a page")
    asked = parser.parse_args()
    faults = [f for f in FAULTS if asked.only in (None, f.name)]
    if not faults:
        raise SystemExit(f"there is no fault {asked.only!r}; --list names them")
    for fault in faults:
        planted(fault, (ROOT / "decisionheads" / fault.file).read_text())
    if asked.list:
        print("\n".join(f"{f.name}: {f.what} ({f.file})" for f in faults))
        return 0
    if asked.sample is not None:
        random.Random(asked.seed).shuffle(faults)
    begin, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        copy_to(folder)
        for fault in faults:
            if asked.sample is not None and time.monotonic() - begin > asked.sample:
                break
            module, started = folder / "decisionheads" / fault.file, time.monotonic()
            clean = module.read_text()
            module.write_text(planted(fault, clean))
            try:
                caught, _ = failing(folder, fault.tests)
            finally:
                module.write_text(clean)
            rows.append((fault, caught[0] if caught else ""))
            print(f"{'caught' if caught else 'SURVIVED':9}{time.monotonic() - started:5.0f} s  {fault.name:36} {caught[0] if caught else ', '.join(fault.tests)}", flush=True)
        broken, said = failing(folder, tuple(dict.fromkeys(test for _, test in rows if test)), stop=False) if any(test for _, test in rows) else ([], "")
    seconds = time.monotonic() - begin
    if broken:
        print(f"these tests fail without any fault, so they caught nothing: {', '.join(broken)}\n{said[-2000:]}")
    survived = [fault.name for fault, test in rows if not test or test in broken]
    print(f"{len(rows)} of {len(faults)} faults planted in {seconds:.0f} s; {f'not caught: {survived}' if survived else 'all caught'}")
    if asked.write is not None:
        asked.write.write_text(page(rows, seconds))
    return 1 if survived else 0


if __name__ == "__main__":
    raise SystemExit(main())
