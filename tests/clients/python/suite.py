"""confluent-kafka (librdkafka) against a running server: `BOOTSTRAP=127.0.0.1:9092 python suite.py [test ...]`."""

import os
import sys
import threading
import time

from confluent_kafka import (OFFSET_BEGINNING, OFFSET_END, OFFSET_INVALID, ConsumerGroupState,
                             ConsumerGroupType, KafkaError, KafkaException, TopicCollection, TopicPartition)
from confluent_kafka.admin import ConfigResource, NewPartitions, NewTopic, OffsetSpec, ResourceType

import tap
from common import *
from tap import test


def expect_error(code, action, what):
    try:
        action()
    except KafkaException as error:
        equal(error.args[0].code(), code, what)
        return
    raise AssertionError(f"{what}: no error")


@test
def topics_are_created_listed_described_and_deleted():
    create_topics([NewTopic("admin-a", 3, 1), NewTopic("admin-b", 1, 1)])
    listed = admin().list_topics(timeout=PATIENCE_SECONDS)
    equal(len(listed.topics["admin-a"].partitions), 3, "partitions of admin-a")
    equal(len(listed.topics["admin-b"].partitions), 1, "partitions of admin-b")
    expect_error(KafkaError.TOPIC_ALREADY_EXISTS, lambda: create_topic("admin-a"),
                 "creating a topic twice")

    described = admin().describe_topics(TopicCollection(["admin-a"]))["admin-a"].result(PATIENCE_SECONDS)
    equal([each.id for each in described.partitions], [0, 1, 2], "described partitions")
    check(described.topic_id is not None, "a topic has an id")

    admin().create_partitions([NewPartitions("admin-a", 5)])["admin-a"].result(PATIENCE_SECONDS)
    eventually("five partitions", lambda: len(
        admin().list_topics("admin-a", timeout=PATIENCE_SECONDS).topics["admin-a"].partitions) == 5)

    admin().delete_topics(["admin-a"])["admin-a"].result(PATIENCE_SECONDS)
    eventually("admin-a is gone", lambda: "admin-a" not in admin().list_topics(timeout=PATIENCE_SECONDS).topics)
    check("admin-b" in admin().list_topics(timeout=PATIENCE_SECONDS).topics, "admin-b is still there")
    expect_error(KafkaError.UNKNOWN_TOPIC_OR_PART,
                 lambda: admin().delete_topics(["admin-a"])["admin-a"].result(PATIENCE_SECONDS),
                 "deleting a topic twice")


@test
def a_topic_created_again_is_empty():
    create_topic("again")
    send(producer(), "again", numbered(10))
    equal(watermarks("again"), (0, 10), "watermarks before")
    admin().delete_topics(["again"])["again"].result(PATIENCE_SECONDS)
    eventually("the topic is gone", lambda: "again" not in admin().list_topics(timeout=PATIENCE_SECONDS).topics)
    create_topic("again")
    equal(watermarks("again"), (0, 0), "watermarks after")


@test
def invalid_topics_are_refused():
    expect_error(KafkaError.TOPIC_EXCEPTION, lambda: create_topic("no spaces"), "an invalid name")
    expect_error(KafkaError.INVALID_PARTITIONS, lambda: create_topic("none", 0), "no partitions")


@test
def the_cluster_describes_itself():
    cluster = admin().describe_cluster().result(PATIENCE_SECONDS)
    host, port = tap.BOOTSTRAP.rsplit(":", 1)
    check((host, int(port)) in [(node.host, node.port) for node in cluster.nodes],
          f"{tap.BOOTSTRAP} is one of the nodes")
    check(cluster.cluster_id, "the cluster has an id")
    resource = ConfigResource(ResourceType.TOPIC, create_topic("described"))
    config = admin().describe_configs([resource])[resource].result(PATIENCE_SECONDS)
    check(int(config["max.message.bytes"].value) > 0, "max.message.bytes is a number")


