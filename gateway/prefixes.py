"""What the prompt caches of replicas hold, as far as the gateway can tell from what it has sent them.

A prompt is known by a chain of hashes, each of which covers everything up to its place, so that two prompts have the
same hashes as far as they begin alike. The index keeps, for every hash, the replicas that have read a prompt with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain as joined
from typing import Any, NamedTuple

import orjson

BLOCK = 256  # characters, about 64 tokens: engines keep their caches in blocks of 16 to 256 tokens
EVEN = 16 * BLOCK  # up to here all blocks are that long
GROWTH = 12  # from there on a block is a twelfth of what lies before it: what a miss costs grows alike
LONGEST = 512 * 1024  # characters of a prompt that are looked at
BYTES_PER_ENTRY = 384  # measured, with the moment when a table grows; see tests/unit/test_prefixes.py
_SAMPLE = 4096  # characters at the beginning, middle and end of a medium that stand for all of it
_LONG = 3 * _SAMPLE
_SHORT = (1 << 60) - 1  # hashes of 60 bits: an int beyond takes 16 bytes more
_FREED_AT_ONCE = 2000  # entries, about a millisecond


def _ends() -> Iterator[int]:
    end = 0
    while end <= LONGEST - BLOCK:
        end += BLOCK if end < EVEN else max(BLOCK, end // GROWTH // BLOCK * BLOCK)
        yield min(end, LONGEST)


ENDS = tuple(_ends())
_PIECES = tuple(slice(begin, end) for begin, end in zip((0, *ENDS), ENDS, strict=False))


class Chain(NamedTuple):
    """The beginning of one prompt. `hashes[i]` stands for its first `ENDS[i]` characters."""

    hashes: tuple[int, ...]
    length: int  # characters looked at, those after the last whole block included


NOTHING = Chain((), 0)


def chain_of(salt: str, text: str) -> Chain:
    """The chain of a prompt. `salt` is the tenant's: prompts of different tenants have nothing in common, as in the
    engines' caches."""
    hashes = []
    link, length = hash(("sekisho", salt)), len(text)
    for end, piece in zip(ENDS, _PIECES, strict=True):
        if end > length:
            break
        # Python's own hash: SipHash with a key of this process, which nobody outside can aim at, and fast.
        link = hash((link, text[piece])) & _SHORT
        hashes.append(link)
    return Chain(tuple(hashes), min(length, LONGEST))


# --- the text of a prompt
def chat_text(body: Mapping[str, Any]) -> str:
    """Tools and messages of a chat in their order, so that more turns only make it longer. At most `LONGEST` long."""
    pieces: list[str] = []
    if tools := body.get("tools"):
        pieces.append(_spelt(tools))
    size = sum(map(len, pieces))
    for message in body["messages"]:
        if size >= LONGEST:
            break
        said = _message(message)
        size += len(said)
        pieces.append(said)
    return "".join(pieces)[:LONGEST]


