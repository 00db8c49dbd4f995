"""Checks what must survive a restart of the server: run `restart.py write`, restart the server, run
`restart.py verify 1 ID...` with the topic IDs that `write` printed, restart it again, run `restart.py verify 2 ID...`.

`restart.py live` stays connected while the server restarts: it writes until its standard input ends, then verifies."""

import sys
import threading

import tap
from common import *
from confluent_kafka import ConsumerGroupState, TopicCollection, TopicPartition
from confluent_kafka.admin import NewPartitions, NewTopic, OffsetSpec
from tap import test

RECORDS = 20_000
MORE_RECORDS = 100
BASE_TIMESTAMP = 1_600_000_000_000


def held(partition):
    """Number of records in the partition before this pass: each pass adds some to partition 1."""
    earlier_passes = int(sys.argv[2]) - 1
    return RECORDS + (MORE_RECORDS * earlier_passes if partition == 1 else 0)


def topic_ids():
    described = admin().describe_topics(TopicCollection(["kept", "grown"]))
    return {name: str(future.result(PATIENCE_SECONDS).topic_id) for name, future in described.items()}


def write():
    create_topics([NewTopic("kept", 3, 1), NewTopic("grown", 1, 1), NewTopic("dropped", 1, 1)])
    admin().create_partitions([NewPartitions("grown", 4)])["grown"].result(PATIENCE_SECONDS)
    client = producer(**{"compression.type": "zstd"})
    for partition in range(3):
        equal(send(client, "kept", numbered(RECORDS, partition)), list(range(RECORDS)), "offsets")
    for n in range(10):
        client.produce("grown", value=b"%d" % n, partition=0, timestamp=BASE_TIMESTAMP + n * 1000)
    equal(client.flush(PATIENCE_SECONDS), 0, "records left")
    send(client, "dropped", numbered(100))
    admin().delete_topics(["dropped"])["dropped"].result(PATIENCE_SECONDS)

    reader = consumer("survivors")
    reader.subscribe(["kept"])
    read(reader, 3 * RECORDS)
    offsets = [TopicPartition("kept", partition, 1000 * (partition + 1), metadata=f"note {partition}")
               for partition in range(3)]
    for offset in range(500):  # many commits, of which only the last counts
        reader.commit(offsets=[TopicPartition("kept", 0, offset)], asynchronous=False)
    reader.commit(offsets=offsets, asynchronous=False)
    reader.close()
    print("topic ids:", " ".join(f"{name}={id}" for name, id in sorted(topic_ids().items())))


@test
def topics_partitions_and_ids_are_the_same():
    listed = admin().list_topics(timeout=PATIENCE_SECONDS).topics
    equal(sorted(name for name in listed if not name.startswith("_")), ["grown", "kept"], "topics")
    equal(len(listed["kept"].partitions), 3, "partitions of kept")
    equal(len(listed["grown"].partitions), 4, "partitions of grown")
    before = dict(pair.split("=", 1) for pair in sys.argv[3:])
    equal(topic_ids(), before, "topic ids")


@test
def every_record_is_there_once_and_in_order():
    for partition in range(3):
        count = held(partition)
        equal(watermarks("kept", partition), (0, count), f"watermarks of partition {partition}")
        messages = read_partition("kept", partition, 0, count)
        equal([message.offset() for message in messages], list(range(count)), "offsets")
        equal([message.key() for message in messages], [b"k%d" % n for n in range(count)], "keys")
        equal([message.value() for message in messages], [b"value %d" % n for n in range(count)], "values")


@test
def offsets_are_found_by_time_as_before():
    partition = TopicPartition("grown", 0)
    found = admin().list_offsets({partition: OffsetSpec.for_timestamp(BASE_TIMESTAMP + 4500)})
    equal(found[partition].result(PATIENCE_SECONDS).offset, 5, "the record at a time")


@test
def the_group_goes_on_where_it_committed():
    reader = consumer("survivors")
    stored = reader.committed([TopicPartition("kept", partition) for partition in range(3)], PATIENCE_SECONDS)
    equal([(each.offset, each.metadata) for each in stored],
          [(1000, "note 0"), (2000, "note 1"), (3000, "note 2")], "committed offsets")
    reader.subscribe(["kept"])
    messages = read(reader, sum(held(partition) for partition in range(3)) - 6000)
    for partition in range(3):
        offsets = [message.offset() for message in messages if message.partition() == partition]
        equal(offsets, list(range(1000 * (partition + 1), held(partition))), f"offsets of partition {partition}")
    reader.close()


@test
def the_group_is_listed_without_members():
    listed = admin().list_consumer_groups().result(PATIENCE_SECONDS)
    check("survivors" in [group.group_id for group in listed.valid], "the group is listed")
    described = admin().describe_consumer_groups(["survivors"])["survivors"].result(PATIENCE_SECONDS)
    equal(described.state, ConsumerGroupState.EMPTY, "state")


@test
def new_records_follow_the_old_ones():
    end = held(1)
    offsets = send(producer(), "kept", numbered(MORE_RECORDS, 1, end))
    equal(offsets, list(range(end, end + MORE_RECORDS)), "offsets of new records")
    messages = read_partition("kept", 1, end - 1, MORE_RECORDS + 1)
    equal([message.value() for message in messages],
          [b"value %d" % n for n in range(end - 1, end + MORE_RECORDS)], "values across the restart")


def live():
    """Runs a producer and a group member that stay connected while the server restarts."""
    create_topic("live", 2)
    client = producer(**{"reconnect.backoff.max.ms": 500, "message.timeout.ms": 0})
    member = consumer("live", **{"reconnect.backoff.max.ms": 500})
    member.subscribe(["live"])
    errors, sent, seen = [], [0, 0], [[], []]

    def drain(wait):
        for message in member.consume(1000, wait):
            if message.error() is None:
                seen[message.partition()].append((message.offset(), message.value()))

    finished = False
    print("writing", flush=True)

    def wait_for_end():
        nonlocal finished
        sys.stdin.read()
        finished = True

    watcher = threading.Thread(target=wait_for_end)
    watcher.start()
    while not finished:
        for partition in range(2):
            client.produce("live", value=b"%d" % sent[partition], partition=partition,
                           on_delivery=lambda error, _: error is None or errors.append(error))
            sent[partition] += 1
        client.poll(0)
        drain(0.01)
    equal(client.flush(PATIENCE_SECONDS), 0, "records left")
    equal(errors, [], "delivery errors")
    eventually("everything was delivered to the member", lambda: drain(0.2) or all(
        {offset for offset, _ in seen[partition]} >= set(range(sent[partition])) for partition in range(2)))
    for partition in range(2):
        # A member that rejoins may receive records again, but never a different record at the same offset.
        equal(sorted(set(seen[partition])), [(n, b"%d" % n) for n in range(sent[partition])],
              f"records of partition {partition}")
    member.close()
    print(f"{sum(sent)} records written across the restart", flush=True)


if __name__ == "__main__":
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "write":
        write()
    elif command == "live":
        live()
    elif command == "verify":
        tap.main([])
    else:
        sys.exit(__doc__)
