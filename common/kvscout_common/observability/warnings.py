"""Warnings of a service to its operators, beside its log."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class TenantWarning(NamedTuple):
    """Warning for callers who see a tenant alone: it names a worker, or where it is."""

    tenant: str
    """"*" = for callers who see all of them."""
    text: str


Warned: TypeAlias = str | TenantWarning
"""One sentence that an operator should know; a plain one is for every caller."""


def text_of(warning: Warned) -> str:
    """Return its sentence, for the log."""
    return warning if isinstance(warning, str) else warning.text


def about(name: str, warning: Warned) -> Warned:
    """Return the same warning with what it is about in front."""
    if isinstance(warning, str):
        return f"{name}: {warning}"
    return TenantWarning(warning.tenant, f"{name}: {warning.text}")
