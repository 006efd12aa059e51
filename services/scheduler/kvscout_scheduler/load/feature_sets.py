"""Slots that have the labels or the adapter that a request requires: cached sets, as few requests differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from kvscout_common.worker import REVISION, WorkerRank, WorkerSpec
from kvscout_scheduler.values.slot_sets import large_slot_set

Feature: TypeAlias = frozenset[tuple[str, str]] | str
"""Labels, all of them; or the name of an adapter."""

MAX_FEATURES: Final = 256
"""Sets cached for one pool; the least recently used one makes room."""


class FeatureSets:
    """The slots that have a feature.

    Args:
        ranks: By slot.
        specs: By slot.
    """

    def __init__(self, ranks: Sequence[WorkerRank], specs: Sequence[WorkerSpec]) -> None:
        self._ranks = ranks
        self._specs = specs
        self._cached: dict[Feature, int] = {}
        self._by_revision: dict[str, int] | None = None

    def having(self, feature: Feature, order: Sequence[int]) -> int:
        """Return the set of those that have it.

        Args:
            feature: What they have.
            order: All slots that count.
        """
        found = self._cached.pop(feature, None)
        if found is None:
            specs = self._specs
            found = large_slot_set((slot for slot in order if _has(specs[slot], feature)), len(self._ranks))
            if len(self._cached) >= MAX_FEATURES:
                del self._cached[next(iter(self._cached))]
        self._cached[feature] = found
        return found

    def by_revision(self, order: Sequence[int]) -> dict[str, int]:
        """Return the sets of each revision; "" = those without the label.

        Args:
            order: All slots that count.
        """
        if self._by_revision is None:
            slots: dict[str, list[int]] = {}
            for slot in order:
                slots.setdefault(self._specs[slot].labels.get(REVISION, ""), []).append(slot)
            self._by_revision = {name: large_slot_set(each, len(self._ranks)) for name, each in slots.items()}
        return self._by_revision

    def described(self, spec: WorkerSpec, slots: int) -> None:
        """Update the sets by another registration of some slots."""
        for feature, found in self._cached.items():
            self._cached[feature] = found | slots if _has(spec, feature) else found & ~slots
        self._by_revision = None

    def forget(self) -> None:
        """Forget all sets: other workers are registered now."""
        self._cached.clear()
        self._by_revision = None


def _has(spec: WorkerSpec, feature: Feature) -> bool:
    if isinstance(feature, str):
        return any(adapter.name == feature for adapter in spec.adapters)
    return feature <= spec.labels.items()
