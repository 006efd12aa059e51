"""The engine's side of ZMTP in bytes, for peers that do what libzmq never would."""

from __future__ import annotations

MORE, LONG, COMMAND = 1, 2, 4


def greeting(*, major: int = 3, minor: int = 1, mechanism: bytes = b"NULL") -> bytes:
    """The first 64 bytes; libzmq 4.2 says 3.0, 4.3.5 says 3.1."""
    return b"\xff" + b"\0" * 7 + b"\x01\x7f" + bytes([major, minor]) + mechanism.ljust(20, b"\0") + b"\0" * 32


def frame(body: bytes, flags: int = 0) -> bytes:
    """One frame."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body


def command(name: bytes, data: bytes = b"") -> bytes:
    """One command."""
    return frame(bytes([len(name)]) + name + data, COMMAND)


def ready(socket_type: bytes = b"PUB") -> bytes:
    """The end of a handshake."""
    return command(b"READY", b"\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type)


def message(*frames: bytes) -> bytes:
    """A message."""
    return b"".join(frame(body, MORE) for body in frames[:-1]) + frame(frames[-1])


def batch(seq: int, payload: bytes = b"payload", topic: bytes = b"topic") -> bytes:
    """What an engine publishes."""
    return message(topic, seq.to_bytes(8, "big"), payload)


def streams() -> list[bytes]:
    """What an engine may say in the life of a connection, usual and not."""
    opened = greeting() + ready()
    ping = command(b"PING", b"\x01\x2c" + b"context")
    return [
        opened + batch(0) + ping + batch(1, b"x" * 300),
        greeting(minor=0) + ready(b"XPUB") + frame(b"topic", MORE) + ping + frame(b"\0" * 8, MORE) + frame(b""),
        opened + message(b"topic") + message(*[b""] * 5) + message(*[b""] * 70),
        opened + command(b"PONG") + command(b"SUBSCRIBE", b"x") + command(b"ERROR", b"\4away"),
        greeting(mechanism=b"CURVE") + ready(),
        greeting(major=2) + b"\0" * 8,
        greeting() + ready(b"REP"),
        greeting() + command(b"ERROR", b"\4away"),
    ]
