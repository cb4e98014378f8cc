"""What the edge needs of the configuration; a reload replaces all of it."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_network

from gateway.config import Config
from gateway.edge.cors import Cors, cors_for
from gateway.types import Network


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """Sizes in bytes, times in seconds."""

    max_body: int
    max_header: int
    max_connections: int
    max_per_address: int  # connections
    header_timeout: float
    body_timeout: float
    idle_timeout: float
    keepalive_interval: float  # 0 = no comments
    trusted_proxies: tuple[Network, ...]
    cors: Cors | None  # None: no page of another origin may call

    @property
    def behind_proxies(self) -> bool:
        """Whether X-Forwarded-For is believed, so that all of it counts."""
        return bool(self.trusted_proxies)


def edge_settings(config: Config) -> EdgeSettings:
    server = config.server
    return EdgeSettings(
        max_body=server.max_body,
        max_header=server.max_header,
        max_connections=server.max_connections,
        max_per_address=server.max_connections_per_address or max(1, server.max_connections // 2),
        header_timeout=server.header_timeout,
        body_timeout=server.body_timeout,
        idle_timeout=server.idle_timeout,
        keepalive_interval=server.keepalive_interval,
        trusted_proxies=tuple(ip_network(str(cidr)) for cidr in server.trusted_proxies),
        cors=cors_for(server.cors_origins),
    )
