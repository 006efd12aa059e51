"""The key that engines want to see (`vllm serve --api-key`), from a file that is followed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvscout_common.errors import ConfigError
from kvscout_common.process.followed_file import FollowedFile, read_file

MAX_BYTES: Final = 16 * 1024
FLAG: Final = "engine_key_file"


class EngineKey:
    """One key for all engines; without a file there is none."""

    def __init__(self, path: Path | None) -> None:
        """Read the key.

        Raises:
            ConfigError: The file cannot be read, or has no key in it.
        """
        self.headers: tuple[tuple[str, str], ...] = ()
        """Headers of every request to an engine."""
        self.file: FollowedFile[str] | None = None
        """To be watched."""
        if path is not None:
            self.file = FollowedFile("engine key", (path,), lambda: _read(path), self._take)
            self.file.load()

    def _take(self, key: str) -> None:
        self.headers = (("Authorization", f"Bearer {key}"),)


def _read(path: Path) -> str:
    key = read_file(path, flag=FLAG, max_bytes=MAX_BYTES, secret=True).decode(errors="replace").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        # The key itself is not repeated.
        raise ConfigError(f"{path} has no key in it: one line of printable ASCII", field=FLAG)
    return key
