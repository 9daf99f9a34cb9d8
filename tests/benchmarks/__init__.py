"""Tests of the benchmarks, which compare with what torch has today: an old one lacks the rivals."""

from __future__ import annotations

import pytest
from torch.distributed.checkpoint import staging

if not hasattr(staging, "DefaultStager"):
    pytest.skip("benchmarks compare with a newer torch", allow_module_level=True)
