"""The explorer: one decision, its heads and what they read, in a notebook.

    from decisionheads.explorer import Explorer
    Explorer(model, readings[40:], means, families={"region": HeadSet(["L1H4"]), "near-miss": HeadSet(["L1H7"])})

`bench` answers with numbers, `page` writes them as HTML, `live` makes that HTML answer to clicks.
"""

from .bench import Alternative, Bench, Outcome
from .explore import Explorer

__all__ = ["Alternative", "Bench", "Explorer", "Outcome"]
