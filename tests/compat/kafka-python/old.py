"""kafka-python 2.0.2 as an application uses it: BOOTSTRAP=host:port python old.py. It reads zstd with Fetch version 4."""

import sys
import threading
import time
import uuid

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, OffsetAndMetadata, TopicPartition
from kafka.admin import (
    ACL, ACLFilter, ACLOperation, ACLPermissionType, ConfigResource, ConfigResourceType,
    NewPartitions, NewTopic, ResourcePattern, ResourcePatternFilter, ResourceType,
)
from kafka.errors import TopicAlreadyExistsError

from tap import BOOTSTRAP, check, equal, eventually, main, test

PARTITIONS = 3


def admin():
    return KafkaAdminClient(bootstrap_servers=BOOTSTRAP)


def new_topic(partitions=PARTITIONS):
    name = f"old-{uuid.uuid4().hex[:8]}"
    client = admin()
    client.create_topics([NewTopic(name, partitions, 1)])
    client.close()
    return name


def consumer(group=None, **settings):
    settings.setdefault("auto_offset_reset", "earliest")
    return KafkaConsumer(bootstrap_servers=BOOTSTRAP, group_id=group, enable_auto_commit=False,
                         **settings)


def read(client, count):
    """Reads `count` records, in the order in which they arrive."""
    records = []

    def attempt():
        for batch in client.poll(timeout_ms=200).values():
            records.extend(batch)
        return len(records) >= count

    eventually(f"{count} records", attempt)
    return records


def round_trip(codec):
    topic = new_topic(1)
    producer = KafkaProducer(bootstrap_servers=BOOTSTRAP, compression_type=codec, linger_ms=20,
                             acks="all", retries=3)
    wanted = [(f"key-{n}".encode() if n % 3 else None, b"value-%d " % n * 40, [("n", b"%d" % n)])
              for n in range(500)]
    sent = [producer.send(topic, value, key, headers) for key, value, headers in wanted]
    producer.close()
    equal([each.get(60).offset for each in sent], list(range(500)), "offsets")
    client = consumer()
    client.assign([TopicPartition(topic, 0)])
    got = [(record.key, record.value, record.headers) for record in read(client, 500)]
    client.close()
    equal(got, wanted, "records")


@test
def records_without_compression():
    round_trip(None)


@test
def records_with_gzip():
    round_trip("gzip")


@test
def records_with_snappy():
    round_trip("snappy")


@test
def records_with_lz4():
    round_trip("lz4")


@test
def records_with_zstd():
    round_trip("zstd")


class Member(threading.Thread):
    """A member of a group in its own thread: `poll` blocks until all members have joined."""

    def __init__(self, topic, group):
        super().__init__(daemon=True)
        self.topic = topic
        self.group = group
        self.partitions = frozenset()
        self.leaves = threading.Event()
        self.start()

    def run(self):
        client = consumer(self.group, heartbeat_interval_ms=300)
        client.subscribe([self.topic])
        while not self.leaves.is_set():
            client.poll(timeout_ms=100)
            self.partitions = frozenset(client.assignment())
        client.close()


@test
def a_group_gives_partitions_to_a_second_member_and_back():
    topic, group = new_topic(), f"group-{uuid.uuid4().hex[:8]}"
    partitions = {TopicPartition(topic, number) for number in range(PARTITIONS)}

    def when(what, condition):
        eventually(what, lambda: condition() or time.sleep(0.05))

    first = Member(topic, group)
    when("the first member has all", lambda: first.partitions == partitions)
    second = Member(topic, group)
    when("both have some", lambda: first.partitions and second.partitions
         and not first.partitions & second.partitions
         and first.partitions | second.partitions == partitions)
    second.leaves.set()
    second.join()
    when("the first member has all again", lambda: first.partitions == partitions)
    first.leaves.set()
    first.join()


@test
def a_group_goes_on_where_it_has_committed():
    topic, group = new_topic(1), f"group-{uuid.uuid4().hex[:8]}"
    partition = TopicPartition(topic, 0)
    producer = KafkaProducer(bootstrap_servers=BOOTSTRAP)
    for number in range(20):
        producer.send(topic, b"%d" % number)
    producer.close()
    client = consumer(group)
    client.subscribe([topic])
    equal(read(client, 20)[-1].value, b"19", "the last record")
    client.commit({partition: OffsetAndMetadata(7, "a note")})
    client.close()
    client = consumer(group)
    client.subscribe([topic])
    equal(read(client, 13)[0].offset, 7, "the first record after the commit")
    equal(client.committed(partition), 7, "the committed offset")
    client.close()


