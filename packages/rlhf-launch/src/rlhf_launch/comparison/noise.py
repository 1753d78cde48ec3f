"""Whether one series of a metric lies beside others by more than their noise: scales, effective sizes, tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]

_FEWEST = 5
"""Effectively independent steps below which nothing is said of a pair of runs."""
_ONE_SIDED_95 = 1.645
_MOST = 0.99
"""No estimate of an autocorrelation is taken for more."""
_MAD_TO_STD = 1.4826
"""Median absolute deviation to standard deviation, of a normal distribution."""


def step_noise(values: Series) -> float:
    """The standard deviation of a metric around its own course, from step to step; 0 for fewer than three steps.

    The residuals are `(x[t-1] + x[t+1]) / 2 - x[t]`, in which a smooth trend cancels; their variance is 3/2 of the
    noise's (Gasser, Sroka and Jennen-Steinmetz 1986, "Residual variance and residual pattern in nonlinear
    regression"). Their scale is taken by the median, which a few jumps leave alone, and where more than half of
    them are 0 by the mean square.

    >>> round(step_noise(np.array([1.0, 2.0, 3.0, 4.0, 5.0])), 12)
    0.0
    """
    if len(values) < 3:
        return 0.0
    residuals = ((values[:-2] + values[2:]) / 2 - values[1:-1]) * math.sqrt(2 / 3)
    robust = _MAD_TO_STD * float(np.median(np.abs(residuals)))
    return robust if robust > 0 else float(np.sqrt(np.mean(residuals**2)))


def autocorrelation(values: Sequence[Series]) -> float:
    """How strongly neighbours hang together, at least 0 and rather too much, over series each around its own mean.

    The estimate around an estimated mean is too small by about (1 + 4 rho) / n (Kendall 1954, "Note on bias in the
    estimation of autocorrelation"), which is put back. What is returned is the upper end of a one-sided interval of
    95% by Fisher's transformation: an autocorrelation that is underestimated makes noise look like a change, most
    of all in runs of a few dozen steps.
    """
    centred = [series - series.mean() for series in values]
    total = sum(float(series @ series) for series in centred)
    length = sum(len(series) for series in centred) / len(centred)
    if total == 0 or length < _FEWEST:
        return 0.0
    found = sum(float(series[1:] @ series[:-1]) for series in centred) / total
    found = min(max((found + 1 / length) / (1 - 4 / length), 0.0), _MOST)
    return min(math.tanh(math.atanh(found) + _ONE_SIDED_95 / math.sqrt(length * len(centred))), _MOST)


def effective_size(steps: int, rho: float) -> float:
    """Of how many independent values the mean of correlated ones is as good: `n (1 - rho) / (1 + rho)` (Bayley and
    Hammersley 1946, "The effective number of independent observations in an autocorrelated time series").

    >>> effective_size(30, 0.0), round(effective_size(30, 0.5), 12)
    (30.0, 10.0)
    """
    return max(1.0, steps * (1 - rho) / (1 + rho))


def paired_p(differences: Series) -> float:
    """Probability of differences as one-sided as these between two runs of equal course.

    Wilcoxon's signed-rank test, as the t test of the signed ranks (Conover and Iman 1981, "Rank transformations as
    a bridge between parametric and nonparametric statistics"), with the effective number of steps in place of their
    number, since a step's difference lives on in the next (Zwiers and von Storch 1995, "Taking serial correlation
    into account in tests of the mean"). Steps without a difference say nothing. 1 if there are too few others.
    """
    found = differences[differences != 0]
    if len(found) < _FEWEST:
        return 1.0
    ranks = np.sign(found) * _ranks(np.abs(found))
    size = effective_size(len(ranks), autocorrelation([ranks]))
    if size < _FEWEST:
        return 1.0
    deviation = float(ranks.std(ddof=1))
    if deviation == 0:  # one and the same difference everywhere
        return 2.0 ** (1 - len(ranks))
    return two_sided_t(float(ranks.mean()) / deviation * math.sqrt(size), int(size - 1))


def band_p(candidate: Series, baselines: NDArray[np.float64]) -> float:
    """Probability of a mean as far as this from the mean of several baseline runs.

    A t test of the run's mean against the baselines' means, with one degree of freedom less than there are
    baselines. Its variance is that between the baselines, or what the noise within them explains, whichever is
    larger: runs that keep their distance from each other (other seeds, other paths) are no news, however many steps
    they have, and a few baselines that lie close together by chance prove nothing either.

    Args:
        candidate: [steps] the run in question.
        baselines: [runs, steps] at least two others.
    """
    runs, steps = baselines.shape
    means = baselines.mean(axis=1)
    variance = float(means.var(ddof=1))
    if steps > 1:
        rests = baselines - baselines.mean(axis=0) - (means - means.mean())[:, None]
        size = effective_size(steps, autocorrelation(list(rests)))
        variance = max(variance, float((rests**2).sum()) / ((runs - 1) * (steps - 1)) / size)
    distance = float(candidate.mean() - means.mean())
    if variance == 0:
        return 1.0 if distance == 0 else 0.0
    return two_sided_t(distance / math.sqrt(variance * (1 + 1 / runs)), runs - 1)


def holm(probabilities: Mapping[str, float]) -> dict[str, float]:
    """The probabilities corrected for their number: those below a limit are wrong altogether with at most that
    probability, however the metrics hang together (Holm 1979, "A simple sequentially rejective multiple test
    procedure").

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    corrected, highest = {}, 0.0
    ordered = sorted(probabilities.items(), key=lambda item: item[1])
    for place, (name, probability) in enumerate(ordered):
        highest = max(highest, min(1.0, probability * (len(ordered) - place)))
        corrected[name] = highest
    return corrected


def two_sided_t(t: float, freedom: int) -> float:
    """P(|T| > |t|) for Student's t with a whole number of degrees of freedom (Abramowitz and Stegun, 26.7.3 and
    26.7.4); from 200 on the normal distribution stands in.

    >>> round(two_sided_t(2.228, 10), 3), round(two_sided_t(12.706, 1), 3), round(two_sided_t(1.96, 10_000), 3)
    (0.05, 0.05, 0.05)
    """
    t = abs(t)
    if freedom >= 200:
        return math.erfc(t / math.sqrt(2))
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for power in range(2 + odd, freedom - 1, 2):
        term *= (power - 1) / power * cosine**2
        total += term
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return min(1.0, max(0.0, 1.0 - inside))


def _ranks(values: Series) -> Series:
    """Ranks from 1 on; equal values share the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[places].astype(np.float64)
