"""Where this EC2 stands: read once from the command line and the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DATA = Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp/ec2-lab/data").absolute()
ADDRESS = sys.argv[2] if len(sys.argv) > 2 else "172.31.0.1"
PORT = int(sys.argv[3]) if len(sys.argv) > 3 else 5566
IMAGE = Path(os.environ.get("EC2LAB_IMAGE", DATA / "image"))
IMAGES = DATA / "disks" / "images"
"""What CreateImage made, each in a folder of its own: the layers of a node's disk.

Not on the machine's own disk, all of which is a layer already: overlay takes none that lies in it.
"""
BRIDGE = os.environ.get("EC2LAB_BRIDGE", "ec2lab0")
PUBLIC = os.environ.get("EC2LAB_PUBLIC", "198.51.100")
"""Public addresses: TEST-NET-2, which nobody has."""
REGIONS = os.environ.get("EC2LAB_REGIONS", "us-east-1 us-east-2 us-west-2 eu-west-1").split()
CATALOGUE = Path(os.environ.get("EC2LAB_CATALOGUE", Path(__file__).parents[1] / "catalogue"))
"""The prices that hold at first; a price that changes is written here, too."""
FRESH_ACCOUNT = bool(os.environ.get("EC2LAB_FRESH_ACCOUNT"))
"""True if SkyPilot is to make the role of its nodes itself, which takes it half a minute."""
INFRA = Path(__file__).parents[2]
AMI = "ami-0ec21ab0ec21ab000"
"""The plain one, on whose nodes SkyPilot installs its own wheel, as on those of its default AMI."""
WARM_AMI = "ami-0ec21ab0ec21ab001"
"""One as `infra/warm-image` makes it: the wheel is there, and compiled."""
ACCOUNT = "123456789012"
ADMIN_KEY = "AKIAEC2LABADMINADMIN"
"""Who uses it is never refused, and meets no fault: the tests' own looks."""
CLIENT_KEY = "AKIAEC2LABEC2LABEC2L"
ROLE = "skypilot-v1"


def prepare() -> None:
    """Set what moto reads when it is imported, so this comes first."""
    import json

    (DATA / "nodes").mkdir(parents=True, exist_ok=True)
    (DATA / "disks").mkdir(parents=True, exist_ok=True)
    amis = DATA / "amis.json"
    image = {
        "ami_id": AMI,
        "name": "ec2-lab",
        "description": "Debian with the SkyPilot runtime",
        "owner_id": ACCOUNT,
        "public": True,
        "virtualization_type": "hvm",
        "architecture": "x86_64",
        "state": "available",
        "hypervisor": "xen",
        "root_device_type": "ebs",
        "root_device_name": "/dev/sda1",
        "creation_date": "2026-01-01T00:00:00.000Z",
    }
    warm = {**image, "ami_id": WARM_AMI, "name": "ec2-lab-warm"}
    amis.write_text(json.dumps([image, warm]))
    os.environ["MOTO_AMIS_PATH"] = str(amis)
    os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"
    os.environ["MOTO_PORT"] = str(PORT)
