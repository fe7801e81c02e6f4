"""Random control vectors for the models of `tiny_model.py`.

    python tests/tiny_vector.py MODEL.gguf OUT.gguf [SEED]

The same arguments give the same numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np


def make_vector(
    out: Path,
    *,
    width: int,
    layers: Sequence[int],
    seed: int = 0,
    name: str = "direction.{}",
    kind: type[np.generic] = np.float32,
    rows: int = 0,
) -> Path:
    """Write a vector with a direction for each of `layers`, and return its path.

    `name`, `kind` and `rows` (of a tensor with two dimensions) make files that are none.
    """
    writer = gguf.GGUFWriter(str(out), "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(layers))
    for layer in layers:
        random = np.random.default_rng([seed, layer])
        shape = (rows, width) if rows else (width,)
        writer.add_tensor(name.format(layer), random.normal(0, 1, shape).astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


if __name__ == "__main__":
    metadata = gguf.GGUFReader(sys.argv[1]).fields
    arch = metadata["general.architecture"].contents()
    width, count = (int(metadata[f"{arch}.{name}"].contents()) for name in ("embedding_length", "block_count"))
    made = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    make_vector(Path(sys.argv[2]), width=width, layers=range(1, count), seed=made)
