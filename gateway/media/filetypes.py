"""What a file is, from its first bytes: images, sound and video that models read.

A list of what is known to be harmless, and not of what is not: pages, vector graphics, playlists and manifests can name
further addresses, which whoever plays them would fetch.
"""

from __future__ import annotations

_MOST_TAGS = 4  # in front of a sound
_SIGNS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
    (b"OggS", "audio/ogg"),
    (b"fLaC", "audio/flac"),
    (b"#!AMR", "audio/amr"),
    (b"caff", "audio/x-caf"),
    (b"\x1aE\xdf\xa3", "video/webm"),
    (b"FLV\x01", "video/x-flv"),
    (b"\0\0\x01\xba", "video/mpeg"),
    (b"\0\0\x01\xb3", "video/mpeg"),
)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}
_BRANDS = {  # of the family of formats that begin with a box `ftyp`
    b"avif": "image/avif", b"avis": "image/avif", b"heic": "image/heic", b"heix": "image/heic", b"mif1": "image/heif",
    b"msf1": "image/heif", b"M4A ": "audio/mp4", b"M4B ": "audio/mp4", b"qt  ": "video/quicktime",
}  # fmt: skip
_EITHER = frozenset({"audio/ogg", "video/webm", "video/mp4", "audio/mp4", "video/mpeg", "audio/mpeg"})  # sound or film
_UNTOLD = frozenset({"", "application/octet-stream", "binary/octet-stream"})


def sniff(content: bytes) -> str | None:
    """The media type of a file; None for everything that is not known here."""
    if content[:3] == b"ID3":
        return _sniff_tagged(content)
    if content[:4] == b"RIFF":
        return _RIFF.get(content[8:12])
    if content[:4] == b"FORM" and content[8:12] in (b"AIFF", b"AIFC"):
        return "audio/aiff"
    if content[4:8] == b"ftyp":
        return _BRANDS.get(content[8:12], "video/mp4")
    if content[:2] == b"BM" and content[6:10] == bytes(4):
        return "image/bmp"
    for sign, kind in _SIGNS:
        if content.startswith(sign):
            return kind
    if len(content) > 3 and content[0] == 0xFF and content[1] & 0xE0 == 0xE0:
        return "audio/aac" if content[1] & 0xF6 == 0xF0 else "audio/mpeg"
    return None


def _sniff_tagged(content: bytes) -> str | None:
    """A sound behind ID3 tags. What counts is behind them: players skip them before they look what a file is."""
    place = 0
    for _ in range(_MOST_TAGS):
        if content[place : place + 3] != b"ID3" or len(content) < place + 10:
            break
        size = 0
        for byte in content[place + 6 : place + 10]:
            size = size << 7 | byte & 0x7F
        place += 10 + size + (10 if content[place + 5] & 0x10 else 0)
    kind = sniff(content[place : place + 16].lstrip(b"\0")) if content[place : place + 3] != b"ID3" else None
    return kind if kind is not None and kind.startswith("audio/") else None


def agree(said: str, found: str) -> str | None:
    """The media type to pass on, where what the server said is compatible with what its bytes are; else None.

    Servers are right about the finer points and wrong about nothing more than that: the first half has to agree.
    """
    said = said.partition(";")[0].strip().lower()
    if said in _UNTOLD or said == found:
        return found
    family = said.partition("/")[0]
    if family == found.partition("/")[0]:
        return found
    if found in _EITHER and family in ("audio", "video"):
        return f"{family}/{found.partition('/')[2]}"
    return "audio/ogg" if said == "application/ogg" and found == "audio/ogg" else None
