"""What holds for every test."""

from __future__ import annotations

import os

# Set before anything imports torch. Test workers share the cores: with torch's own threads on top
# of them, small operations wait for each other and the suite takes four times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("spotguard", deadline=None)
settings.load_profile("spotguard")
