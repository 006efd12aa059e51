"""Code that every kvscout service shares. Imports no service."""

__version__ = "0.2.0"