@test
def an_idempotent_producer_gets_dense_offsets():
    create_topic("idempotent", 3)
    records = [record for partition in range(3) for record in numbered(5000, partition)]
    offsets = send(producer(), "idempotent", records)
    for partition in range(3):
        equal(offsets[partition * 5000:(partition + 1) * 5000], list(range(5000)),
              f"offsets of partition {partition}")
        messages = read_partition("idempotent", partition, 0, 5000)
        equal([message.value() for message in messages], [b"value %d" % n for n in range(5000)],
              f"values of partition {partition}")
        equal([message.offset() for message in messages], list(range(5000)), "offsets read")


@test
def every_codec_and_acknowledgement_level_arrives():
    for codec in ["none", "gzip", "snappy", "lz4", "zstd"]:
        for acks in ["0", "1", "all"]:
            topic = create_topic(f"codec-{codec}-{acks}")
            idempotent = acks == "all"
            client = producer(**{"compression.type": codec, "acks": acks, "enable.idempotence": idempotent})
            values = [os.urandom(50) * (n % 50) + b"%d" % n for n in range(500)]
            send(client, topic, [(0, None, value, None) for value in values])
            messages = read_partition(topic, 0, 0, 500)
            equal([message.value() for message in messages], values, f"values with {codec}, acks {acks}")


@test
def keys_values_headers_and_timestamps_come_back():
    create_topic("shapes")
    shapes = [
        (0, None, None, None),
        (0, b"", b"", None),
        (0, b"key", None, [("h", b"1"), ("h", b"2"), ("empty", b""), ("null", None)]),
        (0, None, b"\x00\xff\n\r", [("", b"no name")]),
        (0, "k\u00e9y".encode(), "v\u00e4lue \U0001f30a".encode(), [("n\u00e4me", bytes(range(256)))]),
    ]
    before = int(time.time() * 1000)
    send(producer(), "shapes", shapes)
    after = int(time.time() * 1000)
    for message, (_, key, value, headers) in zip(read_partition("shapes", 0, 0, len(shapes)), shapes):
        equal(message.key(), key, "key")
        equal(message.value(), value, "value")
        equal(message.headers(), headers, "headers")
        check(before <= message.timestamp()[1] <= after, "the timestamp is the time of sending")


@test
def large_messages_up_to_the_limit_are_taken_and_larger_ones_refused():
    resource = ConfigResource(ResourceType.TOPIC, create_topic("large"))
    limit = int(admin().describe_configs([resource])[resource].result(PATIENCE_SECONDS)["max.message.bytes"].value)
    client = producer(**{"message.max.bytes": limit + 1_000_000, "compression.type": "none"})
    # The limit is on the batch: a v2 batch of one record adds 61 bytes of header and some for the record.
    values = [os.urandom(size) for size in (100_000, 500_000, limit - 200)]
    for value in values:
        send(client, "large", [(0, b"k", value, None)])
    expect_error(KafkaError.MSG_SIZE_TOO_LARGE,
                 lambda: send(client, "large", [(0, b"k", os.urandom(limit + 1), None)]), "a batch over the limit")
    # Readers whose limits are smaller than the message must still get it, and continue.
    reader = consumer("large", **{"fetch.message.max.bytes": 1000, "fetch.max.bytes": limit + 1_000_000})
    reader.assign([TopicPartition("large", 0, 0)])
    equal([message.value() for message in read(reader, 3)] == values, True, "the large values are equal")
    reader.close()


@test
def a_consumer_seeks():
    create_topic("seek")
    send(producer(), "seek", numbered(100))
    reader = consumer("seek")
    reader.assign([TopicPartition("seek", 0, OFFSET_BEGINNING)])
    equal(read(reader, 10)[0].offset(), 0, "from the beginning")
    for offset in [57, 3, 99]:
        reader.seek(TopicPartition("seek", 0, offset))
        equal(read(reader, 1)[0].offset(), offset, "after a seek")
    reader.close()
    tail = consumer("seek")
    tail.assign([TopicPartition("seek", 0, OFFSET_END)])
    equal(tail.consume(1, 1.0), [], "nothing to read at the end")
    send(producer(), "seek", [(0, None, b"fresh", None)])
    equal(read(tail, 1)[0].value(), b"fresh", "the record after the end")
    tail.close()


