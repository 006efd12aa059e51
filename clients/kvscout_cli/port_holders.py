"""The process that listens at a port, for errors about ports that are taken.

Linux lists them in /proc, as far as we may look: the processes of other users stay unknown, and so do all elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
_LISTENING = "0A"
_STATE_DIR = "--state-dir"


def holder(port: int) -> str:
    """Return the process that listens at a port, as the middle of a sentence; "" = unknown."""
    pid = _listener(port)
    if pid is None:
        return ""
    for ancestor in _with_ancestors(pid):
        if (state_dir := _state_dir_of_up(ancestor)) is not None:
            return (
                f"the kvscout whose state is in {state_dir} has it (pid {ancestor}); "
                f"`kvscout down --state-dir {state_dir}` stops that one"
            )
    return f"`{' '.join(_command(pid))[:120]}` has it (pid {pid})"


def _listener(port: int) -> int | None:
    sockets = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening(PROC / "net" / table, port)}
    if not sockets:
        return None
    for process in PROC.iterdir():
        if not process.name.isdecimal():
            continue
        try:
            if any(str(descriptor.readlink()) in sockets for descriptor in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue  # it has ended, or is another user's
    return None


def _listening(table: Path, port: int) -> Iterable[str]:
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
        if state == _LISTENING and int(local.rsplit(":", 1)[1], 16) == port:
            yield inode


def _with_ancestors(pid: int) -> Iterable[int]:
    while pid > 1:
        yield pid
        try:
            # The name before it stands in brackets and may hold anything.
            pid = int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return


def _state_dir_of_up(pid: int) -> Path | None:
    """Return the state folder of a `kvscout up`; None = the process is none."""
    words = _command(pid)
    program = next((place for place, word in enumerate(words) if _is_kvscout(word)), None)
    if program is None or "up" not in words[program + 1 :]:
        return None
    given = ".kvscout"
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == _STATE_DIR:
            given = following
        elif word.startswith(f"{_STATE_DIR}="):
            given = word.partition("=")[2]
    try:
        return (PROC / str(pid) / "cwd").readlink() / given
    except OSError:
        return None


def _is_kvscout(word: str) -> bool:
    return Path(word).name == "kvscout" or word == "kvscout_cli.main" or word.endswith("kvscout_cli/main.py")


def _command(pid: int) -> list[str]:
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []
