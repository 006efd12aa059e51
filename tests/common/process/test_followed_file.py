"""Files that are followed: tokens, certificates and workers, under a running server and under attack."""

import asyncio
import os
import signal
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
from support.processes import eventually, running

from kvscout.v1 import scheduler_pb2_grpc, types_pb2, workers_pb2
from kvscout_common.errors import ConfigError, Unauthenticated
from kvscout_common.identity.client_security import ClientSecurity, TokenFile
from kvscout_common.identity.identity import TokenTable
from kvscout_common.process.followed_file import FollowedFile, read_file, read_yaml
from kvscout_common.rpc.channel import call, open_channel

TOKENS = "tokens: [{{token: {}, role: admin, tenant: '*'}}]"


def write(path: Path, text: str) -> Path:
    """Replaces a file as a careful writer does; nobody else may read it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    new.rename(path)
    return path


def test_a_file_that_is_none_or_too_large_is_refused_and_waited_for_by_nobody(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, message in (
        (fifo, "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
        (write(tmp_path / "large", "x" * 101), "is larger than 100 bytes"),
        (tmp_path / "missing", "No such file"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_file(path, flag="workers_file", max_bytes=100)


@pytest.mark.parametrize(
    "text",
    [
        'tokens:\n  - {token: "t0psecret, role: admin}\n',
        "tokens:\n  - {token: !t0psecret x, role: admin}\n",
        "tokens:\n  - {token: *t0psecret , role: admin}\n",
        "tokens:\n  - {token: !!int t0psecret, role: admin}\n",
        "tokens:\n  - {token: t0psecret: x, role: admin}\n",
        "tokens:\n  - {t0psecret: admin}\n",
        "tokens:\n  - {token: x, role: t0psecret}\n",
    ],
)
def test_no_error_repeats_what_stands_in_a_tokens_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TokenTable.load(write(tmp_path / "tokens", text))
    error: BaseException | None = caught.value
    while error is not None:
        assert "t0psecret" not in str(error)
        error = error.__cause__ or error.__context__


def test_a_yaml_error_says_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is not YAML: line 3, column"):
        read_yaml(write(tmp_path / "y", "a:\n  b: 1\n c: 2\n"), flag="workers_file", max_bytes=100)


def test_a_secret_that_everybody_may_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "tokens", TOKENS.format("a"))
    TokenTable.load(path)
    assert not caplog.records
    path.chmod(0o644)
    TokenTable.load(path)
    assert "every user of this machine may read" in caplog.text


async def test_a_content_that_is_wrong_is_told_once_and_the_last_good_one_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "file", "1")
    taken: list[int] = []

    def read() -> int:
        content = read_file(path, flag="f", max_bytes=10)
        if not content.isdigit():
            raise ConfigError("is not a number", field="f")
        return int(content)

    file = FollowedFile("number", (path,), read, taken.append)
    file.load()
    looks, looked = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def step(_: float) -> None:
        looked.release()
        await looks.acquire()

    watching = asyncio.create_task(file.watch(step))

    async def look() -> None:
        await looked.acquire()
        looks.release()

    await look()
    for text in ("x", "y"):
        write(path, text)
        await look()
    path.unlink()
    os.mkfifo(path)
    await look()
    await look()
    await looked.acquire()
    assert (taken, file.error) == ([1], f"f: {path} is not a regular file")
    assert len(caplog.records) == 2  # "x" and "y" are the same error
    looked.release()
    write(path, "2")
    await look()
    await looked.acquire()
    assert (taken, file.error) == ([1, 2], "")
    watching.cancel()


def test_the_token_of_a_client_is_the_one_that_its_file_holds_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("kvscout_common.identity.client_security.time.monotonic", lambda: now[0])
    path = write(tmp_path / "token", "old\n")
    file = TokenFile(path)
    write(path, "new\n")
    assert file.token() == "old"
    now[0] += 1.0
    assert file.token() == "new"
    for wrong in ("two\nlines", "ümlaut"):
        write(path, wrong)
        now[0] += 1.0
        assert file.token() == "new"
        with pytest.raises(ConfigError, match="holds no token"):
            TokenFile(path)


async def status_of(address: str, security: ClientSecurity) -> Any:
    channel = open_channel(address, security)
    try:
        return await call(scheduler_pb2_grpc.SchedulerStub(channel).GetStatus, types_pb2.GetStatusRequest(), timeout=5)
    finally:
        await channel.close()


async def test_tokens_and_certificates_are_renewed_under_a_running_server_and_sighup_ends_nothing(
    tmp_path: Path,
) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca"))

    def issue() -> bytes:
        """A new certificate in the server's files; returns it as the client sees it."""
        issued = ca.issue_cert("127.0.0.1", "localhost")
        pem = issued.cert_chain_pems[0].bytes().decode()
        write(tmp_path / "key", issued.private_key_pem.bytes().decode())
        write(tmp_path / "cert", pem)
        return ssl.PEM_cert_to_DER_cert(pem)

    def presented(port: int) -> bytes:
        return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port)))

    def security(token: str) -> ClientSecurity:
        return ClientSecurity(ca=tmp_path / "ca", token_file=write(tmp_path / f"token-{token}", token))

    first = issue()
    write(tmp_path / "tokens", TOKENS.format("old"))
    flags = [word for name in ("cert", "key") for word in (f"--tls-{name}", str(tmp_path / name))]
    async with running("kvscout_scheduler.main", *flags, "--auth-tokens", str(tmp_path / "tokens")) as scheduler:
        port = scheduler.ready["port"]
        await status_of(scheduler.address, security("old"))
        assert await asyncio.to_thread(presented, port) == first
        second = issue()
        write(tmp_path / "tokens", TOKENS.format("new"))
        scheduler.process.send_signal(signal.SIGHUP)

        async def renewed() -> bool:
            return await asyncio.to_thread(presented, port) == second

        async def admitted() -> bool:
            try:
                await status_of(scheduler.address, security("new"))
            except Unauthenticated:
                return False
            return True

        await eventually(renewed, what="the new certificate")
        await eventually(admitted, what="the new token")
        with pytest.raises(Unauthenticated):
            await status_of(scheduler.address, security("old"))
        # A half-written pair changes nothing.
        write(tmp_path / "key", "no key")
        write(tmp_path / "tokens", "tokens: [{tokn: new}]")
        for _ in range(2):
            scheduler.process.send_signal(signal.SIGHUP)
        await status_of(scheduler.address, security("new"))
        assert await renewed()


