"""Addresses of this machine: which one leads somewhere, and which network interface has it."""

import ipaddress
import socket


def is_address(text: str) -> bool:
    """Whether `text` is an IPv4 or IPv6 address, and no name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether `host` is written as an address of this machine alone."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def interface_of(address: str) -> str | None:
    """The name of the network interface that has `address` (`eth0`); None if it cannot be told."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    if ":" in address:
        wanted = ipaddress.ip_address(address).packed.hex()
        with open("/proc/net/if_inet6", encoding="ascii") as lines:
            return next((line.split()[5] for line in lines if line.startswith(wanted)), None)
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(any_socket, 0x8915, name.encode().ljust(40, b"\0"))  # SIOCGIFADDR
            except OSError:  # it has no address of this family
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
