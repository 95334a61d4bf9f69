"""A hook of mkdocs: the README as the first page, links to other files of the repository, and live reports."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from largebatch.__main__ import main

ROOT = Path(__file__).parent.parent
# Pages that stand at the top of the repository.
FROM_THE_TOP = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
RUNS = ROOT / "bench/results/gpu_training"
REPORTS = {
    "report.html": [str(RUNS / f"cifar10-{name}-seed0") for name in ("128", "1024", "4096", "4096-no-warmup")],
}
LINK = re.compile(r"\[([^\[\]]*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from the top of the repository, and reports of runs that the repository has."""
    for name, source in FROM_THE_TOP.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    for name, folders in REPORTS.items():
        out = ROOT / "build" / name
        if main(["report", *folders, "--out", str(out)]) != 0:
            raise RuntimeError(f"no report of {folders}")
        files.append(File.generated(config, f"examples/{name}", content=out.read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to pages of the site, or else to the files in the repository."""
    name = page.file.src_uri
    folder = "" if name in FROM_THE_TOP else "docs"
    pages = {source: page for page, source in FROM_THE_TOP.items()}

    def lead(match: re.Match[str]) -> str:
        text, path, anchor = match.groups(default="")
        target = posixpath.normpath(posixpath.join(folder, path))
        inside = pages.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(inside):
            return f"[{text}]({inside}{anchor})"
        return f"[{text}]({config.repo_url}/blob/HEAD/{target}{anchor})" if config.repo_url else text

    return LINK.sub(lead, markdown)


def on_page_content(html: str, **_: object) -> str:
    """Let names at the start of a table's cells break after a slash; docs/site.css lets them break nowhere else."""
    return re.sub("(?<=<td>)<code>[^<]*", lambda code: code[0].replace("/", "/<wbr>"), html)
