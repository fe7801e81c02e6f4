"""Fetches a GGUF by Hugging Face repository and file name, going on where an earlier attempt was cut off.

Only this file imports huggingface_hub, which the extra `pull` installs. Its own `HF_ENDPOINT` and `HF_TOKEN` count.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..errors import ConfigError, HomeprefixdError, ModelError, NotFoundError, UnavailableError
from ..program import pip_install
from .catalog import model_parts

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_SHOWN = 30  # file names in a message
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Hub:
    """A server of models. Everything waits for the network."""

    def __init__(self) -> None:
        """Raises ConfigError if huggingface_hub is not installed."""
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        try:
            from huggingface_hub import HfApi
        except ImportError as error:
            how = pip_install("'homeprefixd[pull]'")
            raise ConfigError(f"fetching models needs huggingface_hub: {how}") from error
        self._api: HfApi = HfApi()

    @property
    def endpoint(self) -> str:
        return str(self._api.endpoint)

    def choose(self, repository: str, file: str | None, revision: str | None) -> list[str]:
        """The files of one model: `file`, with all its parts, or the only GGUF that the repository has.

        Raises NotFoundError, which lists the GGUFs that there are.
        """
        about = self._ask(repository, lambda: self._api.model_info(repository, revision=revision))
        there = [str(one.rfilename) for one in about.siblings or []]
        ggufs = sorted(name for name in there if name.lower().endswith(".gguf"))
        if not ggufs:
            raise NotFoundError(f"{repository} has no GGUF file")
        listed = ", ".join(ggufs[:_SHOWN]) + (", ..." if len(ggufs) > _SHOWN else "")
        if file is None:
            firsts = {str(model_parts(Path(name))[0]) for name in ggufs}
            if len(firsts) > 1:
                raise NotFoundError(f"{repository} has several GGUF files: name one of {listed}")
            file = firsts.pop()
        parts = [str(part) for part in model_parts(Path(file))]
        missing = [part for part in parts if part not in there]
        if missing:
            raise NotFoundError(f"{repository} has no file {missing[0]}; it has {listed}")
        return parts

    def fetch(self, repository: str, file: str, folder: Path, revision: str | None) -> Path:
        """Download one file into `folder`, where it may lie in part already; its path. Raises HomeprefixdError."""
        return Path(self._ask(repository, lambda: self._fetch(repository, file, folder, revision)))

    def _fetch(self, repository: str, file: str, folder: Path, revision: str | None) -> Path:
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined, unused-ignore]

        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        url = hf_hub_url(repository, file, revision=revision, endpoint=self.endpoint)
        about = self._api.get_hf_file_metadata(url=url)
        size, etag = about.size, about.etag
        if size is None or etag is None or size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            # Only its own transport can take it, which begins anew where a process was ended.
            return Path(self._api.hf_hub_download(repository, file, local_dir=folder, revision=revision))
        if target.exists() and target.stat().st_size == size and _read(_mark(target)) == etag and _is(target, etag):
            return target
        headers = build_hf_headers()
        if urlsplit(about.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # it is for the server that was asked, not for where that points
        part = target.with_name(f".{target.name}.part")
        mark = _mark(part)
        with open(os.open(part, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as output:
            try:
                fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UnavailableError(f"{target} is being fetched by another process already") from error
            if _read(mark) != etag:  # what lies there is of another version
                output.truncate(0)
                mark.write_text(etag)
            there = min(output.seek(0, os.SEEK_END), size)
            output.truncate(there)
            output.seek(there)
            http_get(
                about.location,
                output,
                resume_size=there,
                headers=headers,
                expected_size=size,
                displayed_filename=target.name,
            )
            output.flush()
            os.fsync(output.fileno())
            if not _is(part, etag):
                output.truncate(0)
                raise UnavailableError(f"{file} came damaged from {urlsplit(about.location).netloc}: fetch it again")
        part.replace(target)
        mark.replace(_mark(target))
        return target

    def _ask(self, repository: str, call: Callable[[], Any]) -> Any:
        from huggingface_hub import errors

        try:
            return call()
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
            raise NotFoundError(f"{self.endpoint} has no such repository, revision or file: {repository}") from error
        except errors.HFValidationError as error:
            raise NotFoundError(f"{repository!r} is no name of a repository, such as owner/name: {error}") from error
        except HomeprefixdError:
            raise
        except OSError as error:
            if error.errno is not None and error.filename is not None:
                raise ModelError(f"{error.filename}: {error.strerror}") from error
            raise UnavailableError(f"{repository} cannot be fetched from {self.endpoint}: {_line(error)}") from error
        except Exception as error:  # whatever the HTTP library of this version raises
            raise UnavailableError(f"{repository} cannot be fetched from {self.endpoint}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _is(path: Path, etag: str) -> bool:
    """Whether a file's content is what the server says of it: of large files the tag is their SHA-256."""
    if not _SHA256.fullmatch(etag):
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == etag


def _mark(path: Path) -> Path:
    """Where it is noted which version of a file is at `path`."""
    return path.with_name(f".{path.name.removeprefix('.')}.etag")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
