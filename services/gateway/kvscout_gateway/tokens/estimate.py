"""How long a prompt and its answer may be, where nobody has counted tokens: for the load that they bring. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvscout_common.errors import InvalidArgument
from kvscout_common.json_fields import Prompts

CHARACTERS_A_TOKEN: Final = 4
"""Of text, about."""
MAX_BOUND: Final = (1 << 32) - 1


def output_bound(request: Mapping[str, Any]) -> int:
    """Tokens that a request's outputs may have together; 0 = it does not say."""
    for name in ("max_completion_tokens", "max_tokens"):
        bound = request.get(name)
        if isinstance(bound, int) and 0 < bound <= MAX_BOUND:
            return min(int(bound) * _outputs(request), MAX_BOUND)
    return 0


def _outputs(request: Mapping[str, Any]) -> int:
    """How many answers are generated: `n`, or the `best_of` from which these are taken, to each of the prompts."""
    try:
        prompt = request.get("prompt")
    except InvalidArgument:
        prompt = None  # one that is too long to be looked at
    prompts = prompt.number if isinstance(prompt, Prompts) else 1
    asked = [n for name in ("n", "best_of") if isinstance(n := request.get(name), int) and n > 0]
    return max(asked, default=1) * prompts
