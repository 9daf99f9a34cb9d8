"""The Slurm lab's metadata service, telling of the instance that EC2 made rather than of one.

The state file holds one more key, `instance`. The role's credentials are served as well: SkyPilot's
autostop, with which a cluster ends itself, wants them.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "lab"))

import imds

_invented = imds.aws_values
_META = "/latest/meta-data/"
_DOCUMENT = "/latest/dynamic/instance-identity/document"


def aws_values(state: dict[str, Any]) -> dict[str, str]:
    """Return every path of the service with its answer."""
    known = state["instance"]
    values: dict[str, str] = _invented(state)
    identity = json.loads(values[_DOCUMENT])
    identity.update(
        availabilityZone=known["zone"],
        imageId=known["image"],
        instanceId=known["id"],
        instanceType=known["type"],
        privateIp=known["ip"],
        region=known["region"],
    )
    values[_DOCUMENT] = json.dumps(identity, indent=2)
    meta = {
        "ami-id": known["image"],
        "hostname": known["name"],
        "local-hostname": known["name"],
        "instance-id": known["id"],
        "instance-life-cycle": known["market"],
        "instance-type": known["type"],
        "local-ipv4": known["ip"],
        "public-ipv4": known["public"] or "",
        "placement/region": known["region"],
        "placement/availability-zone": known["zone"],
        "placement/availability-zone-id": known["zone_id"],
        f"iam/security-credentials/{known['role']}": json.dumps(_credentials()),
    }
    if known["market"] != "spot":
        for path in ("spot/instance-action", "spot/termination-time"):
            values.pop(_META + path, None)
    values.update({_META + path: value for path, value in meta.items()})
    return values


def _credentials() -> dict[str, str]:
    now = time.time()
    return {
        "Code": "Success",
        "Type": "AWS-HMAC",
        "LastUpdated": imds.utc(now),
        "AccessKeyId": "ASIAEC2LABEC2LABEC2L",
        "SecretAccessKey": "ec2lab",
        "Token": "ec2lab",
        "Expiration": imds.utc(now + 6 * 3600),
    }


imds.aws_values = aws_values

if __name__ == "__main__":
    imds.main(sys.argv[1:])
