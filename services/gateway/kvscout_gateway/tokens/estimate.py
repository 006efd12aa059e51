"""How long a prompt may be where nobody has counted its tokens: for the load that it brings."""

from __future__ import annotations

from typing import Final

CHARACTERS_A_TOKEN: Final = 4
"""Of text, about."""
