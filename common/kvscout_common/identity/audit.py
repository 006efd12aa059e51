"""The audit log: who changed what others get, and what came of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

from kvscout_common.errors import InternalError, KvscoutError
from kvscout_common.identity.identity import AccessRole, Identity

log = logging.getLogger("kvscout.audit")


async def audited(method: str, message: Any, identity: Identity, running: Awaitable[Any]) -> Any:
    """Run a call, and write its line when it is over.

    Args:
        method: Its full name.
        message: What is asked.
        identity: Who asks.
        running: What does it.

    Returns:
        Its answer.

    Raises:
        Exception: As it does.
    """
    outcome = "OK"
    try:
        return await running
    except KvscoutError as error:
        outcome = type(error).__name__
        raise
    except asyncio.CancelledError:
        outcome = "Cancelled"
        raise
    except BaseException:
        outcome = InternalError.__name__
        raise
    finally:
        # Whoever may do everything is not kept from being seen by doing it often.
        log.info(
            "%s by %s (%s of tenant %s)%s: %s",
            method.rpartition("/")[2],
            identity.name or "an unnamed token",
            identity.role,
            identity.tenant,
            _subject(message),
            outcome,
            extra={"unlimited": identity.role is AccessRole.ADMIN},
        )


def _subject(message: Any) -> str:
    """Return what the call is about, as far as its message names it."""
    worker = getattr(message, "worker", message)
    named = {
        name: value
        for name in ("tenant", "model", "worker_id")
        if isinstance(value := getattr(worker, name, None) or getattr(message, name, None), str) and value
    }
    return "".join(f", {name} {value}" for name, value in named.items())
