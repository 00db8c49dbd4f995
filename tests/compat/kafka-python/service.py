"""Replaces kafka-python's `test/service.py`, which its source archive lacks.

The fixtures import it to start servers. Here the server is already running, and nothing may start another one.
"""


class ExternalService:
    """A server that xtask has started and will stop."""

    def __init__(self, host, port):
        self.host = host
        self.port = port

    def open(self):
        pass

    def close(self):
        pass

    def dump_logs(self):
        pass


class SpawnedService:
    """A server that the tests would start themselves."""

    def __init__(self, *_args, **_kwargs):
        raise RuntimeError("the tests may not start their own server here")
