"""Random LoRA adapters for the models of `tiny_model.py`.

    python tests/tiny_lora.py MODEL.gguf OUT.gguf [SEED]

The same arguments give the same weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np

RANK, ALPHA = 4, 8.0


def make_lora(model: Path, out: Path, *, seed: int = 0, strength: float = 0.5) -> Path:
    """Write an adapter for all matrices of attention and feed-forward layers, and return its path.

    `strength`: of what it adds, as a share of what is there.
    """
    reader = gguf.GGUFReader(str(model))
    field = reader.fields["general.architecture"]
    writer = gguf.GGUFWriter(str(out), str(field.contents()))
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", ALPHA)
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk.") or not tensor.name.endswith(".weight") or len(tensor.shape) != 2:
            continue
        if "norm" in tensor.name or not any(part in tensor.name for part in ("attn", "ffn", "ssm_out", "ssm_in")):
            continue
        inner, outer = (int(size) for size in tensor.shape)
        random = np.random.default_rng([seed, *tensor.name.encode()])
        down = random.normal(0, 1 / np.sqrt(inner), (RANK, inner)).astype(np.float32)
        up = random.normal(0, strength * RANK / ALPHA / np.sqrt(RANK), (outer, RANK)).astype(np.float32)
        writer.add_tensor(f"{tensor.name}.lora_a", down)
        writer.add_tensor(f"{tensor.name}.lora_b", up)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


if __name__ == "__main__":
    make_lora(Path(sys.argv[1]), Path(sys.argv[2]), seed=int(sys.argv[3]) if len(sys.argv) > 3 else 0)
