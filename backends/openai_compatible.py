"""Any server that speaks OpenAI's API and about which nothing more is known."""

from backends.base import OpenAICompatible

BACKEND = OpenAICompatible()
