"""decisionheads: which attention heads decide what a language model writes.

Everything public is listed here and loaded when it is first used.
"""

from importlib import import_module

__version__ = "0.1.0"

_WHERE = {
    "Head": "heads", "HeadSet": "heads", "HeadScores": "heads",
    "LabelSpace": "labels",
    "Transcript": "transcripts", "Span": "transcripts", "load_transcripts": "transcripts",
    "save_transcripts": "transcripts", "from_dataset": "transcripts",
    "DecisionEvent": "decisions", "Events": "decisions", "find_events": "events", "find_closers": "events",
    "Margin": "margin", "fix_margin": "margin",
    "MeanAblate": "interventions", "Keep": "interventions", "KnockIn": "interventions", "AddToZ": "interventions", "BlockReads": "interventions",
    "DecisionModel": "model",
    "reference_means": "ablation", "mean_ablate": "ablation",
    "attribute": "attribution",
    "discover": "discovery", "compare": "comparison",
    "InputError": "errors",
}
__all__ = [*_WHERE, "tiny"]


def __getattr__(name: str):
    if name in _WHERE:
        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
    if name == "tiny":
        return import_module(".tiny", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
