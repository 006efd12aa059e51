"""Generates the Python modules and stubs of the packages under protos/ beside their .proto files.

`generate.py` writes them; `generate.py --check` compares a fresh generation with what is committed and exits 1 on
any difference.
"""

from __future__ import annotations

import filecmp
import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
PACKAGES = (Path("kvscout/v1"), Path("kvscout/ext_proc/v3"), Path("kvscout/accesslog/v3"), Path("kvscout/smg"))


def generate(out: Path) -> list[Path]:
    """Generates into `out`; returns the files made, relative to it."""
    sources = [str(path.relative_to(ROOT)) for path in _found(ROOT, "*.proto")]
    bundled = Path(protoc.__file__).parent / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"-I{ROOT}",
            f"-I{bundled}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *sources,
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")
    # Files without a service need no grpc module.
    for path in _found(out, "*_pb2_grpc.py*"):
        proto = ROOT / path.relative_to(out).parent / f"{path.name.split('_pb2')[0]}.proto"
        if not re.search(r"^service ", proto.read_text(), re.MULTILINE):
            path.unlink()
    return [path.relative_to(out) for path in _found(out, "*_pb2*.py*")]


def _found(root: Path, pattern: str) -> list[Path]:
    return sorted(path for package in PACKAGES for path in (root / package).glob(pattern))


def main() -> None:
    if "--check" not in sys.argv[1:]:
        print("\n".join(str(path) for path in generate(ROOT)))
        return
    with tempfile.TemporaryDirectory() as folder:
        made = generate(Path(folder))
        committed = [path.relative_to(ROOT) for path in _found(ROOT, "*_pb2*.py*")]
        stale = [
            str(path)
            for path in sorted({*made, *committed})
            if path not in made
            or path not in committed
            or not filecmp.cmp(Path(folder) / path, ROOT / path, shallow=False)
        ]
    if stale:
        raise SystemExit("generated code is not up to date (run `make protos`): " + ", ".join(stale))


if __name__ == "__main__":
    main()
