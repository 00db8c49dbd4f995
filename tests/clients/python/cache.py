"""redis-py against a running `alluvium cache serve`: `BOOTSTRAP=127.0.0.1:6379 python cache.py [test ...]`."""

import sys
import threading

import redis

import tap
from tap import check, equal, eventually, test

HOST, PORT = tap.BOOTSTRAP.rsplit(":", 1)


def connect(**options):
    return redis.Redis(host=HOST, port=int(PORT), socket_timeout=tap.PATIENCE_SECONDS, **options)


def in_both_versions(function):
    """Runs a test with version 2 of the protocol and with version 3."""
    def both():
        for protocol in (2, 3):
            function(connect(protocol=protocol), f"python:{function.__name__}:{protocol}:")
    both.__name__ = function.__name__
    return both


@test
@in_both_versions
def values_are_set_read_and_deleted(client, prefix):
    key, value = prefix + "a", bytes(range(256)) * 100
    equal(client.get(key), None, "before")
    equal(client.set(key, value), True, "set")
    equal(client.get(key), value, "get")
    equal(client.exists(key, prefix + "b"), 1, "exists")
    equal(client.mset({prefix + "b": "2", prefix + "c": "3"}), True, "mset")
    equal(client.mget(key, prefix + "none", prefix + "c"), [value, None, b"3"], "mget")
    equal(client.delete(key, prefix + "b", prefix + "none"), 2, "delete")
    equal(client.type(prefix + "c"), b"string", "type")


@test
@in_both_versions
def options_of_set(client, prefix):
    key = prefix + "a"
    equal(client.set(key, "1", xx=True), None, "xx without a value")
    equal(client.set(key, "1", nx=True, ex=1000), True, "nx")
    equal(client.set(key, "2", nx=True), None, "nx again")
    check(900 < client.ttl(key) <= 1000, "ttl")
    equal(client.set(key, "2", keepttl=True, get=True), b"1", "get and keepttl")
    check(client.pttl(key) > 900_000, "it was kept")
    equal(client.set(key, "3"), True, "set")
    equal(client.ttl(key), -1, "no end")
    client.set(key, "4", px=20)
    eventually("it expires", lambda: client.get(key) is None)
    equal(client.ttl(key), -2, "ttl without a value")
    equal(client.setnx(key, "5"), True, "setnx")
    equal(client.getset(key, "6"), b"5", "getset")


@test
@in_both_versions
def pipelines_are_answered_in_their_order(client, prefix):
    pipeline = client.pipeline(transaction=False)
    for number in range(2000):
        pipeline.set(f"{prefix}{number}", number)
    equal(pipeline.execute(), [True] * 2000, "written")
    for number in range(2000):
        pipeline.get(f"{prefix}{number}")
    equal(pipeline.execute(), [b"%d" % number for number in range(2000)], "read")
    found = set(client.scan_iter(match=prefix + "*", count=100))
    equal(found, {f"{prefix}{number}".encode() for number in range(2000)}, "scanned")


@test
def a_lock_has_one_holder():
    client = connect()
    held = []

    def race(me):
        mine = connect()
        for number in range(50):
            if mine.set(f"python:lock:{number}", me, nx=True, ex=1000):
                held.append((number, me))

    threads = [threading.Thread(target=race, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    equal(sorted(number for number, _ in held), list(range(50)), "one holder each")
    for number, me in held:
        equal(client.get(f"python:lock:{number}"), b"%d" % me, f"lock {number}")


@test
def what_is_not_there_is_an_error():
    client = connect()
    for attempt in (lambda: client.lpush("python:list", 1), lambda: client.flushall(),
                    lambda: client.pipeline(transaction=True).set("python:x", 1).execute()):
        try:
            attempt()
        except redis.ResponseError:
            continue
        raise AssertionError("no error")
    check(client.ping(), "the connection stays open")
    client.set("python:info", 1)
    check(client.info()["redis_version"], "a version")
    check(client.info()["db0"]["keys"] > 0, "keys")
    equal(client.info("replication")["role"], "master", "its role")
    equal(client.config_get("appendonly"), {"appendonly": "no"}, "a setting")


if __name__ == "__main__":
    tap.main(sys.argv[1:])
