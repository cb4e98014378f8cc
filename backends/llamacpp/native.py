"""llama.cpp's model and vocabulary behind a few typed calls: the bindings are untyped, and `Any` ends here.

Vocabulary calls only read, so any thread may make them. Everything that takes a context belongs to the engine thread.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from backends.llamacpp.errors import EngineBroken, UsageProblem

_LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_CONTROL = 1 << 3  # LLAMA_TOKEN_ATTR_CONTROL
_errors: deque[str] = deque(maxlen=5)  # what llama.cpp complained about last, for messages
_kept: list[Any] = []  # C keeps the bare pointer of the log callback: it must never be collected


@cache
def llama() -> Any:
    """The low-level bindings, loaded on first use: it takes a quarter of a second. Raises: UsageProblem."""
    # OpenMP threads spin at barriers by default. Where other processes want the same cores, sleeping gave 2.6 times the
    # tokens per second with one sequence and 5.6 times with four; on idle cores OMP_WAIT_POLICY=active may win.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        module = importlib.import_module("llama_cpp.llama_cpp")
    except ImportError as error:
        raise UsageProblem(f"llama-cpp-python is not installed ({error}); install sekisho[llamacpp]") from None
    callback = module.llama_log_callback(_log)
    _kept.append(callback)
    module.llama_log_set(callback, None)
    module.llama_backend_init()
    return module


def _log(level: int, text: bytes, _: Any) -> None:
    if level == _LOG_ERROR and (line := text.decode(errors="replace").strip()):
        _errors.append(line)
        print(line, file=sys.stderr, flush=True)


def last_errors() -> str:
    """What llama.cpp logged as errors lately; empty when nothing."""
    return "; ".join(_errors)


@dataclass(frozen=True, slots=True)
class Bos:
    """The token a prompt begins with."""

    token: int | None  # None = this model wants none
    text: str


class Model:
    """A loaded model file."""

    def __init__(self, path: str, files: Sequence[str], gpu_layers: int) -> None:
        """Args:   path: for messages. files: what to open, in order; the first of a split model alone stands for all.
        Raises: UsageProblem when llama.cpp cannot load them.
        """
        self.lib = lib = llama()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = gpu_layers if gpu_layers >= 0 else 1 << 30
        names = (ctypes.c_char_p * len(files))(*map(os.fsencode, files))
        if len(files) > 1:
            self.handle = lib.llama_model_load_from_splits(names, len(files), params)
        else:
            self.handle = lib.llama_model_load_from_file(names[0], params)
        if not self.handle:
            raise UsageProblem(f"path: llama.cpp cannot load {path}: {last_errors() or 'unknown reason'}")
        self.vocab = lib.llama_model_get_vocab(self.handle)
        self.n_vocab: int = lib.llama_vocab_n_tokens(self.vocab)
        self.n_ctx_train: int = lib.llama_model_n_ctx_train(self.handle)
        self.n_embd: int = lib.llama_model_n_embd(self.handle)
        self._pieces: dict[int, bytes] = {}
        self._ends: list[int] | None = None

    def meta(self, key: str) -> str | None:
        """A value of the file's metadata as text."""
        buffer = ctypes.create_string_buffer(1)
        size = self.lib.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        self.lib.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    def arch(self, key: str) -> str | None:
        """A value of the metadata under the architecture's own prefix, such as `llama.`."""
        return self.meta(f"{self.meta('general.architecture')}.{key}")

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """add_special: BOS and EOS as the model wants them. parse_special: spellings of control tokens become them."""
        data = text.encode()
        room = len(data) + 8
        while True:
            tokens = (ctypes.c_int32 * room)()
            count = self.lib.llama_tokenize(self.vocab, data, len(data), tokens, room, add_special, parse_special)
            if count >= 0:
                return tokens[:count]
            if -count <= room:
                raise EngineBroken(f"llama_tokenize returned {count}")
            room = -count

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token, often not whole characters. Control tokens are empty unless `special`."""
        if not special and (known := self._pieces.get(token)) is not None:
            return known
        buffer = ctypes.create_string_buffer(64)
        size = self.lib.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        if size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = self.lib.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        data = buffer.raw[: max(size, 0)]
        if not special:
            self._pieces[token] = data
        return data

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of token ids, control tokens spelled out."""
        return b"".join(self.piece(token, special=True) for token in tokens).decode(errors="replace")

    def is_end(self, token: int) -> bool:
        """Whether the model says with this token that it is done."""
        return bool(self.lib.llama_vocab_is_eog(self.vocab, token))

    def end_tokens(self) -> list[int]:
        """All tokens that end generation. Looked up on first use: it takes a call per token of the vocabulary."""
        if self._ends is None:
            self._ends = [token for token in range(self.n_vocab) if self.is_end(token)]
        return self._ends

    def control_texts(self) -> list[str]:
        """Spellings of all control tokens, for templates.py."""
        get = self.lib.llama_vocab_get_attr
        tokens = [token for token in range(self.n_vocab) if get(self.vocab, token) & _CONTROL]
        return [self.piece(token, special=True).decode(errors="replace") for token in tokens]

    def bos(self) -> Bos:
        """What begins a prompt."""
        token = self.lib.llama_vocab_bos(self.vocab)
        wanted = self.lib.llama_vocab_get_add_bos(self.vocab) and token >= 0
        return Bos(token if wanted else None, self._text(token))

    def eos_text(self) -> str:
        """Spelling of the end token, for templates."""
        return self._text(self.lib.llama_vocab_eos(self.vocab))

    def quantization(self) -> str:
        """Name of the file type, such as Q4_K_M."""
        ftype = self.lib.llama_model_ftype(self.handle) & 1023  # above that only the bit "guessed"
        constants: dict[str, Any] = vars(self.lib)
        for name, value in constants.items():
            if name.startswith("LLAMA_FTYPE_") and value == ftype:
                return name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_")
        return f"type {ftype}"

    def description(self) -> str:
        """llama.cpp's own words, such as `llama ?B Q4_1`."""
        buffer = ctypes.create_string_buffer(256)
        self.lib.llama_model_desc(self.handle, buffer, len(buffer))
        return str(buffer.value, errors="replace")

    def kv_bytes_per_token(self) -> int:
        """Upper bound of what one token takes in an f16 KV cache; 0 for models whose state does not grow."""
        lib, handle = self.lib, self.handle
        if lib.llama_model_is_recurrent(handle) or lib.llama_model_is_hybrid(handle) or lib.llama_model_n_swa(handle):
            return 0
        heads, kv_heads = lib.llama_model_n_head(handle), lib.llama_model_n_head_kv(handle)
        default = self.n_embd // max(heads, 1)
        sizes = [int(self.arch(f"attention.{name}_length") or default) for name in ("key", "value")]
        return int(lib.llama_model_n_layer(handle)) * int(kv_heads) * sum(sizes) * 2

    def free(self) -> None:
        """Give the memory back. No call may follow."""
        self.lib.llama_model_free(self.handle)

    def _text(self, token: int) -> str:
        return self.piece(token, special=True).decode(errors="replace") if token >= 0 else ""