@test
def offsets_are_found_by_time():
    topic = new_topic(1)
    partition = TopicPartition(topic, 0)
    base = int(time.time() * 1000) - 100_000
    producer = KafkaProducer(bootstrap_servers=BOOTSTRAP, compression_type="gzip")
    for number in range(100):
        producer.send(topic, b"x", timestamp_ms=base + number * 1000)
    producer.close()
    client = consumer()
    found = client.offsets_for_times({partition: base + 41_500})[partition]
    equal((found.offset, found.timestamp), (42, base + 42_000), "the first record after a time")
    equal(client.offsets_for_times({partition: base + 1_000_000}), {partition: None}, "none after")
    equal(client.beginning_offsets([partition]), {partition: 0}, "the beginning")
    equal(client.end_offsets([partition]), {partition: 100}, "the end")
    client.assign([partition])
    client.seek(partition, 90)
    equal(read(client, 10)[0].offset, 90, "the record after a seek")
    client.close()


@test
def topics_and_their_settings_are_changed():
    client = admin()
    name = f"old-{uuid.uuid4().hex[:8]}"
    settings = {"cleanup.policy": "compact", "retention.ms": "3600000"}
    client.create_topics([NewTopic(name, 1, 1, topic_configs=settings)])
    try:
        client.create_topics([NewTopic(name, 1, 1)])
        check(False, "a topic was created twice")
    except TopicAlreadyExistsError:
        pass
    client.create_partitions({name: NewPartitions(4)})
    equal(len(client.describe_topics([name])[0]["partitions"]), 4, "partitions")
    resource = ConfigResource(ConfigResourceType.TOPIC, name, {"retention.ms": "7200000"})
    client.alter_configs([resource])

    def changed():
        answer = client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)])[0]
        values = {entry[0]: entry[1] for entry in answer.resources[0][4]}
        return values["retention.ms"] == "7200000" and values["cleanup.policy"] == "delete"

    eventually("the settings are the new ones", changed)
    client.delete_topics([name])
    eventually("it is gone", lambda: name not in client.list_topics())
    client.close()


@test
def groups_are_listed_described_and_deleted():
    topic, group = new_topic(1), f"group-{uuid.uuid4().hex[:8]}"
    member = consumer(group, client_id="old-member")
    member.subscribe([topic])
    eventually("it is a member", lambda: member.poll(timeout_ms=100) or member.assignment())
    client = admin()
    check((group, "consumer") in client.list_consumer_groups(), "the group is listed")
    described = client.describe_consumer_groups([group])[0]
    equal((described.state, len(described.members)), ("Stable", 1), "the group")
    equal(described.members[0].client_id, "old-member", "the member")
    member.commit({TopicPartition(topic, 0): OffsetAndMetadata(0, "")})
    member.close()
    offsets = client.list_consumer_group_offsets(group)
    equal(offsets[TopicPartition(topic, 0)].offset, 0, "the committed offset")
    equal([error.errno for _, error in client.delete_consumer_groups([group])], [0], "deletion")
    client.close()


@test
def acls_are_created_described_and_deleted():
    client = admin()
    pattern = ResourcePattern(ResourceType.TOPIC, f"acl-{uuid.uuid4().hex[:8]}")
    acl = ACL("User:carol", "*", ACLOperation.READ, ACLPermissionType.ALLOW, pattern)
    made = client.create_acls([acl])
    equal((made["succeeded"], made["failed"]), ([acl], []), "what is created")
    wanted = ACLFilter("User:carol", "*", ACLOperation.ANY, ACLPermissionType.ANY,
                       ResourcePatternFilter(ResourceType.TOPIC, pattern.resource_name,
                                             pattern.pattern_type))
    found = eventually("it is found", lambda: client.describe_acls(wanted)[0])
    equal(found, [acl], "what is found")
    deleted = client.delete_acls([wanted])
    equal([each for each, _ in deleted[0][1]], [acl], "what is deleted")
    client.close()


if __name__ == "__main__":
    main(sys.argv[1:])
