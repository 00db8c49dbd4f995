"""Fills a topic for a UI: records, and two groups that have read a part of them.

Prints `look` when it is done, and keeps the members alive until it reads a line.
"""

import os
import sys
import threading

from confluent_kafka import Consumer, Producer, TopicPartition

BOOTSTRAP = os.environ["BOOTSTRAP"]
TOPIC = sys.argv[1]

# Each group with its protocol, and its offsets in partitions 0, 1 and 2.
GROUPS = [("readers", "classic", (10, 13, 3)), ("walkers", "consumer", (18, 13, 13))]


def fill():
    """Writes 40 records to three partitions, then an aborted and a committed one."""
    producer = Producer({"bootstrap.servers": BOOTSTRAP, "compression.type": "zstd"})
    for number in range(40):
        headers = {"colour": f"blue-{number}"}
        producer.produce(TOPIC, f"value-{number}", f"key-{number}", number % 3, headers=headers)
    if producer.flush(60):
        raise SystemExit("the records were not written")
    producer = Producer({"bootstrap.servers": BOOTSTRAP, "transactional.id": "ui"})
    producer.init_transactions(60)
    for value in "aborted", "committed":
        producer.begin_transaction()
        producer.produce(TOPIC, value, f"key-{value}", 0)
        if value == "aborted":
            producer.flush(60)
            producer.abort_transaction(60)
        else:
            producer.commit_transaction(60)


def join(group, protocol, offsets):
    """Returns a member of the group that has committed the offsets."""
    consumer = Consumer({
        "bootstrap.servers": BOOTSTRAP,
        "group.id": group,
        "client.id": f"client-of-{group}",
        "group.protocol": protocol,
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
    })
    consumer.subscribe([TOPIC])
    while len(consumer.assignment()) < len(offsets):
        consumer.poll(0.1)
    places = [TopicPartition(TOPIC, partition, offset) for partition, offset in enumerate(offsets)]
    consumer.commit(offsets=places, asynchronous=False)
    return consumer


def main():
    fill()
    consumers = [join(*group) for group in GROUPS]
    answered = threading.Event()

    def wait():
        sys.stdin.readline()
        answered.set()

    threading.Thread(target=wait, daemon=True).start()
    print("ready", flush=True)
    # A member that does not poll is removed from its group.
    while not answered.is_set():
        for consumer in consumers:
            consumer.poll(0.1)
    for consumer in consumers:
        consumer.close()


main()
