"""The servers that several of these files need, each started once."""

from tests.storage.harness.dead_address import dead
from tests.storage.harness.lanes import lane, moto_small_parts
from tests.storage.harness.servers import azurite, gcs, moto, rclone

__all__ = ["azurite", "dead", "gcs", "lane", "moto", "moto_small_parts", "rclone"]
