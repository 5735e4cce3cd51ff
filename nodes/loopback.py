"""Loopback addresses: hosts that only this machine can reach.

Pure: no name is looked up. An address that is not certainly loopback does not count as one.
"""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address


def is_loopback(host: str) -> bool:
    """Return True for addresses that only this machine can reach: 127.0.0.0/8, ::1 and `localhost`."""
    if host.lower() == "localhost":
        return True
    try:
        address = ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False  # a name, or a form that only some resolvers accept as an address
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback
