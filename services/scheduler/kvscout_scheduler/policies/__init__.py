"""Selection policies by name; packages add theirs through entry points of the group `kvscout.policies`.

A policy is a class without constructor arguments (`Policy`, or anything with its first methods); every pool has its own
instance of it. What it raises fails the one request that met it (`registry`); one that cannot be loaded fails at start.
In another package::

    [project.entry-points."kvscout.policies"]
    fewest-tokens = "my_package.policies:FewestTokens"
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType

from kvscout_scheduler.policies.builtin import BUILTIN
from kvscout_scheduler.policies.kv_time import KvTime
from kvscout_scheduler.policies.policy import Candidates, Policy
from kvscout_scheduler.policies.registry import ENTRY_POINT_GROUP, CheckedPolicy, PolicyFactory, PolicyRegistry
from kvscout_scheduler.values.reservation import Observer

__all__ = [
    "ENTRY_POINT_GROUP",
    "Candidates",
    "CheckedPolicy",
    "Observer",
    "Policy",
    "PolicyFactory",
    "PolicyRegistry",
    "installed_policies",
]


def installed_policies(more: Mapping[str, PolicyFactory] = MappingProxyType({})) -> PolicyRegistry:
    """Return the registry of this package's policies and those of every installed package.

    Args:
        more: Further ones of the caller's own, by name.
    """
    return PolicyRegistry({**BUILTIN, "kv-time": KvTime, **more}, entry_points(group=ENTRY_POINT_GROUP))
