"""Functions shared by the confluent-kafka suite and the restart suite."""

import functools

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tap import BOOTSTRAP, PATIENCE_SECONDS, check, equal, eventually


@functools.cache  # the futures of a dropped client are cancelled
def admin():
    return AdminClient({"bootstrap.servers": BOOTSTRAP})


def create_topic(name, partitions=1):
    create_topics([NewTopic(name, num_partitions=partitions, replication_factor=1)])
    return name


def create_topics(new_topics):
    for future in admin().create_topics(new_topics).values():
        future.result(PATIENCE_SECONDS)


def producer(**settings):
    return Producer({
        "bootstrap.servers": BOOTSTRAP,
        "enable.idempotence": True,
        "linger.ms": 5,
        **settings,
    })


def consumer(group, **settings):
    return Consumer({
        "bootstrap.servers": BOOTSTRAP,
        "group.id": group,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "check.crcs": True,
        "session.timeout.ms": 6000,
        "heartbeat.interval.ms": 1000,
        **settings,
    })


def assigned_consumer(group, **settings):
    """A member of a group whose assignment the server computes (KIP-848); the server also sets its timeouts."""
    return Consumer({
        "bootstrap.servers": BOOTSTRAP,
        "group.id": group,
        "group.protocol": "consumer",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "check.crcs": True,
        **settings,
    })


def send(client, topic, records):
    """Produces `(partition, key, value, headers)` and returns the offset of each, all acknowledged."""
    offsets = [None] * len(records)
    errors = []

    def delivered(index):
        def callback(error, message):
            if error is not None:
                errors.append(error)
            else:
                offsets[index] = message.offset()
        return callback

    for index, (partition, key, value, headers) in enumerate(records):
        while True:
            try:
                client.produce(topic, value=value, key=key, partition=partition, headers=headers,
                               on_delivery=delivered(index))
                break
            except BufferError:
                client.poll(0.1)
    equal(client.flush(PATIENCE_SECONDS), 0, "records left after flush")
    if errors:
        raise KafkaException(errors[0])
    return offsets


def numbered(count, partition=0, start=0):
    """Returns `count` different small records for one partition."""
    return [(partition, b"k%d" % n, b"value %d" % n, None) for n in range(start, start + count)]


def read(client, count):
    """Reads the next `count` messages of a consumer with an assignment or a subscription."""
    messages = []

    def attempt():
        for message in client.consume(max(1, min(10_000, count - len(messages))), 0.5):
            if message.error() is not None:
                raise KafkaException(message.error())
            messages.append(message)
        return len(messages) >= count
    eventually(f"{count} messages", attempt)
    equal(len(messages), count, "messages")
    return messages


def read_partition(topic, partition, offset, count):
    """Reads a partition from an offset with a separate consumer, outside any group."""
    client = consumer(f"reader-of-{topic}")
    try:
        client.assign([TopicPartition(topic, partition, offset)])
        return read(client, count)
    finally:
        client.close()


def watermarks(topic, partition=0):
    """Returns the low and the high watermark as reported by the server."""
    client = consumer("watermarks")
    try:
        return client.get_watermark_offsets(TopicPartition(topic, partition), PATIENCE_SECONDS)
    finally:
        client.close()


def committed(group, topic, partitions):
    """Returns the committed offset of each partition; -1001 (OFFSET_INVALID) for none."""
    client = consumer(group)
    try:
        wanted = [TopicPartition(topic, partition) for partition in range(partitions)]
        return [each.offset for each in client.committed(wanted, PATIENCE_SECONDS)]
    finally:
        client.close()


__all__ = [name for name in dir() if not name.startswith("_")]
