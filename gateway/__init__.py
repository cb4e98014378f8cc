"""The gateway: one OpenAI-compatible front door for self-hosted models."""
