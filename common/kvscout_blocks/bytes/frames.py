"""The frames of an engine's sockets around its payloads.

::

    PUB     [topic] [seq, 8 bytes big-endian] [payload]
    replay  request [b""] [first seq]; replies [b""] ([topic]) [seq] [payload], the end has seq ff..ff
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvscout_common.errors import InvalidArgument

_SEQ_BYTES = 8
_END_OF_REPLAY = b"\xff" * _SEQ_BYTES


class MalformedBatch(InvalidArgument):
    """A message that is no batch of events; nothing in it can be used."""


class Message(NamedTuple):
    """One published or replayed message: its sequence number and its undecoded payload."""

    seq: int
    payload: bytes


def parse_message(frames: Sequence[bytes]) -> Message:
    """Read the frames of a published message.

    Raises:
        MalformedBatch: They are not topic, 8 bytes of seq, payload.
    """
    if len(frames) != 3 or len(frames[1]) != _SEQ_BYTES:
        raise malformed_frames([len(frame) for frame in frames])
    return Message(int.from_bytes(frames[1], "big"), frames[2])


def malformed_frames(lengths: Sequence[int]) -> MalformedBatch:
    """Make the error for a published message whose frames have these lengths, in bytes."""
    return MalformedBatch(f"want topic, 8 bytes of seq, payload; got frames of {lengths[:8]} bytes", field="frames")


def replay_request(first_seq: int) -> list[bytes]:
    """Return the frames that request all that an engine's replay socket has from `first_seq` on."""
    return [b"", first_seq.to_bytes(_SEQ_BYTES, "big")]


def parse_replay_reply(frames: Sequence[bytes]) -> Message | None:
    """Read one reply of a replay socket, with or without a topic; None is the end of the replay.

    Raises:
        MalformedBatch: The last two frames are not 8 bytes of seq and a payload.
    """
    if not 3 <= len(frames) <= 4 or len(frames[-2]) != _SEQ_BYTES:
        raise MalformedBatch(
            f"want seq and payload at the end; got frames of {[len(f) for f in frames[:8]]} bytes",
            field="frames",
        )
    if frames[-2] == _END_OF_REPLAY:
        return None
    return Message(int.from_bytes(frames[-2], "big"), frames[-1])
