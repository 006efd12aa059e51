"""Hooks of mkdocs: add the pages that live beside their code, and keep the site free of other sites.

A README of a service, a client or an example becomes a page at its own path. Links between pages are those of the
repository, so they work on both; a link to a file that is no page becomes the file's name. The box with which a page
begins (`> [!TIP]`, which GitHub draws, too) becomes an admonition.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
BESIDE_CODE = ("services/*/README.md", "clients/**/README.md", "bench/*.md", "examples/**/*.md", "SECURITY.md")
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]\n]+)\]\((?P<target>[^)\s]+)\)")
_BOX = re.compile(r"^> \[!TIP\]\n((?:>.*\n)+)", re.MULTILINE)
_EXTERNAL = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^\"'> ]*[^>]*>")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that live beside their code."""
    for pattern in BESIDE_CODE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if "node_modules" not in path.parts:
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Makes the links and boxes of a page those of the site."""
    here = page.file.src_uri
    beside = page.file.generated_by is not None
    folder = posixpath.dirname(here if beside else f"docs/{here}")

    def link(found: re.Match[str]) -> str:
        target, _, anchor = found["target"].partition("#")
        if not target or ":" in target:
            return found[0]
        name = posixpath.normpath(posixpath.join(folder, target))
        of_site = name.removeprefix("docs/")
        if files.get_file_from_path(of_site) is not None and (name != of_site or not name.startswith("docs/")):
            there = posixpath.relpath(of_site, posixpath.dirname(here) or ".")
            return f"{found['image']}[{found['text']}]({there}{'#' if anchor else ''}{anchor})"
        if not (ROOT / name).exists():
            return found[0]  # mkdocs says that it leads nowhere
        return found["text"] if found["text"].startswith("`") else f"{found['text']} (`{name}`)"

    def box(found: re.Match[str]) -> str:
        return '!!! tip "Do this"\n\n' + re.sub(r"^> ?", "    ", found[1], flags=re.MULTILINE)

    return _LINK.sub(link, _BOX.sub(box, markdown))


def on_post_build(config: Any) -> None:
    """Fails if a page of the site would load something from elsewhere: it is read where there is no network, too.

    A page opened from disk may not fetch the search index: the index becomes a script as well (`search_from_disk.js`).
    """
    search = Path(config["site_dir"]) / "search"
    (search / "search_index.js").write_text(f"var __index = {(search / 'search_index.json').read_text()}")
    for path in sorted(Path(config["site_dir"]).rglob("*.html")):
        for found in _EXTERNAL.findall(path.read_text()):
            if 'rel="canonical"' not in found:
                raise PluginError(f"{path.relative_to(config['site_dir'])} loads from elsewhere: {found[:200]}")
