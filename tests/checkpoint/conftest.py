"""The servers that some of these files need, each started once."""

from tests.storage.harness.lanes import lane, moto_small_parts
from tests.storage.harness.servers import azurite

__all__ = ["azurite", "lane", "moto_small_parts"]
