"""Selection policies by name; packages add theirs through entry points of the group `kvscout.policies`.

A policy is a class without constructor arguments (`Policy`, or anything with its first methods); every pool has its own
instance of it. What it raises fails the one request that met it (`checked`); one that cannot be loaded fails at start.
In another package::

    [project.entry-points."kvscout.policies"]
    fewest-tokens = "my_package.policies:FewestTokens"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from kvscout_common.errors import ConfigError, InvalidArgument
from kvscout_scheduler.policies.builtin import BUILTIN
from kvscout_scheduler.policies.checked import CheckedPolicy
from kvscout_scheduler.policies.policy import Policy

__all__ = ["ENTRY_POINT_GROUP", "CheckedPolicy", "Policy", "PolicyFactory", "PolicyRegistry", "installed_policies"]

ENTRY_POINT_GROUP: Final = "kvscout.policies"

PolicyFactory = Callable[[], Policy]

_REQUIRED = ("costs", "pick", "probabilities", "reason")


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
        self._factories = dict(builtin)
        for entry_point in installed:
            if entry_point.name in self._factories:
                raise ConfigError(f"{entry_point.value} takes a name that is there already", field=entry_point.name)
            self._factories[entry_point.name] = _loaded(entry_point)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all policies, in alphabetical order."""
        return tuple(sorted(self._factories))

    def check(self, name: str) -> None:
        """Checks that a policy exists.

        Raises:
            InvalidArgument: If it does not; the message names those that do.
        """
        if name not in self._factories:
            raise InvalidArgument(f"unknown policy {name!r}, known are {', '.join(self.names)}", field="policy")

    def create(self, name: str) -> CheckedPolicy:
        """A new instance of a policy.

        Raises:
            InvalidArgument: If it does not exist.
            InternalError: If it cannot be made.
        """
        self.check(name)
        return CheckedPolicy(name, self._factories[name])


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
        raise ConfigError(f"{entry_point.value} is no policy: it has no {', '.join(missing)}", field=entry_point.name)
    return factory


def installed_policies() -> PolicyRegistry:
    """Registry of this package's policies and those of every installed package."""
    return PolicyRegistry(BUILTIN, entry_points(group=ENTRY_POINT_GROUP))
