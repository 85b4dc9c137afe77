"""Builds the documentation as a site: ``make site`` writes ``build/site``, which can be read without a network.

The Markdown files keep their places in the repository, together with the files that they link to, so every link works in
the site as in the repository. This module decides the pages and their order. Material for MkDocs, in an environment of
its own, decides how they look.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
STAGE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
STYLE = ROOT / "docs" / "site.css"
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
SEEN_FIRST = ("tutorial", "concepts", "simulate", "results", "architecture")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "deploy/RUNBOOK.md", "dashboards/README.md")
FOLDERS = {"Guide": "guide", "Reference": "reference", "How to change": "how-to-change", "Decisions": "decisions"}


def main() -> int:
    """Copy the pages and build the site. Return the exit status of MkDocs, which refuses broken links."""
    shutil.rmtree(STAGE, ignore_errors=True)
    for path in sorted({*pages(), *linked()}):
        target = STAGE / "pages" / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    shutil.copyfile(STYLE, STAGE / "pages" / STYLE.name)
    (STAGE / "mkdocs.yml").write_text(yaml.safe_dump(configuration(), sort_keys=False))
    mkdocs = [str(Path(sys.argv[1]) / "bin" / "mkdocs"), "build", "--strict", "--quiet"]
    status = subprocess.run([*mkdocs, "--config-file", str(STAGE / "mkdocs.yml"), "--site-dir", str(SITE)]).returncode
    if status == 0:
        print(f"{SITE.relative_to(ROOT)}/index.html: {sum(1 for _ in SITE.rglob('*.html'))} pages")
    return status


def pages() -> Iterator[Path]:
    """Yield all Markdown files that people read."""
    yield from (ROOT / name for name in PAGES)
    yield from (ROOT / "docs").rglob("*.md")


def linked() -> Iterator[Path]:
    """Yield the files that pages link to: code and configuration, which a browser shows as text."""
    for page in pages():
        for target in LINK.findall(page.read_text()):
            path = (page.parent / target).resolve()
            if path.is_file() and path.is_relative_to(ROOT):
                yield path


def configuration() -> dict[str, object]:
    return {
        "site_name": "atoll",
        "docs_dir": "pages",
        "use_directory_urls": False,  # so that it can be read from a folder, without a server
        "theme": {
            "name": "material",
            "font": False,  # fonts of the reader's machine, because others would have to be loaded
            # the contents of a page are in the navigation, because diagrams of 110 columns need the room
            "features": ["navigation.tabs", "navigation.top", "toc.integrate", "content.code.copy"],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default", "primary": "teal"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate", "primary": "teal"},
            ],
        },
        "extra_css": [STYLE.name],
        "plugins": ["search"],
        "markdown_extensions": ["admonition", "tables", "pymdownx.superfences", {"toc": {"permalink": True}}],
        "validation": {"links": {"unrecognized_links": "ignore"}},
        "nav": navigation(),
    }


def navigation() -> list[dict[str, object]]:
    """Return every page once, in the order in which a newcomer would read them."""
    first: list[object] = ["README.md", *(f"docs/{name}.md" for name in SEEN_FIRST)]
    rest = [{title: sorted_pages(folder)} for title, folder in FOLDERS.items()]
    operators: list[object] = ["deploy/RUNBOOK.md", "dashboards/README.md", "SECURITY.md"]
    return [{"atoll": first}, *rest, {"Operators": operators}, {"Contributors": ["CONTRIBUTING.md", "CHANGELOG.md"]}]


def sorted_pages(folder: str) -> list[object]:
    """Return the pages of a folder of docs, its overview first."""
    names = sorted(path.name for path in (ROOT / "docs" / folder).glob("*.md"))
    return [f"docs/{folder}/{name}" for name in sorted(names, key=lambda name: name != "README.md")]


if __name__ == "__main__":
    sys.exit(main())
