"""Registry of policies, and a policy as the scheduler calls it: where it fails, the default policy decides."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint
from math import isnan
from pathlib import Path
from random import Random
from traceback import walk_tb
from typing import Any, Final, TypeVar

from kvscout_common.errors import ConfigError, InternalError, InvalidArgument, KvscoutError
from kvscout_common.known_names import nearest
from kvscout_common.observability.recent_counts import RecentCounts
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.plain_text import printable
from kvscout_scheduler.costs.choose import is_ranked
from kvscout_scheduler.policies.policy import Candidates, Formula, Policy

ENTRY_POINT_GROUP: Final = "kvscout.policies"

PolicyFactory = Callable[[], Policy]

_REQUIRED = ("costs", "pick", "probabilities", "reason")

T = TypeVar("T")

MAX_ERROR: Final = 300
"""Characters of what a policy raises, as it is shown."""

_warnings = RateLimitedLog(logging.getLogger("kvscout.scheduler"))
"""A policy that fails, fails each request."""


class PolicyFailed(InternalError):
    """A policy raised, or answered what cannot be."""

    def __init__(self, policy: str, line: str) -> None:
        super().__init__(f"policy {policy!r}: {line}")
        self.policy = policy


class PolicyFailures:
    """Failures of policies."""

    def __init__(self) -> None:
        self.counts: RecentCounts[str] = RecentCounts()
        """By policy."""
        self.last: dict[str, str] = {}
        """What each raised the last time, in one line; the policy that failed last is the last one."""

    def add(self, policy: str, error: Exception, doing: str = "") -> PolicyFailed:
        """Record a failure; its traceback is logged, at most once a minute for each line that raises."""
        line = f"{doing}{_line_of(error)}"
        self.counts.add(policy)
        self.last.pop(policy, None)
        self.last[policy] = line
        _warnings.warning((policy, line), "policy %s failed: %s", policy, line, error=error)
        return PolicyFailed(policy, line)


MAX_UNIT = 32
"""Characters of the unit of a policy that are shown."""


class CheckedPolicy:
    """A policy, with its answers checked.

    A question raises PolicyFailed where the policy raises anything but an error that it means for the caller
    (`KvscoutError`), or answers what cannot be; an observer method raises nothing, as no request is there to be decided
    in its place.

    Args:
        name: Of the policy.
        make: Makes it.
        failures: Where failures are recorded.
    """

    def __init__(self, name: str, make: Callable[[], Policy], failures: PolicyFailures) -> None:
        self._name = name
        self._failures = failures
        try:
            self._policy = make()
        except KvscoutError:
            raise
        except Exception as error:
            raise self._blamed(error) from error
        # By its own class: a subclass may compute something else, and pick in another way.
        self.formula: Formula | None = vars(type(self._policy)).get("formula")
        """See `Policy`."""
        listening = {what: getattr(self._policy, what, None) for what in ("booked", "prefill_completed", "ended")}
        self.observes = any(map(callable, listening.values()))
        """True: it observes bookings."""
        self.booked, self.prefill_completed, self.ended = (self._observer(*each) for each in listening.items())
        """See `Observer`."""

    @property
    def unit(self) -> str | None:
        """See `Policy`; "" where a policy has none, or no text."""
        unit = getattr(self._policy, "unit", "")
        return unit[:MAX_UNIT] if isinstance(unit, str) else None if unit is None else ""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """See `Policy`."""
        # Called by every request, as `pick` is: without a call more than it takes.
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
        return self._checked(_column, self._policy.probabilities, candidates, costs)

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        """See `Policy`."""
        return self._checked(_text, self._policy.reason, candidates, costs, index)

    def _checked(
        self, check: Callable[[Any, Candidates], T], ask: Callable[..., Any], candidates: Candidates, *more: Any
    ) -> T:
        try:
            return check(ask(candidates, *more), candidates)
        except KvscoutError:
            raise
        except Exception as error:
            raise self._blamed(error) from error

    def _blamed(self, error: Exception) -> PolicyFailed:
        return self._failures.add(self._name, error)

    def _observer(self, what: str, listen: Any) -> Callable[..., None]:
        """Return the call of one of its observer methods: every request makes three."""
        if not callable(listen):
            return lambda *_: None

        def observe(*reservation: object) -> None:
            try:
                listen(*reservation)
            except Exception as error:
                self._failures.add(self._name, error, f"as an observer, {what}: ")

        return observe


def _line_of(error: Exception) -> str:
    """Return what was raised and where, in one line: the deepest line of the file that the policy was called in."""
    try:
        text = str(error)
    except Exception:  # the exception is the policy's, too
        text = ""
    frames = [(frame.f_code.co_filename, number) for frame, number in walk_tb(error.__traceback__)]
    called = next((file for file, _ in frames if file != __file__), "")
    place = next((f" ({Path(file).name}:{number})" for file, number in reversed(frames) if file == called), "")
    head = type(error).__name__
    return printable(f"{head}: {text}" if text else head, MAX_ERROR) + printable(place)


def _column(given: Sequence[float], candidates: Candidates) -> Sequence[float]:
    """Return a column of plain floats, one a candidate, none NaN; what stays native is known to be so."""
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


class PolicyRegistry:
    """The known policies.

    Args:
        builtin: Policies of this package, by name.
        installed: Entry points of other packages; loaded here.

    Raises:
        ConfigError: If another package takes the name of a policy that is there, or its policy cannot be loaded, made,
            or lacks a method.
    """

    def __init__(self, builtin: Mapping[str, PolicyFactory], installed: Iterable[EntryPoint] = ()) -> None:
        self.failures = PolicyFailures()
        self._factories = dict(builtin)
        for entry_point in installed:
            if entry_point.name in self._factories:
                raise ConfigError(f"{entry_point.value} takes a name that is there already", field=entry_point.name)
            self._factories[entry_point.name] = _loaded(entry_point)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all policies, in alphabetical order."""
        return tuple(sorted(self._factories))

    def check(self, name: str) -> None:
        """Check that a policy exists.

        Raises:
            InvalidArgument: If it does not; the message names those that do.
        """
        if name not in self._factories:
            meant = nearest(name, self.names)
            known = f"; did you mean {meant!r}? Known are" if meant else ", known are"
            raise InvalidArgument(f"unknown policy {name!r}{known} {', '.join(self.names)}", field="policy")

    def create(self, name: str) -> CheckedPolicy:
        """Return a new instance of a policy.

        Raises:
            InvalidArgument: If it does not exist.
            PolicyFailed: If it cannot be made.
        """
        self.check(name)
        return CheckedPolicy(name, self._factories[name], self.failures)


def _loaded(entry_point: EntryPoint) -> PolicyFactory:
    try:
        factory: PolicyFactory = entry_point.load()
        policy = factory()
    except Exception as error:
        # Whatever another package does when it is imported.
        raise ConfigError(
            f"{entry_point.value} cannot be loaded as a policy: {type(error).__name__}: {error}", field=entry_point.name
        ) from error
    missing = [name for name in _REQUIRED if not callable(getattr(policy, name, None))]
    if missing:
        raise ConfigError(
            f"{entry_point.value} is not a policy: it has no {', '.join(missing)}", field=entry_point.name
        )
    return factory
