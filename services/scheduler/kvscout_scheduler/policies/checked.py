"""A policy as the scheduler calls it: what it raises or answers wrongly is the error of one request, no other's."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from math import isnan
from random import Random
from typing import Any, TypeVar

from kvscout_common.errors import InternalError, KvscoutError
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_scheduler.costs.choose import is_ranked
from kvscout_scheduler.policies.candidates import Candidates
from kvscout_scheduler.policies.policy import Policy

T = TypeVar("T")

_warnings = RateLimitedLog(logging.getLogger("kvscout.scheduler"))
"""A policy that fails, fails each request."""


class CheckedPolicy:
    """A policy, with its answers checked.

    What it is asked raises InternalError with the policy's name where the policy raises anything but an error that it
    means for the caller (`KvscoutError`), or answers what cannot be; what it is told raises nothing, as nobody is there
    to blame. The traceback is logged, at most once a minute.

    Args:
        name: Of the policy.
        make: Makes it.
    """

    def __init__(self, name: str, make: Callable[[], Policy]) -> None:
        self._name = name
        try:
            self._policy = make()
        except KvscoutError:
            raise
        except Exception as error:
            raise self._blamed(error) from error
        listening = {what: getattr(self._policy, what, None) for what in ("booked", "prefill_completed", "ended")}
        self.observes = any(map(callable, listening.values()))
        """Whether it wants to be told of anything."""
        self.booked, self.prefill_completed, self.ended = (self._telling(*each) for each in listening.items())
        """See `Observer`."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """See `Policy`."""
        # Asked by every request, as `pick` is: without a call more than it takes.
        try:
            given = self._policy.costs(candidates)
            return given if is_ranked(given) else _column(given, candidates)
        except KvscoutError:
            raise
        except Exception as error:
            raise self._blamed(error) from error

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        """See `Policy`."""
        try:
            return _index(self._policy.pick(candidates, costs, rng), candidates)
        except KvscoutError:
            raise
        except Exception as error:
            raise self._blamed(error) from error

    def probabilities(self, candidates: Candidates, costs: Sequence[float]) -> Sequence[float]:
        """See `Policy`."""
        return self._asked(_column, self._policy.probabilities, candidates, costs)

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        """See `Policy`."""
        return self._asked(_text, self._policy.reason, candidates, costs, index)

    def _asked(
        self, check: Callable[[Any, Candidates], T], ask: Callable[..., Any], candidates: Candidates, *more: Any
    ) -> T:
        try:
            return check(ask(candidates, *more), candidates)
        except KvscoutError:
            raise
        except Exception as error:
            raise self._blamed(error) from error

    def _blamed(self, error: Exception) -> InternalError:
        _warnings.warning(self._name, "policy %s failed a request", self._name, error=error)
        return InternalError(f"policy {self._name!r} failed: {type(error).__name__}")

    def _telling(self, what: str, listen: Any) -> Callable[..., None]:
        """How it is told of something: every request has this done three times."""
        if not callable(listen):
            return lambda *_: None

        def tell(*facts: object) -> None:
            try:
                listen(*facts)
            except Exception as error:
                name = (self._name, what)
                _warnings.warning(name, "policy %s failed when it was told: %s", self._name, what, error=error)

        return tell


def _column(given: Sequence[float], candidates: Candidates) -> Sequence[float]:
    """A column of plain floats, one a candidate, none NaN; what stays native is known to be so."""
    if is_ranked(given):
        return given
    column = list(map(float, given))
    if len(column) != len(candidates):
        raise ValueError(f"{len(column)} numbers for {len(candidates)} candidates")
    # Two infinite costs of either sign add up to NaN, too.
    if isnan(sum(column)) and any(map(isnan, column)):
        raise ValueError("NaN among the numbers")
    return column


def _index(given: int, candidates: Candidates) -> int:
    index = operator.index(given)
    if not 0 <= index < len(candidates):
        raise ValueError(f"picked {index} of {len(candidates)} candidates")
    return index


def _text(given: str, _: Candidates) -> str:
    if not isinstance(given, str):
        raise TypeError(f"a reason is text, not {type(given).__name__}")
    return given
