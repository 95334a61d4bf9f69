"""A stand-in for the hub on this machine: repositories of files, whose branches can move."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import datasets
import fsspec
import huggingface_hub.constants
import pytest

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+?)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")

Answer = tuple[int, dict[str, str], bytes]


class Hub:
    """Repositories such as "datasets/user/data" and "models/user/model"."""

    def __init__(self) -> None:
        # By repository and by branch or commit, the commit and its files.
        self._revisions: dict[str, dict[str, tuple[str, dict[str, bytes]]]] = {}
        self.url = ""

    def commit(self, repository: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Replace a branch's files, by their paths, and return the commit."""
        commit = hashlib.sha1(repr((repository, files)).encode(), usedforsecurity=False).hexdigest()
        self._revisions.setdefault(repository, {}).update({branch: (commit, files), commit: (commit, files)})
        return commit

    def remove_branch(self, repository: str, branch: str) -> None:
        """Remove a branch, but not its commits."""
        del self._revisions[repository][branch]

    def answer(self, path: str, body: str) -> Answer:
        """Status, headers and body of a response."""
        if match := API.fullmatch(path):
            kind, name, what, revision, folder = match.groups()
        elif match := FILE.fullmatch(path):
            prefix, name, revision, folder = match.groups()
            kind = "datasets" if prefix else "models"
            what = "file"
        else:
            return missing("RepoNotFound")
        if (revisions := self._revisions.get(f"{kind}/{name}")) is None:
            return missing("RepoNotFound")
        if (found := revisions.get(unquote(revision or "main"))) is None:
            return missing("RevisionNotFound")
        commit, files = found
        if what == "file":
            if (content := files.get(unquote(folder))) is None:
                return missing("EntryNotFound", {"X-Repo-Commit": commit})
            return 200, {"X-Repo-Commit": commit, "ETag": f'"{oid(content)}"'}, content
        if what == "tree":
            folder = unquote(folder or "")
            told: Any = [entry(each, files) for each in files if each.startswith(folder)]
        elif what == "paths-info":
            told = [entry(each, files) for each in parse_qs(body).get("paths", []) if each in files]
        else:
            told = {"id": name, "sha": commit, "siblings": [{"rfilename": each} for each in files]}
        return 200, {"Content-Type": "application/json"}, json.dumps(told).encode()

    @contextmanager
    def served(self) -> Iterator[str]:
        """Its address, while it is served."""
        answer = self.answer

        class Handler(BaseHTTPRequestHandler):
            def _respond(self) -> None:
                sent = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
                status, headers, body = answer(urlsplit(self.path).path, sent)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_HEAD = do_POST = _respond

            def log_message(self, *_: Any) -> None: ...

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()


def missing(what: str, headers: dict[str, str] | None = None) -> Answer:
    """That there is no such repository, revision or file."""
    return 404, {"X-Error-Code": what, **(headers or {})}, b""


def oid(content: bytes) -> str:
    """A checksum in place of git's."""
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def entry(path: str, files: dict[str, bytes]) -> dict[str, Any]:
    """A file, as the hub lists it."""
    return {"type": "file", "path": path, "size": len(files[path]), "oid": oid(files[path])}


def use(monkeypatch: pytest.MonkeyPatch, url: str, home: Path, offline: bool = False) -> None:
    """Let the libraries of this process use the hub at an address, and a cache of their own."""
    constants = {
        "ENDPOINT": url,
        "HF_HUB_OFFLINE": offline,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
    }
    for name, value in constants.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
    # They are kept with their address.
    fsspec.get_filesystem_class("hf").clear_instance_cache()
