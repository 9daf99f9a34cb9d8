"""Write an OCI image archive for `ctr images import`, out of layers and a configuration.

    oci_image.py NAME ARCHIVE CONFIG.json LAYER.tar...

A layer is a tar that is not compressed. The configuration is the `config` object of the image:
User, Env, Cmd.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

_TYPE = "application/vnd.oci.image."
_CHUNK = 1 << 20


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def blob(tar: tarfile.TarFile, data: bytes, kind: str) -> dict[str, Any]:
    """Add a document, and return how others refer to it."""
    found = hashlib.sha256(data).hexdigest()
    add(tar, f"blobs/sha256/{found}", data)
    return {"mediaType": _TYPE + kind, "digest": f"sha256:{found}", "size": len(data)}


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a small file."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def main(name: str, archive: str, config: str, *layers: str) -> None:
    """Write the archive."""
    digests = [digest(Path(layer)) for layer in layers]
    image = {
        "architecture": "amd64",
        "os": "linux",
        "config": json.loads(Path(config).read_text()),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{each}" for each in digests]},
    }
    with tarfile.open(archive, "w") as tar:
        described = []
        for layer, found in zip(layers, digests, strict=True):
            tar.add(layer, f"blobs/sha256/{found}")
            size = Path(layer).stat().st_size
            described.append(
                {"mediaType": f"{_TYPE}layer.v1.tar", "digest": f"sha256:{found}", "size": size}
            )
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{_TYPE}manifest.v1+json",
            "config": blob(tar, json.dumps(image).encode(), "config.v1+json"),
            "layers": described,
        }
        entry = blob(tar, json.dumps(manifest).encode(), "manifest.v1+json")
        named = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
        entry["annotations"] = dict.fromkeys(named, name)
        add(tar, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