@test
def an_offset_out_of_range_resets_as_configured():
    create_topic("reset")
    send(producer(), "reset", numbered(10))
    reader = consumer("reset", **{"auto.offset.reset": "earliest"})
    reader.assign([TopicPartition("reset", 0, 1000)])
    equal(read(reader, 1)[0].offset(), 0, "reset to the earliest")
    reader.close()
    strict = consumer("reset", **{"auto.offset.reset": "error"})
    strict.assign([TopicPartition("reset", 0, 1000)])
    message = eventually("an error", lambda: strict.poll(0.5))
    equal(message.error().code(), KafkaError._AUTO_OFFSET_RESET, "the error of a strict consumer")
    strict.close()


@test
def offsets_are_found_by_time():
    create_topic("times")
    client = producer()
    base = 1_600_000_000_000
    for n in range(10):  # one batch each, so that the search is over batches
        client.produce("times", value=b"%d" % n, partition=0, timestamp=base + n * 1000)
        equal(client.flush(PATIENCE_SECONDS), 0, "records left")
    for n in range(10, 20):  # one batch for all, so that the search is within a batch
        client.produce("times", value=b"%d" % n, partition=0, timestamp=base + n * 1000)
    equal(client.flush(PATIENCE_SECONDS), 0, "records left")
    reader = consumer("times")

    def offset_for(timestamp):
        found = reader.offsets_for_times([TopicPartition("times", 0, timestamp)], PATIENCE_SECONDS)[0]
        check(found.error is None, f"no error: {found.error}")
        return found.offset

    equal(offset_for(base - 5000), 0, "before the first")
    for n in range(20):
        equal(offset_for(base + n * 1000), n, f"exactly record {n}")
    equal(offset_for(base + 3001), 4, "between two batches")
    equal(offset_for(base + 13_001), 14, "between two records of a batch")
    equal(offset_for(base + 1_000_000), OFFSET_END, "after the last")
    reader.close()

    partition = TopicPartition("times", 0)
    for spec, wanted in [(OffsetSpec.earliest(), 0), (OffsetSpec.latest(), 20),
                         (OffsetSpec.for_timestamp(base + 5000), 5)]:
        found = admin().list_offsets({partition: spec})[partition].result(PATIENCE_SECONDS)
        equal(found.offset, wanted, f"list_offsets {spec}")


@test
def a_group_reads_commits_and_goes_on():
    create_topic("group", 4)
    send(producer(), "group", [r for partition in range(4) for r in numbered(250, partition)])
    equal(committed("group-1", "group", 4), [OFFSET_INVALID] * 4, "no offsets at first")

    first = consumer("group-1")
    first.subscribe(["group"])
    equal(len(read(first, 1000)), 1000, "the first member reads all")
    first.commit(asynchronous=False)
    equal(committed("group-1", "group", 4), [250] * 4, "committed offsets")
    equal(committed("group-2", "group", 4), [OFFSET_INVALID] * 4, "another group has none")
    first.close()

    send(producer(), "group", [r for partition in range(4) for r in numbered(10, partition, 250)])
    second = consumer("group-1")
    second.subscribe(["group"])
    messages = read(second, 40)
    equal(sorted({message.offset() for message in messages}), list(range(250, 260)), "resumes where the first member stopped")
    second.commit(offsets=[TopicPartition("group", 2, 7, metadata="a note")], asynchronous=False)
    equal(committed("group-1", "group", 4), [250, 250, 7, 250], "one partition committed by hand, backwards")
    note = second.committed([TopicPartition("group", 2)], PATIENCE_SECONDS)[0]
    equal(note.metadata, "a note", "metadata of the commit")
    second.close()


