"""Finding of one check about one snapshot."""

from __future__ import annotations

from typing import NamedTuple

from kvscout_common.doctor.conditions import Condition


class Symptom(NamedTuple):
    """One condition, seen in one place."""

    condition: Condition
    evidence: str
    """Subject and observation; one sentence."""
    explains: tuple[str, ...] = ()
    """Texts by which services' own warnings of the same thing are known."""
    age_seconds: float = float("inf")
    """Since what it is about was started or registered; infinity = that is no reason for it."""
    subject: str = ""
    """Subject, such as "worker vllm-0"; "" = the condition's sentence names none."""


def of_worker(worker_id: str) -> tuple[str, ...]:
    """Return how warnings about a worker are known."""
    return (f"worker {worker_id}:", f"worker {worker_id}/", f"worker {worker_id} ")
