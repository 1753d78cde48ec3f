"""Which answers to a prompt are kept, by their scores: indices from numbers, nothing else.

Every function takes the scores of the answers that have one. What is drawn at random comes from a `random.Random`
of the caller's, so that the same seed gives the same choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random


def best_of_n(scores: Sequence[float], *, k: int = 1, draw: Random) -> list[int]:
    """The `k` answers with the highest scores of a prompt's n, the best first.

    With k = 1 this is the selection of RAFT (Dong et al. 2023, arXiv:2304.06767, step 2): y = argmax_j r(x, y_j).
    Which of equal scores come first is drawn, or the earlier sample of a prompt would be chosen more often.

    >>> best_of_n([0.1, 0.9, 0.5], k=2, draw=Random(0))
    [1, 2]
    """
    order = list(range(len(scores)))
    draw.shuffle(order)
    return sorted(order, key=lambda index: -scores[index])[:k]


def above_threshold(scores: Sequence[float], threshold: float) -> list[int]:
    """The answers with a score above the threshold: F(x, y; tau) = 1[r(x, y) > tau] (ReST, Gulcehre et al. 2023,
    arXiv:2308.08998, section 3).

    >>> above_threshold([0.0, 1.0, 0.5], 0.5)
    [1]
    """
    return [index for index, score in enumerate(scores) if score > threshold]


def quantile(scores: Sequence[float], q: float) -> float:
    """The `q`-quantile, linear between the scores: the value at place q (n - 1) of the sorted ones.

    >>> quantile([3.0, 1.0, 2.0], 0.5), quantile([1.0, 2.0], 0.25)
    (2.0, 1.25)
    """
    ordered = sorted(scores)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    # Between equal scores nothing is rounded: an answer at the quantile is not below it.
    return ordered[low] if ordered[low] == ordered[high] else _between(ordered[low], ordered[high], place - low)


def _between(low: float, high: float, share: float) -> float:
    return min(low * (1 - share) + high * share, high) if share else low


def pair_of(
    scores: Sequence[float],
    texts: Sequence[str],
    *,
    rejected: str = "worst",
    min_margin: float = 0.0,
    draw: Random,
) -> tuple[int, int] | str:
    """A preference pair (chosen, rejected) among a prompt's answers, or why there is none.

    Chosen is the answer with the highest score. Rejected is the one with the lowest (`worst`; Yuan et al. 2024,
    "Self-Rewarding Language Models", arXiv:2401.10020, section 2.3), or one drawn among those that lie at least the
    margin below the best (`random`). Both have different texts, and s_chosen - s_rejected is above 0 and at least
    `min_margin`.

    Returns:
        the indices; or `alone` (fewer than two answers), `tie` (no score lies below the best, or only that of the
        same text) or `margin` (no score lies so far below the best).
    """
    if len(scores) < 2:
        return "alone"
    chosen = best_of_n(scores, draw=draw)[0]
    below = [i for i, score in enumerate(scores) if score < scores[chosen] and texts[i] != texts[chosen]]
    if not below:
        return "tie"
    far = [index for index in below if scores[chosen] - scores[index] >= min_margin]
    if not far:
        return "margin"
    if rejected == "random":
        return chosen, far[draw.randrange(len(far))]
    lowest = min(scores[index] for index in far)
    return chosen, draw.choice([index for index in far if scores[index] == lowest])


def desirable(scores: Sequence[float], threshold: float | None = None) -> list[bool | None]:
    """Whether each answer of a prompt is good, as KTO takes it (Ethayarajh et al. 2024, arXiv:2402.01306).

    Good is a score above the threshold, or above the mean of the prompt's answers if there is none. None stands for
    an answer at that mean, which is neither.

    >>> desirable([0.0, 1.0, 0.5]), desirable([0.0, 1.0], threshold=0.5)
    ([False, True, None], [False, True])
    """
    if threshold is not None:
        return [score > threshold for score in scores]
    # Equal scores have a mean that rounding may put beside them.
    if not scores or min(scores) == max(scores):
        return [None] * len(scores)
    mean = math.fsum(scores) / len(scores)
    return [None if score == mean else score > mean for score in scores]


def quantised(scores: Sequence[float], levels: int, *, bins: str = "width") -> list[int]:
    """Each score's level, from 1 to `levels`.

    `width`: levels of equal width between the lowest and the highest score,
    level(s) = 1 + min(L - 1, floor(L (s - min) / (max - min))).
    `quantile`: about as many answers in each; with n_< scores below s and n_= equal to it,
    level(s) = 1 + floor(L (n_< + n_= / 2) / n).

    SteerLM (Dong et al. 2023, arXiv:2310.05344, section 3.2) writes attributes of an answer as such whole numbers
    into the prompt.

    >>> quantised([0.0, 0.4, 1.0], 2), quantised([0.0, 1.0, 100.0], 3, bins="quantile")
    ([1, 1, 2], [1, 2, 3])

    Raises:
        ValueError: all scores are equal, so that there are no levels.
    """
    low, high = min(scores), max(scores)
    if low == high:
        raise ValueError(f"all {len(scores)} scores are {low:g}")
    if bins == "width":
        return [1 + min(levels - 1, math.floor(levels * ((s - low) / (high - low)))) for s in scores]
    ordered = sorted(scores)
    first: dict[float, int] = {}
    counts: dict[float, int] = {}
    for place, score in enumerate(ordered):
        first.setdefault(score, place)
        counts[score] = counts.get(score, 0) + 1
    return [1 + (levels * (2 * first[s] + counts[s])) // (2 * len(scores)) for s in scores]
