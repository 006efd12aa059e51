"""`online-ttft`: the worker with the least TTFT, as a regression predicts it that learns while it routes.

The idea is Lodestar's (https://arxiv.org/abs/2606.00946): an online predictor of a request's TTFT on each instance, out
of what the instance does and what the request is. The predictor here is a small one ::

    TTFT(w) = scale(w) · θ · (1, uncached tokens, active prefill tokens, active requests, active decode blocks)

θ is that of the pool, by recursive least squares that forgets (`FORGETS`), over errors relative to the TTFT, so that a
long prompt counts no more than a short one. scale(w) is the mean of observed / predicted TTFT of a worker, so that a
slow one is learned within some tens of requests. It begins with a guess and learns with each first token.

It leaves out what the paper has beside this: a nonlinear model, engines' own metrics, exploration, other rewards than
TTFT, and training apart from routing. Like the paper's, it looks at the request's own TTFT, not at what others wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from random import Random
from typing import Final

from kvscout_scheduler.policies import Candidates
from kvscout_scheduler.policies.policy import Policy
from kvscout_scheduler.values.reservation import End, Reservation

FIRST_GUESS: Final = (0.02, 50e-6, 50e-6, 0.5e-3, 0.0)
"""Seconds, as of a pool of which nothing is known (`first_rates.UNKNOWN`)."""
SCALES: Final = (1.0, 1e3, 1e4, 10.0, 1e3)
"""Usual sizes of the features: they are divided by them."""
FORGETS: Final = 0.998
"""Weight of a request's observation when the next one comes."""
TRUST: Final = 0.1
"""Variance of the first guess, in units of a relative error of 1."""
LEAST_SECONDS: Final = 1e-3
"""Of a prediction."""
OF_WORKER: Final = 0.05
"""Weight of a new observation in the scale of its worker."""
MOST_OPEN: Final = 10_000
"""Requests without a first token that are remembered."""


class Regression:
    """Recursive least squares of relative errors, with forgetting."""

    def __init__(self) -> None:
        size = len(FIRST_GUESS)
        self.weights = [guess * scale for guess, scale in zip(FIRST_GUESS, SCALES, strict=True)]
        self._spread = [[TRUST if row == column else 0.0 for column in range(size)] for row in range(size)]

    def predict(self, features: Sequence[float]) -> float:
        """Return seconds, at least `LEAST_SECONDS`."""
        return max(LEAST_SECONDS, sum(map(float.__mul__, self.weights, features)))

    def learn(self, features: Sequence[float], seconds: float) -> None:
        """Take an observation."""
        # An error counts relative to what was observed: features and target are divided by it.
        x = [feature / seconds for feature in features]
        spread = self._spread
        along = [sum(map(float.__mul__, row, x)) for row in spread]
        total = FORGETS + sum(map(float.__mul__, along, x))
        error = 1.0 - sum(map(float.__mul__, self.weights, x))
        self.weights = [weight + error * gain / total for weight, gain in zip(self.weights, along, strict=True)]
        self._spread = [
            [(value - gain * other / total) / FORGETS for value, other in zip(row, along, strict=True)]
            for row, gain in zip(spread, along, strict=True)
        ]
        if sum(row[at] for at, row in enumerate(self._spread)) > len(x) * TRUST:
            # What nothing observed for long must not grow without end.
            self._spread = [[FORGETS * value for value in row] for row in self._spread]


class OnlineTtft(Policy):
    """See the module."""

    unit = "s"

    def __init__(self) -> None:
        self._pool = Regression()
        self._worker_scale: dict[str, float] = {}
        self._open: OrderedDict[str, list[float]] = OrderedDict()
        """Features of requests that have no first token, by request id."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        scales = (self._worker_scale.get(rank.worker_id, 1.0) for rank in candidates.ranks)
        return [
            scale * self._pool.predict(features) for scale, features in zip(scales, _features(candidates), strict=True)
        ]

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        index = super().pick(candidates, costs, rng)
        if candidates.books and candidates.request.charge_prefill:
            self._open[candidates.request.request_id] = _features(candidates)[index]
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        return index

    def booked(self, reservation: Reservation, now: float) -> None:
        """Nothing is learned from it."""

    def prefill_completed(self, reservation: Reservation, ttft_seconds: float, now: float) -> None:
        """Learn from a first token."""
        features = self._open.pop(reservation.key.request_id, None)
        if features is None or reservation.running or reservation.estimates_prefill or ttft_seconds <= 0:
            return
        worker = reservation.rank.worker_id
        scale = self._worker_scale.get(worker, 1.0)
        ratio = min(10.0, ttft_seconds / self._pool.predict(features))
        self._worker_scale[worker] = scale + OF_WORKER * (ratio - scale)
        self._pool.learn(features, max(LEAST_SECONDS, ttft_seconds / scale))

    def ended(self, reservation: Reservation, end: End, now: float) -> None:
        """Forget a request that had no first token."""
        self._open.pop(reservation.key.request_id, None)


def _features(candidates: Candidates) -> list[list[float]]:
    request = candidates.request
    columns = zip(
        candidates.cached_tokens,
        candidates.active_prefill_tokens,
        candidates.active_requests,
        candidates.active_decode_blocks,
        strict=True,
    )
    isl = request.isl_tokens if request.charge_prefill else 0
    rows = ((1.0, max(0.0, isl - cached), ahead, active, blocks) for cached, ahead, active, blocks in columns)
    return [[value / scale for value, scale in zip(row, SCALES, strict=True)] for row in rows]
