"""The APIs, over HTTP."""
