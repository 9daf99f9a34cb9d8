"""The version, in the one place that both the job and the controller may import."""

__version__ = "0.1.0"
