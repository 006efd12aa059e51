"""Lease of a registration that ends without its process, over rpcs or in NATS."""

from __future__ import annotations

from typing import Final

DEFAULT_LEASE_SECONDS: Final = 10
RENEWALS: Final = 3
"""In one lease: two may be lost."""
RETRY_SECONDS: Final = 0.5
"""Pause after a registration or renewal that failed."""
