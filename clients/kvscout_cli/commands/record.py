"""`kvscout record`: real traffic as a trace, without its content."""

from __future__ import annotations

import asyncio
import gzip
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Final

import click

from kvscout_cli.connection import Address, Connection, connection_flags, option
from kvscout_cli.lifetime import run
from kvscout_cli.output import echo
from kvscout_common.errors import ConfigError, KvscoutError, Unavailable
from kvscout_common.settings.flags import SectionedCommand
from kvscout_lab.workloads.recording import RecordedWorker, head, line_of, mooncake_lines, read_recording

KEY_BYTES: Final = 16
RETRY_SECONDS: Final = 2.0
FLUSH_SECONDS: Final = 5.0
"""Time until what was recorded is in its file, also where a recorder is killed."""
STATUS_SECONDS: Final = 10.0
_MB: Final = 1_000_000


@click.command(cls=SectionedCommand)
@click.argument("gateways", nargs=-1, type=Address(), metavar="[GATEWAY]...")
@option("--model", default="", help="Only this model.")
@option(
    "--directory",
    default="recordings",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the files.",
)
@option(
    "--file-mb",
    default=64.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Maximum size of a file.",
)
@option("--files", default=16, show_default=True, type=click.IntRange(min=1), help="Files kept; the oldest goes.")
@option("--duration", type=click.FloatRange(min=0, min_open=True), help="Duration in seconds.  [default: until Ctrl-C]")
@option(
    "--tokens-per-hash", default=64, show_default=True, type=click.IntRange(1, 65_536), help="Precision of prefixes."
)
@option(
    "--key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Key file of the hashes, created if missing; recordings with one key match.  [default: a new key]",
)
@option(
    "--mooncake",
    "convert",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Instead, print this recording in Mooncake's format; may be repeated.",
)
@connection_flags
def command(
    connection: Connection,
    *,
    gateways: Sequence[str],
    model: str,
    directory: Path,
    file_mb: float,
    files: int,
    duration: float | None,
    tokens_per_hash: int,
    key_file: Path | None,
    convert: Sequence[Path],
) -> None:
    """Record the requests of gateways as a trace: times, lengths, hashes, decisions, outcomes; without tokens and text.

    \b
        kvscout record --duration 3600
        kvscout record gateway-0:7050 gateway-1:7050 --key-file key
        kvscout replay recordings/*.jsonl.gz
        kvscout record --mooncake recordings/kvscout-20260101-120000.jsonl.gz > trace.jsonl
    """
    if convert:
        for line in mooncake_lines(read_recording(convert, model).requests):
            click.echo(line)
        return
    connections = [replace(connection, gateway=gateway) for gateway in gateways or (connection.gateway,)]
    recorder = _Recorder(_key(key_file), model, tokens_per_hash, _Files(directory, int(file_mb * _MB), files))
    try:
        run(recorder.run(connections, duration), until_signalled=duration is None)
    finally:
        recorder.files.close()
        echo(recorder.summary, err=True)


def _key(path: Path | None) -> bytes:
    """Return the key of a file, which is made if it is not there; None = a new key.

    Raises:
        ConfigError: The file cannot be read or made, or is no key.
    """
    if path is None:
        return secrets.token_bytes(KEY_BYTES)
    try:
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
                new.write(secrets.token_hex(KEY_BYTES) + "\n")
        except FileExistsError:
            pass
        key = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field="--key-file") from error
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{path} has {len(key)} bytes in hex, not {KEY_BYTES}", field="--key-file")
    return key


