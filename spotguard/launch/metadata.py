"""Whose metadata service a node has, where SkyPilot cannot say: Slurm may run in any cloud.

Each cloud's service is known by its own handshake; nothing is guessed from a time-out. Asked once,
before the job starts. Where nothing listens on the link-local address, there is none.
"""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

DETECT = "detect"
NONE = "none"
_ADDRESS = "169.254.169.254:80"
_TIMEOUT_S = 1.0


def detect(address: str = _ADDRESS) -> str:
    """Return `aws`, `gcp`, `azure`, or `none`. Blocks for milliseconds, without a service 1 s."""
    for cloud, is_it in _HANDSHAKES.items():
        try:
            if is_it(address):
                return cloud
        except (OSError, http.client.HTTPException):
            return NONE  # nobody listens, so nobody else does
    return NONE


def _is_aws(address: str) -> bool:
    # docs.aws.amazon.com/AWSEC2/latest/UserGuide/configuring-instance-metadata-service.html
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    status, _ = _ask(address, "PUT", "/latest/api/token", lifetime)
    return status == http.client.OK


def _is_gcp(address: str) -> bool:
    # cloud.google.com/compute/docs/metadata/querying-metadata: the answer carries the flavour too
    flavour = "Metadata-Flavor"
    status, headers = _ask(
        address, "GET", "/computeMetadata/v1/instance/preempted", {flavour: "Google"}
    )
    return status == http.client.OK and headers.get(flavour.lower()) == "Google"


def _is_azure(address: str) -> bool:
    # learn.microsoft.com/azure/virtual-machines/instance-metadata-service. Not by its scheduled
    # events: the first question for those, which enables them, may take two minutes.
    path = "/metadata/instance?api-version=2021-02-01"
    status, _ = _ask(address, "GET", path, {"Metadata": "true"})
    return status == http.client.OK


_HANDSHAKES: dict[str, Callable[[str], bool]] = {
    "aws": _is_aws,
    "gcp": _is_gcp,
    "azure": _is_azure,
}


def _ask(
    address: str, method: str, path: str, headers: dict[str, str]
) -> tuple[int, dict[str, str]]:
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        answer.read(1 << 16)
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()
