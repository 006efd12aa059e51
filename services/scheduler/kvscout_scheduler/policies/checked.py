"""A policy as the scheduler calls it: what it raises or answers wrongly is the error of one request, no other's."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from math import isnan
from random import Random
from typing import TYPE_CHECKING

from kvscout_common.errors import InternalError, KvscoutError
from kvscout_common.telemetry import RateLimitedLog
from kvscout_scheduler.candidates import Candidates
from kvscout_scheduler.choose import Ranked

if TYPE_CHECKING:
    from kvscout_scheduler.policies import Policy

_warnings = RateLimitedLog(logging.getLogger("kvscout.scheduler"))
"""A policy that fails, fails each request."""


class CheckedPolicy:
    """A policy, with its answers checked.

    Every method raises InternalError with the policy's name where the policy raises anything but an error that it means
    for the caller (`KvscoutError`), or answers what cannot be; the traceback is logged, at most once a minute.

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

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """See `Policy`."""
        try:
            return _columns("costs", self._policy.costs(candidates), candidates)
        except KvscoutError:
            raise
        except Exception as error:
            raise self._blamed(error) from error

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        """See `Policy`."""
        try:
            index = operator.index(self._policy.pick(candidates, costs, rng))
            if not 0 <= index < len(candidates):
                raise ValueError(f"picked {index} of {len(candidates)} candidates")
            return index
        except KvscoutError:
            raise
        except Exception as error:
            raise self._blamed(error) from error

    def probabilities(self, candidates: Candidates, costs: Sequence[float]) -> Sequence[float]:
        """See `Policy`."""
        try:
            return _columns("probabilities", self._policy.probabilities(candidates, costs), candidates)
        except KvscoutError:
            raise
        except Exception as error:
            raise self._blamed(error) from error

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        """See `Policy`."""
        try:
            reason = self._policy.reason(candidates, costs, index)
            if not isinstance(reason, str):
                raise TypeError(f"a reason is text, not {type(reason).__name__}")
            return reason
        except KvscoutError:
            raise
        except Exception as error:
            raise self._blamed(error) from error

    def _blamed(self, error: Exception) -> InternalError:
        """The error of the request."""
        _warnings.warning(self._name, "policy %s failed a request", self._name, error=error)
        return InternalError(f"policy {self._name!r} failed: {type(error).__name__}")


def _columns(name: str, given: Sequence[float], candidates: Candidates) -> Sequence[float]:
    """A column of plain floats, one a candidate, none NaN; what stays native is known to be so."""
    if isinstance(given, Ranked):
        return given
    column = list(map(float, given))
    if len(column) != len(candidates):
        raise ValueError(f"{len(column)} {name} for {len(candidates)} candidates")
    # Two infinite costs of either sign add up to NaN, too.
    if isnan(sum(column)) and any(map(isnan, column)):
        raise ValueError(f"NaN among the {name}")
    return column