async def test_a_server_answers_while_its_workers_file_becomes_a_fifo_or_huge(tmp_path: Path) -> None:
    def workers(count: int) -> str:
        return "workers:\n" + "".join(f"  - {{worker_id: w{n}, model: m, block_size: 16}}\n" for n in range(count))

    path = write(tmp_path / "workers.yaml", workers(1))
    async with running("kvscout_scheduler.main", "--workers-file", str(path)) as scheduler:
        channel = open_channel(scheduler.address)
        stub = scheduler_pb2_grpc.SchedulerStub(channel)

        async def warning() -> str:
            status = await call(stub.GetStatus, types_pb2.GetStatusRequest(), timeout=5)
            return " ".join(status.service.warnings)

        async def registered() -> int:
            answer = await call(stub.ListWorkers, workers_pb2.ListWorkersRequest(), timeout=5)
            return len(answer.workers)

        path.unlink()
        os.mkfifo(path)

        async def refused(why: str) -> bool:
            return why in await warning()

        await eventually(lambda: refused("is not a regular file"))
        write(path, workers(50_000))
        await eventually(lambda: refused("is larger than 2,097,152 bytes"))
        assert await registered() == 1
        write(path, workers(2))

        async def two() -> bool:
            return await registered() == 2

        await eventually(two)
        await channel.close()


async def test_a_file_that_could_not_be_read_for_a_moment_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "file", "1")
    taken: list[bytes] = []
    fail = [False]

    def read() -> bytes:
        if fail[0]:
            raise ConfigError("cannot read", field="f") from OSError(24, "Too many open files")
        return read_file(path, flag="f", max_bytes=10)

    file = FollowedFile("number", (path,), read, taken.append)
    file.load()
    write(path, "2")
    fail[0] = True
    polls = 0

    async def poll(_: float) -> None:
        nonlocal polls
        polls += 1
        if polls == 3:
            fail[0] = False
        elif polls == 5:
            raise EOFError

    with pytest.raises(EOFError):
        await file.watch(poll)
    assert taken == [b"1", b"2"]
