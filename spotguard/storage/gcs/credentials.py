"""Who Google Cloud Storage will take us for: application default credentials."""

from __future__ import annotations

import os

from spotguard.errors import MissingExtra, StoreError
from spotguard.storage.credentials import Identity
from spotguard.storage.http.private_random import draw_privately

_LOGIN_HINT = (
    "run `gcloud auth application-default login`, give the machine a service account, "
    "or set GOOGLE_APPLICATION_CREDENTIALS to a key file"
)


def gcs_identity(url: str) -> Identity:
    """Return the credentials for a bucket; no token is asked for."""
    if os.environ.get("STORAGE_EMULATOR_HOST", "").strip():
        return Identity(source="STORAGE_EMULATOR_HOST, which asks for none")
    try:
        import google.auth
        from google.auth.exceptions import GoogleAuthError
    except ImportError:
        raise MissingExtra(
            "stores at gs:// need google-auth, which is not installed",
            hint="pip install 'spotguard[gcp]'",
        ) from None
    draw_privately("google")
    try:
        found, _project = google.auth.default()
    except (GoogleAuthError, OSError) as problem:  # what it says may quote the key file
        raise StoreError(
            f"there are no usable credentials for {url} ({type(problem).__name__})",
            hint=_LOGIN_HINT,
        ) from None
    who = getattr(found, "service_account_email", None)
    if type(found).__module__.startswith("google.auth.compute_engine"):
        return Identity(
            source="this machine's service account", who=None if who == "default" else who
        )
    if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return Identity(source="GOOGLE_APPLICATION_CREDENTIALS", who=who)
    return Identity(source="gcloud auth application-default login", who=who)
