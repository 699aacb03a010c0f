"""Builds the documentation as a site: `python docs/site/build.py [FOLDER]` (`make site`), into build/site/html.

The pages stay where they are, with links that work on a code host too. This copies them, and the files that they link to,
into one folder with the same layout, so that no link has to be rewritten, writes the reference beside them (docs/reference/, which
is in no commit), and has mkdocs make the site of it. It needs no network. Any warning ends it: a link, an image or a heading that does not exist, a page in no menu, or a page of the site that
loads something from another place.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Path(__file__).with_name("mkdocs.yml")
STYLE = Path(__file__).with_name("site.css")
BUILT = ROOT / "build" / "site"
PAGES = (
    "*.md", "docs/**/*.md", "examples/**/*.md", "recipes/*.md", "deploy/*.md", "benchmarks/*.md",
)  # fmt: skip
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
LOADED = re.compile(r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(https?:)?//|<link[^>]*rel=["']?(?:stylesheet|preload|icon)["']?"""
                    r"""[^>]*href=["']?(https?:)?//""")  # fmt: skip


def stage(into: Path) -> list[Path]:
    """Copy the pages and what they link to into a new folder, with the layout of the repository; return the copies."""
    shutil.rmtree(into, ignore_errors=True)
    pages = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    linked = {target for page in pages for target in linked_files(page)}
    copies = []
    for path in sorted({*pages, *linked, STYLE}):
        copy = into / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        copies.append(copy)
    for name, text in reference().items():
        copy = into / "docs" / "reference" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
        copies.append(copy)
    return copies


def reference() -> dict[str, str]:
    """Return the text of each page that is made from code, by its name in docs/reference/."""
    pages: dict[str, str] = runpy.run_path(str(Path(__file__).with_name("reference.py")))["pages"]()
    return pages | {"licences.md": runpy.run_path(str(Path(__file__).with_name("licences.py")))["page"]()}


def linked_files(page: Path) -> set[Path]:
    """Return the files of the repository that a page links to."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = {(page.parent / link).resolve() for link in LINK.findall(text) if "://" not in link}
    return {path for path in found if path.is_file() and ROOT in path.parents}


def loaded_from_elsewhere(folder: Path) -> list[str]:
    """Return the pages of a site that load a script, a style, a font or an image from another place."""
    return [str(page.relative_to(folder)) for page in sorted(folder.rglob("*.html")) if LOADED.search(page.read_text())]


def build(folder: Path) -> Path:
    """Make the site of the staged pages in `folder`; return its folder. Raises SystemExit after any warning."""
    html = folder / "html"
    settings = {"INHERIT": str(SETTINGS), "docs_dir": str(folder / "pages"), "site_dir": str(html)}
    (folder / "mkdocs.yml").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(folder / "mkdocs.yml")]
    # The theme prints an advertisement for its successor unless this is set.
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if built.returncode:  # not --quiet: mkdocs counts no warning that it does not show
        for line in (built.stdout + built.stderr).splitlines():
            if line and not line.startswith("INFO"):
                print(line, file=sys.stderr)
        raise SystemExit("the site was not built; the warnings above name page and link")
    if pages := loaded_from_elsewhere(html):
        raise SystemExit(f"pages load something from elsewhere: {', '.join(pages)}")
    return html


def main() -> None:
    """Build the site. Exits with 1 after any warning."""
    folder = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else BUILT
    stage(folder / "pages")
    html = build(folder)
    print(f"the site is in {html}; open index.html there, or serve it for its search: python -m http.server -d {html}")


if __name__ == "__main__":
    main()
