"""`kvscout serve`: gateway, indexer and scheduler in one process."""

from kvscout_serve.main import main as command

__all__ = ["command"]
