"""aiokafka as an application uses it: BOOTSTRAP=host:port python suite.py."""

import asyncio
import sys
import time
import uuid

from aiokafka import (
    AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition,
)
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.errors import ProducerFenced, TopicAlreadyExistsError

from tap import BOOTSTRAP, PATIENCE_SECONDS, check, equal, main, test

PARTITIONS = 3


def asynchronous(function):
    """Marks a coroutine as a test, which fails instead of hanging."""
    def run():
        asyncio.run(asyncio.wait_for(function(), PATIENCE_SECONDS))
    run.__name__ = function.__name__
    return test(run)


def unique(kind):
    return f"{kind}-{uuid.uuid4().hex[:8]}"


async def new_topic(partitions=1):
    name = unique("aio")
    client = AIOKafkaAdminClient(bootstrap_servers=BOOTSTRAP)
    await client.start()
    await client.create_topics([NewTopic(name, partitions, 1)])
    await client.close()
    return name


async def read(topics, count, group=None, **settings):
    """Reads the first `count` records."""
    settings.setdefault("auto_offset_reset", "earliest")
    async with AIOKafkaConsumer(*topics, bootstrap_servers=BOOTSTRAP, group_id=group,
                                enable_auto_commit=False, **settings) as consumer:
        return [await consumer.getone() for _ in range(count)]


async def round_trip(codec, **settings):
    topic = await new_topic()
    wanted = [(b"key-%d" % n if n % 3 else None, b"value-%d " % n * 40, (("n", b"%d" % n),))
              for n in range(500)]
    async with AIOKafkaProducer(bootstrap_servers=BOOTSTRAP, compression_type=codec, linger_ms=20,
                                **settings) as producer:
        sent = [await producer.send(topic, value, key, headers=list(headers))
                for key, value, headers in wanted]
        equal([(await each).offset for each in sent], list(range(500)), "offsets")
    got = [(record.key, record.value, tuple(record.headers)) for record in await read([topic], 500)]
    equal(got, wanted, "records")


@asynchronous
async def records_without_compression():
    await round_trip(None)


@asynchronous
async def records_with_gzip():
    await round_trip("gzip")


@asynchronous
async def records_with_snappy():
    await round_trip("snappy")


@asynchronous
async def records_with_lz4():
    await round_trip("lz4")


@asynchronous
async def records_with_zstd():
    await round_trip("zstd")


@asynchronous
async def records_of_an_idempotent_producer():
    await round_trip("lz4", enable_idempotence=True)


@asynchronous
async def a_batch_that_the_application_has_built():
    topic = await new_topic()
    async with AIOKafkaProducer(bootstrap_servers=BOOTSTRAP) as producer:
        batch = producer.create_batch()
        for number in range(10):
            check(batch.append(key=None, value=b"%d" % number, timestamp=None), "the batch has space")
        batch.close()
        metadata = await (await producer.send_batch(batch, topic, partition=0))
        equal(metadata.offset, 0, "the first offset")
    equal([record.value for record in await read([topic], 10)],
          [b"%d" % number for number in range(10)], "records")


@asynchronous
async def what_is_committed_is_read_and_what_is_aborted_is_not():
    topic = await new_topic()
    async with AIOKafkaProducer(bootstrap_servers=BOOTSTRAP,
                                transactional_id=unique("tx")) as producer:
        for number in range(10):
            await producer.begin_transaction()
            for part in range(5):
                await producer.send_and_wait(topic, b"%d/%d" % (number, part))
            if number % 2:
                await producer.abort_transaction()
            else:
                await producer.commit_transaction()
    committed = [b"%d/%d" % (number, part) for number in range(0, 10, 2) for part in range(5)]
    got = await read([topic], 25, isolation_level="read_committed")
    equal([record.value for record in got], committed, "records with read_committed")
    equal(len(await read([topic], 50)), 50, "records with read_uncommitted")


@asynchronous
async def offsets_are_committed_with_the_transaction():
    source, target, group = await new_topic(), await new_topic(), unique("group")
    partition = TopicPartition(source, 0)
    async with AIOKafkaProducer(bootstrap_servers=BOOTSTRAP) as producer:
        for number in range(20):
            await producer.send_and_wait(source, b"%d" % number)
    async with AIOKafkaProducer(bootstrap_servers=BOOTSTRAP,
                                transactional_id=unique("tx")) as producer:
        for offset, commit in (5, True), (9, False), (7, True):
            await producer.begin_transaction()
            await producer.send_and_wait(target, b"%d" % offset)
            await producer.send_offsets_to_transaction({partition: offset}, group)
            if commit:
                await producer.commit_transaction()
            else:
                await producer.abort_transaction()
    first = (await read([source], 1, group))[0]
    equal(first.offset, 7, "where the group resumes")
    got = await read([target], 2, isolation_level="read_committed")
    equal([record.value for record in got], [b"5", b"7"], "records with read_committed")


