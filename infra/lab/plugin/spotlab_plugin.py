"""For SkyPilot's API server of a lab, which has no internet to find."""

from sky.server import plugins


class NoInternet(plugins.BasePlugin):
    """Managed jobs stand still while 8.8.8.8 cannot be reached; in a lab it need not."""

    name = "spotlab-no-internet"

    def install(self, extension_context):
        """Take the network for reachable."""
        from sky.backends import backend_utils

        async def reachable():
            return None

        backend_utils.async_check_network_connection = reachable
        backend_utils.check_network_connection = lambda: None
