"""`make audit`, of `make check`: what kvscout is installed with and linked to has no vulnerability that is known.

pip-audit asks PyPI about the packages that kvscout and its extras need, as they are installed here; cargo-deny asks
RustSec about the crates of the extension, and checks their licences and sources, for which it needs no network. A
finding fails. A database that cannot be reached does not: it is said, in capitals, because nothing was checked then.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = frozenset({"embedded", "otel", "picker", "text"})
"""Those that users install; the others are for developers."""
PIP_AUDIT_SECONDS = 60
"""For all packages together."""
UNREACHED = "failed to fetch advisory database"


def needed(name: str, extras: frozenset[str], seen: set[tuple[str, str]]) -> Iterator[str]:
    """A distribution and all that it requires here, as name==version."""
    for line in requires(name) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        wanted = canonicalize_name(requirement.name)
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in (extras or {""})):
            continue
        for extra in ("", *requirement.extras):
            if (wanted, extra) in seen:
                continue
            seen.add((wanted, extra))
            try:
                yield f"{wanted}=={version(wanted)}"
            except PackageNotFoundError:
                continue  # an extra that is not installed
            yield from needed(wanted, frozenset({extra}), seen)


def audit_packages() -> bool:
    """Asks about the Python packages; whether nothing is known against them."""
    packages = sorted(set(needed("kvscout", EXTRAS, set())))
    with tempfile.TemporaryDirectory() as folder:
        listed, answers = Path(folder, "requirements.txt"), Path(folder, "answers.json")
        listed.write_text("\n".join(packages))
        command = [
            *(sys.executable, "-m", "pip_audit", "--requirement", str(listed), "--no-deps", "--disable-pip"),
            *("--format", "json", "--output", str(answers), "--progress-spinner", "off", "--timeout", "5"),
        ]
        try:
            asked = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PIP_AUDIT_SECONDS)
        except subprocess.TimeoutExpired:
            return not_audited("pip-audit", f"no answer within {PIP_AUDIT_SECONDS} s")
        if "No module named" in asked.stderr:
            return failed("pip-audit", "it is not installed: make audit installs it")
        if not answers.exists():
            return not_audited("pip-audit", last_line(asked.stderr))
        found = json.loads(answers.read_text())["dependencies"]
    skipped = [one for one in found if "skip_reason" in one]
    vulnerable = [one for one in found if one.get("vulns")]
    for one in vulnerable:
        for known in one["vulns"]:
            fixed = ", ".join(known["fix_versions"]) or "nothing yet"
            print(f"pip-audit: {one['name']} {one['version']}: {known['id']}, fixed in {fixed}")
    if vulnerable:
        return False
    if skipped:
        return not_audited("pip-audit", f"{len(skipped)} of {len(packages)} packages: {skipped[0]['skip_reason']}")
    print(f"pip-audit: nothing is known against {len(packages)} packages")
    return True


def audit_crates() -> bool:
    """Checks the crates; whether nothing is known against them and their licences and sources are allowed."""
    program = shutil.which(
        "cargo-deny", path=f"{sysconfig.get_path('scripts')}:{Path.home()}/.cargo/bin:/usr/local/bin"
    )
    if shutil.which("cargo") is None:
        print("cargo-deny: there is no Rust toolchain, and no extension")
        return True
    if program is None:
        return failed("cargo-deny", "it is not installed: make audit installs it, or cargo install cargo-deny")
    rules = subprocess.run(
        [program, "check", "licenses", "bans", "sources"],
        cwd=ROOT / "native",
        check=False,
        capture_output=True,
        text=True,
    )
    if rules.returncode:
        print(rules.stderr)
        return failed("cargo-deny", last_line(rules.stderr))
    print("cargo-deny: licences, bans and sources are in order")
    known = subprocess.run(
        [program, "check", "advisories"], cwd=ROOT / "native", check=False, capture_output=True, text=True
    )
    if known.returncode and UNREACHED in known.stderr:
        return not_audited("cargo-deny", f"{UNREACHED} of RustSec")
    if known.returncode:
        print(known.stderr)
        return failed("cargo-deny", last_line(known.stderr))
    print("cargo-deny: nothing is known against the crates")
    return True


def failed(tool: str, why: str) -> bool:
    """Says what is wrong."""
    print(f"{tool}: {why}", file=sys.stderr)
    return False


def not_audited(tool: str, why: str) -> bool:
    """Says that a tool learnt nothing, which is no finding."""
    print(f"{tool}: NOT AUDITED, its database cannot be asked: {why}", file=sys.stderr)
    return True


def last_line(text: str) -> str:
    """Return the last line of a tool, without its colours."""
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


if __name__ == "__main__":
    sys.exit(0 if all([audit_packages(), audit_crates()]) else 1)
