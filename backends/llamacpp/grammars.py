"""Sampling under a grammar, where llama.cpp's own call is slow and can abort the process.

llama_sampler_sample with a grammar in the chain holds every token of the vocabulary against the grammar each time, and
when the grammar leaves none, accepting a forbidden one throws through C. Here the likely case is tried first: sample
freely, ask the grammar about that one token. Only if it says no are all tokens held against it. A token is accepted
after it was found to be allowed, and a dead end ends the text.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from backends.llamacpp.errors import EngineBroken
from backends.llamacpp.native import Model


class GrammarSampler:
    """Scratch memory for one context; engine thread only."""

    def __init__(self, model: Model) -> None:
        self._lib = lib = model.lib
        ends = (lib.llama_vocab_eos(model.vocab), lib.llama_vocab_eot(model.vocab))
        self._end: int | None = next((token for token in ends if token >= 0 and model.is_end(token)), None)
        self._data = (lib.llama_token_data * model.n_vocab)()
        self._view = np.frombuffer(self._data, dtype=[("id", np.int32), ("logit", np.float32), ("p", np.float32)])
        self._ids = np.arange(model.n_vocab, dtype=np.int32)

    def sample(self, chain: Any, grammar: Any, context: Any, row: int) -> int:
        """The next token; one that ends generation when the grammar allows none.

        Raises: EngineBroken at a dead end of a model that has no such token.
        """
        logits = np.ctypeslib.as_array(self._lib.llama_get_logits_ith(context, row), shape=(len(self._data),))
        token = self._pick(self._candidates(logits), chain)
        if token is None or not self._allows(grammar, token):
            candidates = self._candidates(logits)
            self._lib.llama_sampler_apply(grammar, ctypes.byref(candidates))
            token = self._pick(candidates, chain)
            if token is None:
                if self._end is None:
                    raise EngineBroken("the grammar allows no token")
                return self._end
        self._lib.llama_sampler_accept(grammar, token)
        self._lib.llama_sampler_accept(chain, token)
        return token

    def _candidates(self, logits: Any) -> Any:
        self._view["id"], self._view["logit"], self._view["p"] = self._ids, logits, 0
        return self._array(self._data)

    def _array(self, data: Any) -> Any:
        return self._lib.llama_token_data_array(data=data, size=len(data), selected=-1, sorted=False)

    def _pick(self, candidates: Any, chain: Any) -> int | None:
        """What the chain selects; None when it had nothing but forbidden tokens to select from."""
        self._lib.llama_sampler_apply(chain, ctypes.byref(candidates))
        if not 0 <= candidates.selected < candidates.size:
            return None
        chosen = candidates.data[candidates.selected]
        return int(chosen.id) if math.isfinite(chosen.logit) else None

    def _allows(self, grammar: Any, token: int) -> bool:
        one = (self._lib.llama_token_data * 1)()
        one[0].id, one[0].logit = token, 1.0
        self._lib.llama_sampler_apply(grammar, ctypes.byref(self._array(one)))
        return math.isfinite(one[0].logit)
