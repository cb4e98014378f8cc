"""Keys and passwords that are known by their form, wherever they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from gateway.masking.spans import Span

# Forms that their providers document. The last part of each is long enough that no word looks like it. What has no
# upper bound is either the end of the form or cannot begin again in the middle of itself: else time would be quadratic.
_FORMS: Final = (
    r"sk-(?=[\w-]{0,63}[0-9])[\w-]{20,}+",  # this gateway, OpenAI, Anthropic, OpenRouter, LiteLLM
    r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}",  # AWS
    r"gh[pousr]_[A-Za-z0-9]{36,}+",  # GitHub
    r"github_pat_\w{22,}+",
    r"gl(?:pat|dt|rt|ptt|ft|soat|cbt)-[\w-]{20,}+",  # GitLab
    r"xox[abeoprs]-[\w-]{10,}+",  # Slack
    r"xapp-[0-9]-[\w-]{10,}+",
    r"AIza[\w-]{35}",  # Google
    r"ya29\.[\w-]{20,}+",
    r"GOCSPX-[\w-]{20,}+",
    r"(?<!-)eyJ[\w-]{8,}+\.eyJ[\w-]{8,}+(?:\.[\w-]*+)?",  # JWT
    r"hf_[A-Za-z0-9]{30,}+",  # Hugging Face
    r"gsk_[A-Za-z0-9]{40,}+",  # Groq
    r"xai-[A-Za-z0-9]{40,}+",
    r"r8_[A-Za-z0-9]{37,}+",  # Replicate
    r"pplx-[A-Za-z0-9]{40,}+",
    r"npm_[A-Za-z0-9]{36}",
    r"pypi-[\w-]{50,}+",
    r"(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{16,}+",  # Stripe
    r"whsec_[A-Za-z0-9+/=]{24,}+",
    r"SG\.[\w-]{16,32}\.[\w-]{32,64}",  # SendGrid
    r"(?:SK|AC)[0-9a-f]{32}",  # Twilio
    r"do[opr]_v1_[0-9a-f]{64}",  # DigitalOcean
    r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}",  # Shopify
    r"hv[sbr]\.[\w-]{24,}+",  # Vault
    r"tskey-[a-z]+-[\w-]{10,}+",  # Tailscale
    r"key-[0-9a-f]{32}",  # Mailgun
    r"AGE-SECRET-KEY-1[0-9A-Z]{50,}+",
    r"lin_api_[A-Za-z0-9]{32,}+",
    r"dapi[0-9a-f]{32}",  # Databricks
    r"nvapi-[\w-]{40,}+",
)
_FORM: Final = re.compile(rf"(?<![A-Za-z0-9_])(?:{'|'.join(_FORMS)})(?![A-Za-z0-9])", re.ASCII)
_HOOK: Final = re.compile(
    r"(?:hooks\.slack\.com/(?:services|workflows)/|discord(?:app)?\.com/api/webhooks/)([\w/-]{20,200})", re.ASCII
)
_KEY_BLOCK: Final = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_END: Final = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_URL_LOGIN: Final = re.compile(r"://[^\s:/@\"'<>]{0,64}:([^\s/@\"'<>]{1,128})@")


def known_secrets(text: str) -> Iterator[Span]:
    yield from _key_blocks(text)
    for match in _FORM.finditer(text):
        yield Span(match.start(), match.end(), "SECRET")
    for pattern in (_HOOK, _URL_LOGIN):
        for match in pattern.finditer(text):
            yield Span(match.start(1), match.end(1), "SECRET")


def _key_blocks(text: str) -> Iterator[Span]:
    """A block without an end goes on to the end of the text: it was cut."""
    begin = _KEY_BLOCK.search(text)
    while begin is not None:
        end = _KEY_END.search(text, begin.end())
        stop = end.end() if end is not None else len(text)
        yield Span(begin.start(), stop, "SECRET")
        begin = _KEY_BLOCK.search(text, stop)