@asynchronous
async def a_second_producer_of_the_same_name_ends_the_first():
    topic, name = await new_topic(), unique("tx")
    first = AIOKafkaProducer(bootstrap_servers=BOOTSTRAP, transactional_id=name)
    await first.start()
    await first.begin_transaction()
    await first.send_and_wait(topic, b"lost")
    async with AIOKafkaProducer(bootstrap_servers=BOOTSTRAP, transactional_id=name) as second:
        async with second.transaction():
            await second.send_and_wait(topic, b"kept")
    try:
        await first.send_and_wait(topic, b"too late")
        await first.commit_transaction()
        check(False, "the first producer is still allowed to commit")
    except ProducerFenced:
        pass
    await first.stop()
    got = await read([topic], 1, isolation_level="read_committed")
    equal([record.value for record in got], [b"kept"], "records with read_committed")


class Listener(ConsumerRebalanceListener):
    """Counts its calls."""

    def __init__(self):
        self.revoked = self.assigned = 0

    async def on_partitions_revoked(self, revoked):
        self.revoked += 1

    async def on_partitions_assigned(self, assigned):
        self.assigned += 1


@asynchronous
async def a_group_gives_partitions_to_a_second_member_and_back():
    topic, group = await new_topic(PARTITIONS), unique("group")
    partitions = {TopicPartition(topic, number) for number in range(PARTITIONS)}
    listener = Listener()

    def member():
        return AIOKafkaConsumer(bootstrap_servers=BOOTSTRAP, group_id=group,
                                heartbeat_interval_ms=300)

    async def until(condition):
        while not condition():
            await asyncio.sleep(0.05)

    async with member() as first:
        first.subscribe([topic], listener=listener)
        await until(lambda: first.assignment() == partitions)
        async with member() as second:
            second.subscribe([topic])
            await until(lambda: first.assignment() and second.assignment()
                        and not first.assignment() & second.assignment()
                        and first.assignment() | second.assignment() == partitions)
        await until(lambda: first.assignment() == partitions)
        check(listener.revoked >= 2 and listener.assigned >= 3, "the listener is called")


@asynchronous
async def a_pattern_takes_a_topic_that_is_created_later():
    prefix, group = unique("pattern"), unique("group")
    client = AIOKafkaAdminClient(bootstrap_servers=BOOTSTRAP)
    await client.start()
    await client.create_topics([NewTopic(f"{prefix}-1", 1, 1)])
    async with AIOKafkaConsumer(bootstrap_servers=BOOTSTRAP, group_id=group,
                                metadata_max_age_ms=300, auto_offset_reset="earliest") as consumer:
        consumer.subscribe(pattern=f"^{prefix}-.*$")
        while len(consumer.assignment()) < 1:
            await asyncio.sleep(0.05)
        await client.create_topics([NewTopic(f"{prefix}-2", 1, 1)])
        while len(consumer.assignment()) < 2:
            await asyncio.sleep(0.05)
    await client.close()


@asynchronous
async def offsets_are_found_by_time():
    topic = await new_topic()
    partition = TopicPartition(topic, 0)
    base = int(time.time() * 1000) - 100_000
    async with AIOKafkaProducer(bootstrap_servers=BOOTSTRAP, compression_type="gzip") as producer:
        sent = [await producer.send(topic, b"x", timestamp_ms=base + number * 1000)
                for number in range(100)]
        await asyncio.gather(*sent)
    async with AIOKafkaConsumer(bootstrap_servers=BOOTSTRAP) as consumer:
        found = (await consumer.offsets_for_times({partition: base + 41_500}))[partition]
        equal((found.offset, found.timestamp), (42, base + 42_000), "the first after a time")
        equal(await consumer.beginning_offsets([partition]), {partition: 0}, "the beginning")
        equal(await consumer.end_offsets([partition]), {partition: 100}, "the end")
        consumer.assign([partition])
        consumer.seek(partition, 90)
        equal((await consumer.getone()).offset, 90, "the record after a seek")
        await consumer.seek_to_end(partition)
        equal(await consumer.position(partition), 100, "the position at the end")


@asynchronous
async def topics_and_groups_are_administered():
    topic, group = await new_topic(), unique("group")
    client = AIOKafkaAdminClient(bootstrap_servers=BOOTSTRAP)
    await client.start()
    try:
        answer = await client.create_topics([NewTopic(topic, 1, 1)])
        # Older versions return the error.
        equal(answer.topic_errors[0][1], TopicAlreadyExistsError.errno, "an error")
    except TopicAlreadyExistsError:
        pass
    await client.create_partitions({topic: NewPartitions(4)})
    described = await client.describe_topics([topic])
    equal(len(described[0]["partitions"]), 4, "partitions")
    async with AIOKafkaConsumer(topic, bootstrap_servers=BOOTSTRAP, group_id=group,
                                enable_auto_commit=False) as consumer:
        while not consumer.assignment():
            await asyncio.sleep(0.05)
        await consumer.commit({TopicPartition(topic, 0): (0, "a note")})
        groups = await client.list_consumer_groups()
        check(group in [each[0] for each in groups], "the group is listed")
    offsets = await client.list_consumer_group_offsets(group)
    equal(offsets[TopicPartition(topic, 0)].metadata, "a note", "the note of the commit")
    await client.delete_topics([topic])
    while topic in await client.list_topics():
        await asyncio.sleep(0.05)
    await client.close()


if __name__ == "__main__":
    main(sys.argv[1:])
