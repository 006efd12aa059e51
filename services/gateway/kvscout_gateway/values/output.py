"""Expected output of a request: schedulers estimate by it how long a worker will be busy."""

from __future__ import annotations

from typing import Final, NamedTuple
from zlib import crc32

from kvscout_common.errors import InvalidArgument

MAX_CLASS: Final = 64
"""Characters."""
_ADAPTER: Final = "@"


class Output(NamedTuple):
    """An output that is still to come. All fields unset: nothing is known."""

    expected_tokens: int = 0
    """As its caller expects; 0 = unknown."""
    max_tokens: int = 0
    """At which it ends, whatever it is; 0 = no such bound is known."""
    output_class: str = ""
    """Requests of one class are expected to have outputs of similar lengths; "" = nothing is known."""
    unseen: bool = False
    """Nobody will see its first token: the engine answers as a whole, or to somebody who reports nothing of it."""

    def of_adapter(self, lora_name: str) -> Output:
        """Return the output for an adapter, whose outputs are unlike those of its base model.

        Args:
            lora_name: "" = the base model: nothing changes.
        """
        if not lora_name:
            return self
        whole = f"{self.output_class}{_ADAPTER}{lora_name}"
        if len(whole) > MAX_CLASS:
            whole = f"{self.output_class}{_ADAPTER}{crc32(lora_name.encode('utf-8', 'surrogatepass')):08x}"
        return self if len(whole) > MAX_CLASS else self._replace(output_class=whole)


UNKNOWN: Final = Output()
ONE_TOKEN: Final = Output(expected_tokens=1, max_tokens=1)
"""Output of an attempt that only computes the prompt: it is freed when that is done, which implies a first token."""


def check_class(name: str) -> None:
    """Check the length of an output class.

    Raises:
        InvalidArgument: It is too long.
    """
    if len(name) > MAX_CLASS:
        raise InvalidArgument(f"must not be longer than {MAX_CLASS} characters", field="output_class")