class _Files:
    """Files of bounded size and number.

    Args:
        directory: Made if it is not there.
        max_bytes: Of a file, about, as it is on the disk.
        max_files: Further ones cost the oldest.
    """

    def __init__(self, directory: Path, max_bytes: int, max_files: int) -> None:
        self.directory = directory
        self.written: list[Path] = []
        """Files that are there, oldest first."""
        self.begins: Iterable[str] = ()
        """First lines of every file."""
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._file: IO[str] | None = None
        self._flushed = time.monotonic()

    def write(self, lines: Iterable[str]) -> None:
        """Write lines, into a new file where this one is full.

        Raises:
            ConfigError: They cannot be written.
        """
        try:
            if self._file is None:
                self._file = self._begin()
            self._file.writelines(line + "\n" for line in lines)
            now = time.monotonic()
            if now - self._flushed >= FLUSH_SECONDS:
                self._flushed = now
                self._file.flush()
            if self.written[-1].stat().st_size >= self._max_bytes:
                self.close()
        except OSError as error:
            raise ConfigError(f"cannot write to {self.directory}: {error}", field="--directory") from error

    def close(self) -> None:
        """End the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self) -> IO[str]:
        self.directory.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        path = self.directory / f"kvscout-{stamp}.jsonl.gz"
        number = 1
        while path.exists():
            number += 1
            path = self.directory / f"kvscout-{stamp}-{number}.jsonl.gz"
        file = gzip.open(path, "wt", compresslevel=6)  # noqa: SIM115  # until `close`
        self.written.append(path)
        while len(self.written) > self._max_files:
            self.written.pop(0).unlink(missing_ok=True)
        file.writelines(line + "\n" for line in self.begins)
        return file


@dataclass(slots=True)
class _Recorder:
    """Requests of several gateways on their way to the files."""

    key: bytes
    model: str
    tokens_per_hash: int
    files: _Files
    requests: int = 0
    lost: int = 0
    """Requests that gateways could not keep until they were read."""
    away: dict[str, float] = field(default_factory=dict)
    """Gateways that do not answer, since when: what they run is missing."""
    missed: int = 0
    """Times that a gateway was away."""

    @property
    def summary(self) -> str:
        """Return what was recorded, in a line."""
        text = f"{self.requests:,} requests in {len(self.files.written)} files of {self.files.directory}"
        if self.lost:
            text += f"; {self.lost:,} are missing, which were not read in time"
        if self.missed:
            text += f"; gateways were out of reach {self.missed} times, and what they ran then is missing"
        return text

    async def run(self, connections: Sequence[Connection], duration: float | None) -> None:
        """Record until the time is over.

        Raises:
            KvscoutError: A gateway refuses, or none was ever reached.
        """
        workers = [one for connection in connections for one in await _workers(connection)]
        known = {one.worker_id: one for one in workers}
        self.files.begins = [head([one.gateway for one in connections], known.values())]
        try:
            async with asyncio.timeout(duration), asyncio.TaskGroup() as group:
                for connection in connections:
                    group.create_task(self._record(connection))
                group.create_task(self._report())
        except TimeoutError:
            return
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _record(self, connection: Connection) -> None:
        gateway = connection.gateway
        while True:
            try:
                async with (
                    connection.router() as router,
                    aclosing(
                        router.record(self.key, model=self.model, tokens_per_hash=self.tokens_per_hash)
                    ) as messages,
                ):
                    async for message in messages:
                        self._back(gateway)
                        self.requests += len(message.requests)
                        self.lost += message.lost
                        self.files.write([line_of(request, gateway) for request in message.requests])
            except Unavailable as error:
                if gateway not in self.away:
                    self.away[gateway] = time.monotonic()
                    self.missed += 1
                    echo(f"{gateway}: {error}; trying again until it answers", err=True)
            await asyncio.sleep(RETRY_SECONDS)

    def _back(self, gateway: str) -> None:
        since = self.away.pop(gateway, None)
        if since is not None:
            echo(f"{gateway}: answers again, after {time.monotonic() - since:.0f} s", err=True)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            echo(self.summary, err=True)


async def _workers(connection: Connection) -> list[RecordedWorker]:
    try:
        async with connection.router() as router:
            return [RecordedWorker.of(record.spec) for record in await router.list_workers()]
    except KvscoutError as error:
        error.args = (f"{connection.gateway}: {error}",)
        raise
