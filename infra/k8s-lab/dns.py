"""The cluster's DNS: the services of the API server by their names; nothing else exists.

    dns.py ADDRESS API CA CERTIFICATE KEY      answers at ADDRESS:53 (UDP)

A headless service is its endpoints' addresses, another one its cluster IP. Debian packages no DNS
of Kubernetes.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import sys
import threading
import urllib.request
from dataclasses import dataclass
from typing import Any

_SUFFIX = ".svc.cluster.local"
_A, _IN, _TTL_S = 1, 1, 1
_ANSWER, _UNKNOWN = 0x8580, 3


@dataclass(frozen=True)
class Services:
    """What the API server knows by name."""

    api: str
    trust: ssl.SSLContext

    def addresses(self, name: str) -> list[str]:
        """Return the IPv4 addresses of a service; none if there is none of that name."""
        parts = name.removesuffix(_SUFFIX).split(".")
        if not name.endswith(_SUFFIX) or len(parts) != 2:
            return []
        service, namespace = parts
        address = self._get(f"namespaces/{namespace}/services/{service}").get("spec", {})
        if not address:
            return []
        if address.get("clusterIP") != "None":
            return [address["clusterIP"]]
        subsets = self._get(f"namespaces/{namespace}/endpoints/{service}").get("subsets") or []
        return [each["ip"] for subset in subsets for each in subset.get("addresses") or []]

    def _get(self, path: str) -> dict[str, Any]:
        try:
            url = f"{self.api}/api/v1/{path}"
            with urllib.request.urlopen(url, context=self.trust, timeout=3) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (OSError, ValueError):
            return {}


def answer(question: bytes, services: Services) -> bytes:
    """Return what is answered to a query. RFC 1035, section 4."""
    labels, at = [], 12
    while question[at]:
        labels.append(question[at + 1 : at + 1 + question[at]].decode())
        at += 1 + question[at]
    (kind,) = struct.unpack("!H", question[at + 1 : at + 3])
    found = services.addresses(".".join(labels).lower())
    records = found if kind == _A else []
    flags = _ANSWER | (0 if found else _UNKNOWN)
    head = question[:2] + struct.pack("!HHHHH", flags, 1, len(records), 0, 0)
    pointer = b"\xc0\x0c" + struct.pack("!HHIH", _A, _IN, _TTL_S, 4)
    return head + question[12 : at + 5] + b"".join(pointer + socket.inet_aton(x) for x in records)


def main(address: str, api: str, ca: str, certificate: str, key: str) -> None:
    """Answer for ever."""
    trust = ssl.create_default_context(cafile=ca)
    trust.load_cert_chain(certificate, key)
    services = Services(api, trust)
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, 53))

    def serve(question: bytes, peer: tuple[str, int]) -> None:
        try:
            server.sendto(answer(question, services), peer)
        except (IndexError, UnicodeDecodeError, struct.error, OSError):
            return  # no question, or nobody who waits for the answer

    while True:
        threading.Thread(target=serve, args=server.recvfrom(2048), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
