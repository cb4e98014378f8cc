"""Which version of the gateway this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    try:
        return installed_version("sekisho")
    except PackageNotFoundError:
        return "0+source"
