"""Options that several commands share, with what is said of them."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="print JSON for scripts instead of text")]
Caliper = Annotated[float, typer.Option(help="how near null tokens must be, in standard deviations", min=0.01)]
Device = Annotated[str | None, typer.Option(help="torch device")]
Dtype = Annotated[str, typer.Option(help="float32, float64, float16 or bfloat16")]
Longest = Annotated[int, typer.Option(help="most tokens that a student writes", min=1)]
Mark = Annotated[str, typer.Option(help="text that opens the answer, where there are no tags of a reasoner")]
Memory = Annotated[int, typer.Option(help="megabytes for one pack of rows", min=1)]
Minimum = Annotated[int, typer.Option(help="fewest reference events of a kind", min=2)]
RegionBy = Annotated[str | None, typer.Option(help="what regions are: a column of the labels file, or category, block or chapter of ICD-10-CM")]
Size = Annotated[int, typer.Option(help="heads of the set whose recovery is measured", min=1)]
Writes = Annotated[str, typer.Option("--write", help="all: a student writes reasoning and answer; answer: it answers after the reasoning that is given")]
