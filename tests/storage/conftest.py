"""The servers that several of these files need, each started once."""

from tests.storage.dead_address import dead
from tests.storage.lanes import lane, moto_small_parts
from tests.storage.servers import azurite, gcs, moto, rclone

__all__ = ["azurite", "dead", "gcs", "lane", "moto", "moto_small_parts", "rclone"]
