"""The gateway and the laboratory of the end-to-end tests, for the suite over all adapters."""

from tests.e2e.conftest import lab, shared_gateway

__all__ = ["lab", "shared_gateway"]
