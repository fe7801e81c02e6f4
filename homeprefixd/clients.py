"""What a client is called: the app behind `Generate.client`. Pure; any process may ask."""

from __future__ import annotations

import ipaddress


def app_name(client: str) -> str:
    """The app behind `Generate.client`: a key's name, or what the client calls itself, without address and version."""
    first, _, agent = client.partition(" ")
    if first == "key" and agent:
        return agent
    try:
        ipaddress.ip_address(first.partition("%")[0])
    except ValueError:
        return client.strip() or "unknown"
    return agent.partition("/")[0].strip() or first
