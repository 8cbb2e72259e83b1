"""The evidence flip in numbers: differences of flip rates, and how small a difference could be found. Arrays only.

    D = P(flip | own evidence edited) - P(flip | the same edit of another's)       means over documents

tested and bounded over documents as in `alignment.paired`. The *detectable effect* is the smallest true D that the test finds
with a given power: (z(1 - a/2) + z(power)) sqrt(v / documents), with a the level divided by the number of tests (a bound on
Holm's) and v the variance of a document's D. Before a run v is stated, or taken *blinded* from an earlier one: the mean of
the squared D of documents, which is the same whichever of the two edits is called the control. It holds the square of D itself, so it
errs to the safe side, by little where D is small.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from ..evidence.alignment import DRAWS, Paired, by_document, paired

Array = np.ndarray
NOTHING = "no improvement detected"


def difference(own: Float[Array, " case"], control: Float[Array, " case"], documents: Int[Array, " case"], *, most: float = 1.0, draws: int = DRAWS, seed: int = 0) -> Paired:
    """D with its interval and p-value.

    Where all documents have the same D a bootstrap knows no doubt; then the interval is that of a share of documents, none
    of which was otherwise: `D -/+ most (1 - .025^(1 / documents))`, exact for a document that is as far off as it can be.

    Args:
        own: flips, 1 or 0; or D of one arm.
        control: the same of the control edit; or D of the other arm.
        most: the largest D there can be: 1, or 2 between arms.
    """
    found = paired(own, control, documents, draws=draws, seed=seed)
    if found.documents and found.difference_high - found.difference_low < 1e-12:
        doubt = most * (1 - 0.025 ** (1 / found.documents))
        return replace(found, difference_low=max(-most, found.difference - doubt), difference_high=min(most, found.difference + doubt))
    return found


def blinded_variance(differences: Float[Array, " case"], documents: Int[Array, " case"]) -> float:
    """Mean squared D of documents: not changed by the sign of any, at least as large as the variance. NaN without cases.

    Never under 1 / documents, as if one document had flipped: that nothing happened in a few is no knowledge that nothing can.
    """
    there = np.isfinite(differences)
    means = by_document(differences[there][:, None], documents[there])[:, 0]
    return max(float((means**2).mean()), 1 / len(means)) if len(means) else float("nan")


def detectable_effect(variance: float, documents: int, *, alpha: float = 0.05, power: float = 0.8, tests: int = 1) -> float:
    """The smallest true D that a two-sided test finds with a power; NaN without documents."""
    from scipy.stats import norm

    return float((norm.ppf(1 - alpha / tests / 2) + norm.ppf(power)) * np.sqrt(variance / documents)) if documents else float("nan")


def verdict(found: Paired, corrected: float, detectable: float, smallest: float, alpha: float = 0.05) -> str:
    """What a difference says, with its interval and the detectable effect.

    Args:
        found: the difference, its `other` side being the control or the first arm.
        corrected: its p-value after Holm.
        detectable: see the module.
        smallest: the smallest effect of interest, as registered.
    """
    if not found.documents:
        return f"{NOTHING}: no case could be compared"
    interval = f"{found.difference:+.3f} [{found.difference_low:+.3f}, {found.difference_high:+.3f}], p = {corrected:.4f}, detectable effect {detectable:.3f}"
    if corrected <= alpha:
        return f"{'more' if found.difference > 0 else 'fewer'} flips, {interval}"
    bound = f"an effect of {smallest:g} or more is outside of the interval" if found.difference_high < smallest else f"an effect of {smallest:g} is not excluded"
    return f"{NOTHING}, {interval}; {bound}"
