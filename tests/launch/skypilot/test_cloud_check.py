from __future__ import annotations

import inspect

import pytest

from spotguard.launch.skypilot.cloud_check import reason_in, without_secrets

# As SkyPilot 0.14.1 printed it.
AWS = (
    "Checking credentials to enable infra for SkyPilot.\n\x1b[2m  AWS: disabled \x1b[0m\x1b[0m\n"
    "    Reason [compute, storage]: AWS credentials are not set. Run the following commands:\n"
    "      $ aws configure\n    Details: `aws sts get-caller-identity` failed with error: "
    "[botocore.exceptions.NoCredentialsError] Unable to locate credentials.\n"
    "\n\x1b[32m\U0001f389 Enabled infra \U0001f389\x1b[0m\n  No infra to check/enabled.\n"
)
KUBERNETES = (
    "\x1b[2m  Kubernetes: disabled \x1b[0m\x1b[0m\n    Reason [compute]: `socat` is required to "
    "setup Kubernetes cloud with `portforward` default networking mode and it is not installed. \n"
    "    On MacOS, install with: \n      $ brew install socat netcat\n"
)
SLURM = (
    "\x1b[2m  Slurm: disabled \x1b[0m\x1b[0m\n    Reason [compute]:     \n        Allowed clusters:"
    "\n        \x1b[2m\u2514\u2500\u2500 \x1b[0mspotlab: disabled. Credential check failed: "
    "sky.exceptions.CommandError: Command sinfo failed with return code 255.\n    \x1b[31mFailed "
    "to get Slurm cluster information.\x1b[0m\n    \n    \n    ssh: connect to host 127.0.0.1 "
    "port 22: Connection refused\n\n\x1b[32m\U0001f389 Enabled infra \U0001f389\x1b[0m\n"
)
CRASHED = (
    "    Reason [compute]: Traceback (most recent call last):\n  File x\nValueError: no JSON\n"
)


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        (AWS, "AWS credentials are not set."),
        (
            KUBERNETES,
            "`socat` is required to setup Kubernetes cloud with `portforward` default networking "
            "mode and it is not installed.",
        ),
        (
            SLURM,
            "spotlab: Credential check failed: sky.exceptions.CommandError: Command sinfo failed "
            "with return code 255.",
        ),
        (CRASHED, "ValueError: no JSON"),
        ("    Reason [storage]: no bucket.\n", "SkyPilot does not say why"),
        ("", "SkyPilot does not say why"),
    ],
)
def test_the_reason_is_one_sentence_of_skypilots(printed: str, reason: str) -> None:
    """Without colours, trees and commands."""
    assert reason_in(printed) == reason


@pytest.mark.parametrize(
    "secret",
    [
        "AKIAIOSFODNN7EXAMPLE",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJzIn0.c2ln",
        "ya29.a0AfH6SMBx-y_z",
        "aws_secret_access_key = hunter2hunter2",
        '"client_secret": "hunter2hunter2"',
        "https://ada:hunter2hunter2@login.example.com",
        "0pen-sesame",
    ],
)
def test_no_secret_is_told(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what looks like one, nor what one is in this environment."""
    monkeypatch.setenv("MY_TOKEN", "0pen-sesame")
    told = without_secrets(f"the login {secret} is refused by arn:aws:iam::123456789012:user/ada.")
    assert "***" in told
    for word in ("hunter2", "sesame", "AKIA", "wJal", "eyJ", "ya29"):
        assert word not in told
    assert told.endswith("is refused by arn:aws:iam::123456789012:user/ada.")


def test_skypilots_check_is_asked_as_it_wants_to_be() -> None:
    """The calls that are made, by the SDK's own signatures."""
    pytest.importorskip("sky")
    from sky.client import sdk as client

    inspect.signature(client.check).bind(("aws",), verbose=False)
    inspect.signature(client.enabled_clouds).bind()
    inspect.signature(client.stream_and_get).bind("id", output_stream=None)