@test
def two_members_share_the_partitions():
    create_topic("shared", 6)
    members = [consumer("sharing", **{"client.id": f"member-{n}"}) for n in range(2)]
    for member in members:
        member.subscribe(["shared"])

    def balanced():
        for member in members:
            check(member.consume(1, 0.2) == [], "the topic is empty")
        sizes = [len(member.assignment()) for member in members]
        return sizes == [3, 3]
    eventually("three partitions each", balanced)
    owned = [{each.partition for each in member.assignment()} for member in members]
    equal(owned[0] | owned[1], set(range(6)), "all partitions are owned")

    listed = admin().list_consumer_groups().result(PATIENCE_SECONDS)
    check("sharing" in [group.group_id for group in listed.valid], "the group is listed")
    described = admin().describe_consumer_groups(["sharing"])["sharing"].result(PATIENCE_SECONDS)
    equal(described.state, ConsumerGroupState.STABLE, "state of the group")
    equal(sorted(member.client_id for member in described.members), ["member-0", "member-1"], "members")
    assigned = [each.partition for member in described.members for each in member.assignment.topic_partitions]
    equal(sorted(assigned), list(range(6)), "assignment as described")

    members[0].close()

    def alone():
        check(members[1].consume(1, 0.2) == [], "the topic is empty")
        return len(members[1].assignment()) == 6
    eventually("the other member takes over", alone)
    members[1].close()
    described = admin().describe_consumer_groups(["sharing"])["sharing"].result(PATIENCE_SECONDS)
    equal(described.members, [], "an empty group has no members")


@test
def the_server_assigns_to_members_that_let_it():
    create_topic("assigned", 4)
    # The offsets of a classic group remain when a group of the other kind takes its name.
    send(producer(), "assigned", numbered(10))
    classic = consumer("assigned-group")
    classic.subscribe(["assigned"])
    equal(len(read(classic, 10)), 10, "read by the classic member")
    classic.commit(asynchronous=False)
    classic.close()

    members = [assigned_consumer("assigned-group", **{"client.id": f"member-{n}"}) for n in range(2)]
    members[0].subscribe(["assigned"])
    members[1].subscribe(["^assig.*d$"])
    settle(members, [2, 2])
    owned = [each.partition for member in members for each in member.assignment()]
    equal(sorted(owned), list(range(4)), "each partition has one owner")
    described = admin().describe_consumer_groups(["assigned-group"])["assigned-group"].result(PATIENCE_SECONDS)
    equal((described.state, described.type), (ConsumerGroupState.STABLE, ConsumerGroupType.CONSUMER), "the group")
    members[0].close()
    settle(members[1:], [4])
    send(producer(), "assigned", numbered(5))
    equal(len(read(members[1], 5)), 5, "only what the classic group has not read")
    members[1].commit(asynchronous=False)
    equal(committed("assigned-group", "assigned", 4)[0], 15, "the commit of a member")
    members[1].close()


def settle(members, sizes):
    def attempt():
        for member in members:
            equal(member.consume(1, 0.2), [], "no new records")
        return [len(member.assignment()) for member in members] == sizes
    eventually(f"assignments of {sizes} partitions", attempt)


@test
def a_commit_of_a_member_that_was_replaced_is_refused():
    create_topic("fenced", 1)
    send(producer(), "fenced", numbered(10))
    slow = consumer("fenced", **{"max.poll.interval.ms": 6000})
    slow.subscribe(["fenced"])
    equal(len(read(slow, 10)), 10, "read by the slow member")
    quick = consumer("fenced")
    quick.subscribe(["fenced"])
    # The slow member does not poll: it is removed after its poll interval, and the quick one takes over.
    eventually("the quick member owns the partition", lambda: quick.consume(1, 0.2) and quick.assignment())
    quick.commit(offsets=[TopicPartition("fenced", 0, 10)], asynchronous=False)
    try:
        slow.commit(offsets=[TopicPartition("fenced", 0, 3)], asynchronous=False)
        raise AssertionError("the commit of the slow member was accepted")
    except KafkaException:
        pass
    equal(committed("fenced", "fenced", 1), [10], "the commit of the quick member is kept")
    quick.close()
    # A consumer that has exceeded its poll interval has been seen to wait in close without a request
    # to the server. The test is about its commit, so it continues then.
    closing = threading.Thread(target=slow.close, daemon=True)
    closing.start()
    closing.join(60)
    if closing.is_alive():
        print("# the replaced consumer does not return from close", flush=True)


