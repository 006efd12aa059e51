"""Files that a service follows: tokens, certificates, workers. What they say now is in effect a second later.

Polled, which also sees the symlink swaps of Kubernetes' secrets and config maps, and needs nobody to send a signal. All
of it happens in a thread; whatever stands at the path, the loop does not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from kvscout_common.errors import ConfigError
from kvscout_common.process.ticks import sleep_to_tick

log = logging.getLogger("kvscout.files")

T = TypeVar("T")

POLL_SECONDS = 1.0


def read_file(path: Path, *, flag: str, max_bytes: int, secret: bool = False) -> bytes:
    """Read a regular file of bounded size; blocks no longer than the disk does.

    Args:
        path: The file.
        flag: Which flag names it, for errors.
        max_bytes: Its largest size.
        secret: Warn of a file that everybody may read.

    Raises:
        ConfigError: It cannot be read, is no regular file, or is too large.
    """
    try:
        # Without O_NONBLOCK the open of a FIFO waits for somebody to write to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{path} is not a regular file", field=flag)
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field=flag) from error
    if len(content) > max_bytes:
        raise ConfigError(f"{path} is larger than {max_bytes:,} bytes", field=flag)
    if secret and mode & stat.S_IROTH:
        log.warning("%s: every user of this machine may read %s", flag, path)
    return content


def read_yaml(path: Path, *, flag: str, max_bytes: int, secret: bool = False) -> Any:
    """Read a YAML document; see `read_file`.

    Raises:
        ConfigError: Also if it is no YAML. Says where, and repeats nothing that stands there: it may be a secret.
    """
    content = read_file(path, flag=flag, max_bytes=max_bytes, secret=secret)
    try:
        return yaml.safe_load(content)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        # ValueError: no UTF-8, or a date that does not exist.
        mark = getattr(error, "problem_mark", None)
        where = f": line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    # Outside of the handler: the cause, which quotes the line, would be logged with a traceback.
    raise ConfigError(f"cannot read {path}: it is not YAML{where}", field=flag)


def located(error: ConfigError, path: Path, *, max_bytes: int) -> ConfigError:
    """Return an error about a key of a YAML file with the file's name and the key's line.

    Args:
        error: Its field is the key's path, such as "workers.3.model" or "tokens.0.role".
        path: The file.
        max_bytes: Its largest size.
    """
    line = 0
    try:
        node = yaml.compose(read_file(path, flag="", max_bytes=max_bytes), Loader=yaml.SafeLoader)
        for part in re.findall(r"[^.\[\]]+", error.field or ""):
            node, mark = _child(node, part)
            line = mark.line + 1
    except (ConfigError, LookupError, ValueError, RecursionError, yaml.YAMLError):
        pass  # as far as the key could be followed: the last part may be one that is missing
    at = f", line {line}" if line else ""
    return ConfigError(error.message, field=f"{path}{at}: {error.field}")


def _child(node: yaml.Node | None, part: str) -> tuple[yaml.Node, yaml.Mark]:
    """Return the value at a key or index, and where the key stands.

    Raises:
        LookupError: There is none.
    """
    if isinstance(node, yaml.SequenceNode):
        inner = node.value[int(part)]
        return inner, inner.start_mark
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == part:
                return value, key.start_mark
    raise LookupError(part)


class FollowedFile(Generic[T]):
    """Something that files say.

    Args:
        what: What that is, for the log.
        paths: The files.
        read: Reads and checks them; in a thread once the service runs.
        apply: Takes what was read, on the loop.
    """

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], T], apply: Callable[[T], None]) -> None:
        self.what = what
        self._paths = tuple(paths)
        self._read = read
        self._apply = apply
        self._seen: object = None
        self.error = ""
        """Why what the files say now is not in effect; "" = it is."""

    def load(self) -> None:
        """Read the files now.

        Raises:
            ConfigError: They are wrong; nothing changes then.
        """
        seen = self._looks()
        self._apply(self._read())
        self._seen = seen

    async def watch(self, sleep: Callable[[float], Any] = sleep_to_tick) -> None:
        """Follow the files for ever. A content that is wrong is logged once and changes nothing."""
        while True:
            await sleep(POLL_SECONDS)
            for apply in await asyncio.to_thread(self._news):
                apply()

    def look(self) -> None:
        """Follow them once, here and now; for those who have no loop that watches."""
        for apply in self._news():
            apply()

    def _news(self) -> list[Callable[[], None]]:
        """Return what is to be done on the loop."""
        seen = self._looks()
        if seen == self._seen:
            return []
        self._seen = seen
        try:
            value = self._read()
        except ConfigError as error:
            if isinstance(error.__cause__, OSError):
                # Not what the file says is wrong: it may go well the next time.
                self._seen = None
            return [partial(self._failed, str(error))]
        return [partial(self._apply, value), partial(self._failed, "")]

    def _failed(self, error: str) -> None:
        if error and error != self.error:
            log.error("%s not in effect, the last valid version stays: %s", self.what, error)
        self.error = error

    def _looks(self) -> list[object]:
        """Return what is different once a file is another, or has another content."""
        found: list[object] = []
        for path in self._paths:
            try:
                status = path.stat()
            except OSError as error:
                found.append(error.errno)
            else:
                found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        return found
