"""Reader of a Kubernetes API: pods and InferencePools, by list and watch.

Nobody's client library: the four that were measured take 36 to 71 MiB, this 34 with aiohttp, which is here anyway.
"""
