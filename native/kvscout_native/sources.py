"""Notice an extension that was built from other Rust sources than those beside it, as after a pull."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

CRATE = Path(__file__).resolve().parents[1]
"""The crate in a development tree; an installed package has no sources beside it."""
BUILT_FROM = Path(__file__).with_name("_built_from")
"""Digest of the sources of the last build in place, which `setup.py` writes."""


def files(crate: Path) -> list[Path]:
    """Return what the extension is built from."""
    return [crate / "Cargo.toml", crate / "Cargo.lock", *sorted((crate / "src").rglob("*.rs"))]


def digest(crate: Path) -> str:
    """Return a hash of the names and contents of all sources."""
    total = hashlib.blake2b(digest_size=16)
    for path in files(crate):
        content = path.read_bytes()
        total.update(f"{path.relative_to(crate).as_posix()} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()


def is_stale(crate: Path, built_from: Path) -> bool:
    """Return whether the sources have changed since the build.

    Files are read only if one is newer than the build; a build that left no digest is not judged.
    """
    if not (crate / "src").is_dir() or not (crate / "Cargo.toml").is_file() or not built_from.is_file():
        return False
    built = built_from.stat().st_mtime_ns
    if all(path.stat().st_mtime_ns <= built for path in files(crate)):
        return False
    return digest(crate) != built_from.read_text()


def warn_if_stale() -> None:
    """Warn that answers may be wrong, and say what mends it."""
    if is_stale(CRATE, BUILT_FROM):
        warnings.warn(
            "kvscout's Rust extension was built from other sources than these, so its answers may be wrong: "
            "run `make native`",
            RuntimeWarning,
            stacklevel=2,
        )
