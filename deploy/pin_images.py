"""`make image-digests`: pins the images that compose.yaml and Dockerfile name anew, by the digests they have now.

`NAME:TAG@sha256:…` is the image that was tried, whatever the tag means by now. Docker's plugin buildx asks the
registries.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("compose.yaml", "Dockerfile")
PINNED = re.compile(r"(?P<image>[a-z0-9][\w./-]*:[\w.-]+)@sha256:[0-9a-f]{64}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def digest(image: str) -> str:
    """Return the digest of an image now, for all platforms.

    Raises:
        SystemExit: It cannot be found out.
    """
    command = ["docker", "buildx", "imagetools", "inspect", image, "--format", "{{.Manifest.Digest}}"]
    try:
        asked = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        raise SystemExit("docker is missing") from None
    found = asked.stdout.strip()
    if asked.returncode or not DIGEST.fullmatch(found):
        raise SystemExit(f"the digest of {image} cannot be found out: {asked.stderr.strip() or found!r}")
    return found


def main(root: Path) -> None:
    """Ask for all digests, then write the files."""
    texts = {root / name: (root / name).read_text() for name in FILES}
    images = sorted({match["image"] for text in texts.values() for match in PINNED.finditer(text)})
    now = {image: digest(image) for image in images}
    for path, text in texts.items():
        path.write_text(PINNED.sub(lambda match: f"{match['image']}@{now[match['image']]}", text))
    for image in images:
        print(f"{image}@{now[image]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