def _message(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "".join(map(_part, content or ()))
    more = ""
    if len(message) > 2:
        more = _spelt({name: value for name, value in message.items() if name not in ("role", "content")})
    return f"\0{message.get('role')}\1{text[:LONGEST]}{more}"


def _part(part: object) -> str:
    """A text is itself; an image or a sound is short and different for each."""
    if not isinstance(part, dict):
        return str(part)
    text = part.get("text")
    if isinstance(text, str):
        return text
    inner = [value.items() if isinstance(value, dict) else ((name, value),) for name, value in part.items()]
    return "\2" + "".join(f"{name}={_medium(value)}\2" for name, value in joined.from_iterable(inner))


def _medium(value: object) -> str:
    """A link or the data itself. Of long data samples are hashed: megabytes of it would hold up everybody else."""
    if not isinstance(value, str):
        return _spelt(value)
    if len(value) <= _LONG:
        return str(hash(value))
    middle = len(value) // 2
    samples = value[:_SAMPLE], value[middle : middle + _SAMPLE], value[-_SAMPLE:]
    return str(hash((len(value), samples)))


def _spelt(value: object) -> str:
    try:
        return orjson.dumps(value).decode()[:LONGEST]
    except orjson.JSONEncodeError:  # nested more deeply than it can write
        return ""


def completion_text(prompt: object) -> str:
    """The prompt itself, or its tokens as text; of several prompts the first. At most `LONGEST` long."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:LONGEST]
    tokens = prompt[: LONGEST // 2] if isinstance(prompt, list) else ()
    return f"{_spelt(tokens)[1:-1]},"[:LONGEST] if tokens else ""


# --- who has read what
class _Cache:
    """What one replica has read, in the order of its use: three sets instead of a list, since moving a whole chain to
    the front is then one call, and of what was used among the latest half nothing is ever forgotten."""

    __slots__ = ("bit", "dying", "old", "young")

    def __init__(self, bit: int) -> None:
        self.bit = bit  # the replica's, in the masks
        self.young: set[int] = set()
        self.old: set[int] = set()
        self.dying: set[int] = set()  # the next to be forgotten, in any order

    def __len__(self) -> int:
        return len(self.young) + len(self.old) + len(self.dying)

    def touch(self, hashes: tuple[int, ...]) -> None:
        self.old.difference_update(hashes)
        self.dying.difference_update(hashes)
        self.young.update(hashes)

    def turn(self) -> None:
        """The young become old, and the old the next to go. Only when nothing is dying."""
        self.young, self.old, self.dying = set(), self.young, self.old

    def pop(self) -> int:
        """One of those that were used longest ago. Raises: KeyError when there is nothing."""
        while not self.dying and (self.young or self.old):
            self.turn()
        return self.dying.pop()


class PrefixIndex:
    """Which replicas have read the beginnings of prompts, in bounded memory: what was used longest ago goes first.

    One look-up costs the same for any number of replicas.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes // BYTES_PER_ENTRY
        self._masks: dict[int, int] = {}  # hash -> bits of the replicas
        self._caches: dict[str, _Cache] = {}
        self._names: dict[int, str] = {}  # bit -> replica
        self._gone: list[_Cache] = []  # of replicas whose cache is lost: their bits mean nobody until they are free
        self._size = 0

    def __len__(self) -> int:
        """Entries: a hash counts once for each replica that has it."""
        return self._size

    def warm(self, chain: Chain) -> dict[str, float]:
        """The share (0-1) of the prompt that each replica has read before, by id; without those that have nothing."""
        found: dict[str, float] = {}
        masks, left, end = self._masks, -1, 0
        for here, hashed in zip(ENDS, chain.hashes, strict=False):
            mask = masks.get(hashed, 0) & left
            if mask != left:
                if end:
                    self._name(left & ~mask, end / chain.length, found)
                if not mask:
                    return found
                left = mask
            end = here
        if end:
            self._name(left, end / chain.length, found)
        return found

    def _name(self, bits: int, share: float, found: dict[str, float]) -> None:
        names = self._names
        while bits:
            low = bits & -bits
            bits ^= low
            if low in names:
                found[names[low]] = share

    def add(self, replica: str, chain: Chain) -> int:
        """Notes that a prompt goes to a replica. Returns the characters of it that are new there."""
        if not chain.hashes:
            return chain.length
        cache = self._caches.get(replica)
        if cache is None:
            cache = self._welcome(replica)
        masks, bit, known = self._masks, cache.bit, 0
        for place, hashed in enumerate(chain.hashes):
            mask = masks.get(hashed)
            if mask is None:
                masks[hashed] = bit  # the same object for all that only this replica has
            elif mask & bit:
                known += known == place  # what comes after a gap is of no use to an engine
            else:
                masks[hashed] = mask | bit
        before = len(cache)
        cache.touch(chain.hashes)
        self._size += len(cache) - before
        if not cache.dying and len(cache.young) * 2 * len(self._caches) > self._most:
            cache.turn()
        if self._size > self._most:
            self._make_room(cache if len(cache) * len(self._caches) >= self._most else self._largest())
        return chain.length - (ENDS[known - 1] if known else 0)

    def forget(self, replica: str) -> None:
        """The replica's cache is gone: it was restarted, or is no more."""
        cache = self._caches.pop(replica, None)
        if cache is not None:
            del self._names[cache.bit]
            self._gone.append(cache)

    def retain(self, replicas: Collection[str]) -> None:
        """Forgets all others."""
        for replica in [name for name in self._caches if name not in replicas]:
            self.forget(replica)

    def tidy(self, most_bytes: int) -> None:
        """Called a few times a second: frees what is left of lost caches, and what is too much since the bound has
        become `most_bytes`. A part each time, so that nobody waits for it."""
        self._most = most_bytes // BYTES_PER_ENTRY
        if self._size > self._most:
            self._make_room(self._largest())
        for _ in range(_FREED_AT_ONCE):
            if not self._gone:
                return
            self._drop(self._gone[0])

    def _welcome(self, replica: str) -> _Cache:
        taken = {cache.bit for cache in self._gone} | self._names.keys()
        bit = next(bit for bit in (1 << place for place in range(len(taken) + 1)) if bit not in taken)
        self._names[bit] = replica
        cache = self._caches[replica] = _Cache(bit)
        return cache

    def _largest(self) -> _Cache:
        return max((*self._caches.values(), *self._gone), key=len)

    def _make_room(self, cache: _Cache) -> None:
        """Lost caches go first, then what the replica of `cache` used longest ago."""
        for _ in range(_FREED_AT_ONCE):
            if self._size <= self._most:
                return
            if not self._gone and not cache:
                cache = self._largest()
            self._drop(self._gone[0] if self._gone else cache)

    def _drop(self, cache: _Cache) -> None:
        if not cache:  # one of the lost: its bit is free again
            self._gone.remove(cache)
            return
        hashed = cache.pop()
        self._size -= 1
        left = self._masks[hashed] & ~cache.bit
        if left:
            self._masks[hashed] = left
        else:
            del self._masks[hashed]
