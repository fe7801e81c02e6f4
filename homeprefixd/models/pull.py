"""Fetches a GGUF by Hugging Face repository and file name, going on where an earlier attempt was cut off.

Only this file imports huggingface_hub, which the extra `pull` installs. Its own `HF_ENDPOINT` and `HF_TOKEN` count.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, HomeprefixdError, ModelError, NotFoundError, UnavailableError
from .catalog import model_parts

if TYPE_CHECKING:
    from huggingface_hub import HfApi

HOW_TO_INSTALL = "fetching models needs huggingface_hub: pip install 'homeprefixd[pull]'"

_SHOWN = 30  # file names in a message


class Hub:
    """A server of models. Everything waits for the network."""

    def __init__(self) -> None:
        """Raises ConfigError if huggingface_hub is not installed."""
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        try:
            from huggingface_hub import HfApi
        except ImportError as error:
            raise ConfigError(HOW_TO_INSTALL) from error
        self._api: HfApi = HfApi()

    @property
    def endpoint(self) -> str:
        return str(self._api.endpoint)

    def choose(self, repository: str, file: str | None, revision: str | None) -> list[str]:
        """The files of one model: `file`, with all its parts, or the only GGUF that the repository has.

        Raises NotFoundError, which lists the GGUFs that there are.
        """
        there = self._ask(repository, lambda: self._api.list_repo_files(repository, revision=revision))
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
        path = self._ask(
            repository,
            lambda: self._api.hf_hub_download(repository, file, local_dir=folder, revision=revision),
        )
        return Path(path)

    def _ask(self, repository: str, call: Callable[[], Any]) -> Any:
        from huggingface_hub import errors

        try:
            return call()
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
            raise NotFoundError(f"{self.endpoint} has no such repository, revision or file: {repository}") from error
        except errors.HFValidationError as error:
            raise NotFoundError(f"{repository!r} is no name of a repository, such as owner/name: {error}") from error
        except OSError as error:
            if error.errno is not None:
                raise ModelError(f"{error.filename or repository}: {error.strerror}") from error
            raise UnavailableError(f"{repository} cannot be fetched from {self.endpoint}: {_line(error)}") from error
        except HomeprefixdError:
            raise
        except Exception as error:  # whatever the HTTP library of this version raises
            raise UnavailableError(f"{repository} cannot be fetched from {self.endpoint}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
