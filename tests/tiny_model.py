"""Random-weight models of a few hundred kilobytes, of architectures that no small download has.

    python tests/tiny_model.py ARCH OUT.gguf [TOKENIZER.gguf]

llama.cpp makes the tensors itself from hyper-parameters (`llama_model_init_from_user`), so no tensor names or shapes
are listed here. Tokenizer and chat template come from an existing GGUF, or are a token for each byte and ChatML: then a
model is made in a fifth of a second. The same arguments give the same weights.
"""

from __future__ import annotations

import ctypes
import mmap
import shutil
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from llama_cpp import llama_cpp as C  # noqa: N812

WIDTH, HEADS, LAYERS, WINDOW = 64, 2, 3, 64
HEAD = WIDTH // HEADS

_STATE_SPACE: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 2 * WIDTH,
    "ssm.state_size": 128,
    "ssm.time_step_rank": HEADS,
    "ssm.group_count": 2,
}
_MIXED_HEADS: dict[str, Any] = {  # a recurrent layer between two with attention
    "attention.head_count": [HEADS, 0, HEADS],
    "attention.head_count_kv": [HEADS, 0, HEADS],
}
_EXPERTS: dict[str, Any] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": WIDTH,
    "expert_shared_count": 1,
    "expert_shared_feed_forward_length": WIDTH,
    "expert_weights_scale": 1.0,
}
_DELTA: dict[str, Any] = {**_STATE_SPACE, "ssm.inner_size": 4 * WIDTH, "full_attention_interval": 2}
ARCHS: dict[str, dict[str, Any]] = {  # behind a `+` is what sets one apart from another of its architecture
    "llama": {},
    "llama+longrope": {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 1024},
    "qwen3": {"attention.key_length": HEAD, "attention.value_length": HEAD},
    "gemma2": {"attention.sliding_window": WINDOW},
    "gemma3": {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": 2},
    "gpt-oss": {**_EXPERTS, "attention.sliding_window": WINDOW},
    "gpt-oss+wide": {**_EXPERTS, "attention.sliding_window": 160},
    "deepseek2": {
        **_EXPERTS,
        "leading_dense_block_count": 1,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": HEAD,
        "attention.kv_lora_rank": HEAD,
        "attention.key_length": HEAD + HEAD // 2,
        "attention.value_length": HEAD,
        "attention.key_length_mla": HEAD,
        "attention.value_length_mla": HEAD,
        "rope.dimension_count": HEAD // 2,
    },
    "deepseek4": {
        **_EXPERTS,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "swiglu_clamp_exp": 10.0,
        "attention.sliding_window": WINDOW,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": HEAD,
        "attention.key_length": WIDTH,
        "attention.value_length": WIDTH,
        "attention.indexer.head_count": HEADS,
        "attention.indexer.key_length": WIDTH,
        "attention.indexer.top_k": 16,
        "attention.output_group_count": 1,
        "attention.output_lora_rank": HEAD,
        "attention.compress_rope_freq_base": 10000.0,
        "attention.compress_ratios": [4, 0, 128],
        "rope.dimension_count": HEAD,
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 4,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": 0,
    },
    "mamba2": _STATE_SPACE,
    "granitehybrid": {**_STATE_SPACE, **_MIXED_HEADS},
    "lfm2": {**_MIXED_HEADS, "shortconv.l_cache": 3},
    "lfm2+window": {**_MIXED_HEADS, "shortconv.l_cache": 3, "attention.sliding_window": WINDOW},
    "falcon-h1": _STATE_SPACE,
    "qwen2vl": {"rope.dimension_sections": [HEAD // 4] * 4},
    "qwen35": {**_DELTA, "rope.dimension_sections": [HEAD // 4] * 4},
    "qwen3next": {**_DELTA, **_EXPERTS},
    "llama-embed": {"attention.causal": False, "pooling_type": 1},  # makes embeddings only
}


class _InitParams(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


BYTES_VOCABULARY = 512
"""Tokens of a model without a tokenizer of its own: three special ones, one for each byte, and others."""

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(arch: str, tokenizer: Path | None, out: Path, *, seed: int = 0, context_length: int = 4096) -> Path:
    """Write the model and return its path. `arch`: a key of ARCHS. `tokenizer` None: a small one."""
    lib = _library()
    C.llama_backend_init()

    def fill(tensor: int, _user_data: int) -> None:
        name = lib.ggml_get_name(tensor).decode()
        count, rows = lib.ggml_nelements(tensor), lib.ggml_nrows(tensor)
        values = np.random.default_rng([seed, *name.encode()]).normal(0, 1.5 / np.sqrt(count // rows), count)
        if "ssm_a" in name:
            values = -np.abs(values) / 8  # a decay is negative; slow, so that old tokens matter
        elif "rope_factors" in name:
            values = 1 + np.abs(values)  # what frequencies are divided by
        elif "norm" in name:
            values = 1 + values / 8  # around 0, signals would fade and wrong state go unnoticed
        data = values.astype(np.float32)
        lib.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)

    callback = C.llama_model_set_tensor_data_t(fill)
    with tempfile.TemporaryDirectory() as folder:
        metadata = Path(folder) / "metadata.gguf"
        _write_metadata(arch, tokenizer, metadata, context_length)
        context = lib.gguf_init_from_file(str(metadata).encode(), _InitParams(True, None))
        if not context:
            raise RuntimeError(f"the metadata for {arch} cannot be read back")
        model = C.llama_model_init_from_user(context, callback, None, C.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp refused the metadata for {arch}")
        saved = Path(folder) / "saved.gguf"
        C.llama_model_save_to_file(model, str(saved).encode())
        C.llama_model_free(model)
        _insert(saved, [_chat_template(tokenizer)])
        shutil.move(saved, out)  # so that there is a whole one or none
    return out


def _chat_template(tokenizer: Path | None) -> bytes:
    """The pair of `tokenizer`'s chat template, which llama.cpp's saver leaves out; ChatML without one."""
    name = "tokenizer.chat_template"
    return _string_pair(name, _CHATML.encode()) if tokenizer is None else _pairs(tokenizer)[name]


# ---- GGUF's pairs of key and value as bytes: gguf.GGUFReader takes seconds for a tokenizer of 49,000 tokens

_HEADER = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of pairs
_ALIGNMENT = 32  # of the tensors' data, counted from the file's beginning
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a value, by type
_STRING, _ARRAY = 8, 9


def _pairs(file: Path) -> dict[str, bytes]:
    """Each pair of a GGUF file, as it stands there."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at, found = _HEADER.size, {}
        for _ in range(_HEADER.unpack_from(data)[3]):
            begin, value = at, _after(data, at, _STRING)
            (kind,) = struct.unpack_from("<I", data, value)
            at = _after(data, value + 4, kind)
            found[data[begin + 8 : value].decode()] = data[begin:at]
    return found


def _after(data: mmap.mmap, at: int, kind: int) -> int:
    """Where what stands behind a value begins."""
    if kind == _STRING:
        return at + 8 + int.from_bytes(data[at : at + 8], "little")
    if kind != _ARRAY:
        return at + _SIZES[kind]
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind in _SIZES:
        return at + count * _SIZES[kind]
    for _ in range(count):
        at = _after(data, at, kind)
    return at


def _string_pair(name: str, value: bytes) -> bytes:
    return struct.pack(f"<Q{len(name)}sIQ", len(name), name.encode(), _STRING, len(value)) + value


def _insert(file: Path, pairs: list[bytes]) -> None:
    """Put more pairs into a GGUF file, with one that fills up, so that its tensors lie as far from an alignment."""
    filler = "general.description"
    missing = -sum(map(len, [*pairs, _string_pair(filler, b"")])) % _ALIGNMENT
    pairs = [*pairs, _string_pair(filler, b" " * missing)]
    data = file.read_bytes()
    magic, version, tensors, count = _HEADER.unpack_from(data)
    header = _HEADER.pack(magic, version, tensors, count + len(pairs))
    file.write_bytes(b"".join((header, *pairs, memoryview(data)[_HEADER.size :])))


def split(model: Path, stem: Path, tensors: int) -> list[Path]:
    """Write a model again as parts of at most so many tensors each, `STEM-00001-of-0000N.gguf`; returns their paths."""
    reader = gguf.GGUFReader(str(model))
    arch = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(str(stem.with_suffix(".gguf")), arch, split_max_tensors=tensors)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")) and field.contents() != []:
            _copy(field, writer)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(stem.parent.glob(f"{stem.name}-*.gguf"))


def _copy(field: gguf.ReaderField, writer: gguf.GGUFWriter) -> None:
    kind = field.types[0]
    writer.add_key_value(
        field.name, field.contents(), kind, sub_type=field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    )


def _name(arch: str) -> str:
    """As llama.cpp calls it."""
    return arch.partition("+")[0]


def _library() -> Any:
    lib = C._lib  # also finds what libllama depends on, so no second copy of ggml is loaded
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "gguf_init_from_file": (ctypes.c_void_p, [ctypes.c_char_p, _InitParams]),
        "ggml_nelements": (ctypes.c_int64, [ctypes.c_void_p]),
        "ggml_nrows": (ctypes.c_int64, [ctypes.c_void_p]),
        "ggml_get_name": (ctypes.c_char_p, [ctypes.c_void_p]),
        "ggml_backend_tensor_set": (None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def _add_bytes(writer: gguf.GGUFWriter) -> int:
    """A tokenizer with a token for each byte; returns its size."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as GPT-2 writes bytes; the others come behind
    hidden = [byte for byte in range(256) if byte not in shown]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, shown)]
    tokens += [chr(256 + number) for number in range(len(hidden))]
    tokens += [f"<{number}>" for number in range(BYTES_VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["< <"])  # an empty list is refused
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    return len(tokens)


def _write_metadata(arch: str, tokenizer: Path | None, out: Path, context_length: int) -> None:
    name = _name(arch)
    writer = gguf.GGUFWriter(str(out), name)
    copied = {} if tokenizer is None else {n: p for n, p in _pairs(tokenizer).items() if n.startswith("tokenizer.")}
    if tokenizer is None:
        n_vocab = _add_bytes(writer)
    else:  # type, type of each, count: an array's beginning
        _, _, n_vocab = struct.unpack_from("<IIQ", copied["tokenizer.ggml.tokens"], 8 + len("tokenizer.ggml.tokens"))
    settings = {
        "vocab_size": n_vocab,
        "context_length": context_length,
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": 3 * WIDTH,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "residual_scale": 1.0,
        **ARCHS[arch],
    }
    for setting, value in settings.items():
        key = f"{name}.{setting}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    _insert(out, list(copied.values()))


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[3]) if len(sys.argv) > 3 else None, Path(sys.argv[2]))