@test
def a_static_member_comes_back_without_a_rebalance():
    create_topic("static", 2)
    settings = {"group.instance.id": "instance-1", "session.timeout.ms": 30000}
    rebalances = []

    def join(**settings):
        member = consumer("static-group", **settings)
        member.subscribe(["static"], on_assign=lambda _, partitions: rebalances.append(len(partitions)))
        return member

    def settle(members, sizes):
        def attempt():
            for member in members:
                equal(member.consume(1, 0.2), [], "the topic is empty")
            return [len(member.assignment()) for member in members] == sizes
        eventually(f"assignments of {sizes} partitions", attempt)

    other, member = join(), join(**settings)
    settle([other, member], [1, 1])
    owned = member.assignment()
    member.close()  # a static member does not leave
    before = len(rebalances)
    member = join(**settings)
    settle([other, member], [1, 1])
    equal(member.assignment(), owned, "the same partition as before")
    settle([other, member], [1, 1])
    equal(len(rebalances), before + 1, "only the returning member got an assignment")
    member.close()
    other.close()


@test
def cooperative_members_keep_what_they_own():
    create_topic("cooperative", 4)
    settings = {"partition.assignment.strategy": "cooperative-sticky"}
    revoked = []
    first = consumer("cooperative-group", **settings)
    first.subscribe(["cooperative"], on_revoke=lambda _, partitions: revoked.append(len(partitions)))
    eventually("four partitions", lambda: first.consume(1, 0.2) == [] and len(first.assignment()) == 4)
    second = consumer("cooperative-group", **settings)
    second.subscribe(["cooperative"])
    eventually("two partitions each", lambda: (
        first.consume(1, 0.2), second.consume(1, 0.2),
        (len(first.assignment()), len(second.assignment())) == (2, 2))[2])
    equal(sum(revoked), 2, "the first member revoked two partitions, not all")
    second.close()
    first.close()


@test
def a_waiting_fetch_wakes_when_data_arrives():
    create_topic("long-poll")
    # A fetch may wait for 50 s: a server that answers only then fails this test, whatever the machine's speed.
    reader = consumer("long-poll", **{"fetch.wait.max.ms": 50_000, "socket.timeout.ms": 100_000})
    reader.assign([TopicPartition("long-poll", 0, 0)])
    equal(reader.consume(1, 2.0), [], "nothing yet")
    got = []
    thread = threading.Thread(target=lambda: got.extend(reader.consume(1, 30)))
    thread.start()
    send(producer(), "long-poll", numbered(1))
    thread.join()
    equal([message.value() for message in got], [b"value 0"], "the waiting reader got the record")
    reader.close()


@test
def several_threads_write_at_once_and_nothing_is_mixed_up():
    create_topic("threads", 2)
    writers = 6

    def write(writer):
        client = producer()
        send(client, "threads", [(n % 2, b"%d" % writer, b"%d" % n, None) for n in range(3000)])

    errors = []

    def guarded(writer):
        try:
            write(writer)
        except Exception as error:  # reported by the main thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    equal(errors, [], "errors of the writers")
    for partition in range(2):
        seen = {}
        for message in read_partition("threads", partition, 0, writers * 1500):
            seen.setdefault(message.key(), []).append(int(message.value()))
        for writer in range(writers):
            equal(seen[b"%d" % writer], list(range(partition, 3000, 2)), f"records of writer {writer}")


if __name__ == "__main__":
    tap.main(sys.argv[1:])
