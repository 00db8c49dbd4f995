"""The librdkafka half of the kill test's load; ../go/cmd/load is the franz-go half.

Both write the same journal, which ../README.md describes. `load.py create` creates the topic first, `load.py committed`
prints the committed offsets of the group."""

import argparse
import random
import sys
import threading
import time

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic


class Journal:
    """Writes one line per event. A line is in the file before the client that caused it continues."""

    def __init__(self, path):
        self.file = open(path, "w", encoding="ascii", buffering=1)
        self.lock = threading.Lock()

    def line(self, *words):
        with self.lock:
            self.file.write(" ".join(map(str, words)).replace("\n", " ") + "\n")


def size(rng):
    """Mostly small and sometimes large sizes: small records share blocks, large ones span several."""
    kind = rng.randrange(100)
    if kind < 90:
        return rng.randrange(20, 500)
    if kind < 99:
        return rng.randrange(1_000, 8_000)
    return rng.randrange(50_000, 200_000)


def produce(options, stop, journal, number):
    name = f"{options.name}{number}"
    client = Producer({
        "bootstrap.servers": options.bootstrap,
        "enable.idempotence": True,
        # Never gives up: a producer that drops a record may continue after the gap.
        "message.timeout.ms": 0,
        "reconnect.backoff.max.ms": 500,
        "linger.ms": 2,
        "message.max.bytes": 1_000_000,
    })
    rng = random.Random(f"{options.seed} {name}")
    filler = rng.randbytes(300_000)
    next_sequence = [0] * options.partitions

    def delivered(sequence, partition):
        def callback(error, message):
            if error is not None:
                journal.line("F", name, "record", sequence, "of partition", partition, error)
            else:
                journal.line("A", name, sequence, message.partition(), message.offset())
        return callback

    while not stop.wait(rng.random() * 0.02):
        for _ in range(rng.randrange(1, 21)):
            partition = rng.randrange(options.partitions)
            sequence = next_sequence[partition]
            next_sequence[partition] += 1
            start = rng.randrange(100_000)
            value = filler[start:start + size(rng)]
            while True:
                try:
                    client.produce(options.topic, value=value, key=f"{name}:{sequence}", partition=partition,
                                   on_delivery=delivered(sequence, partition))
                    break
                except BufferError:  # the client's queue is full: the server is down
                    client.poll(0.1)
        client.poll(0)
    while client.flush(1) > 0:
        pass


def consume(options, stop, journal):
    client = Consumer({
        "bootstrap.servers": options.bootstrap,
        "group.id": options.name,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "check.crcs": True,
        "reconnect.backoff.max.ms": 500,
        "session.timeout.ms": 6000,
        "heartbeat.interval.ms": 1000,
    })
    client.subscribe([options.topic])
    while not stop.is_set():
        ends = {}
        for message in client.consume(500, 0.2):
            if message.error() is None:
                journal.line("R", message.partition(), message.offset(), message.key().decode())
                ends[message.partition()] = message.offset() + 1
        if not ends:
            continue
        try:
            offsets = [TopicPartition(options.topic, partition, end) for partition, end in ends.items()]
            results = client.commit(offsets=offsets, asynchronous=False)
        except KafkaException:  # the server is down, or the group rebalances: nothing was promised
            continue
        for result in results:
            if result.error is None:
                journal.line("C", options.name, result.partition, result.offset)
    client.close()


def load(options):
    journal = Journal(options.journal)
    stop = threading.Event()

    def guarded(work, *arguments):
        try:
            work(options, stop, journal, *arguments)
        except Exception as error:  # must reach the journal, whatever it is
            journal.line("F", options.name, repr(error))

    threads = [threading.Thread(target=guarded, args=(produce, number)) for number in range(options.producers)]
    threads += [threading.Thread(target=guarded, args=(consume,)) for _ in range(options.members)]
    for thread in threads:
        thread.start()
    # Runs until standard input ends, then waits until everything sent is acknowledged.
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    journal.line("END")


def create(options):
    admin = AdminClient({"bootstrap.servers": options.bootstrap})
    topic = NewTopic(options.topic, num_partitions=options.partitions, replication_factor=1)
    admin.create_topics([topic])[options.topic].result(60)


def committed(options):
    client = Consumer({"bootstrap.servers": options.bootstrap, "group.id": options.name})
    partitions = [TopicPartition(options.topic, partition) for partition in range(options.partitions)]
    deadline = time.monotonic() + 60
    while True:
        try:
            answers = client.committed(partitions, 60)
            break
        except KafkaException as error:
            # A server that has just started may not be the coordinator yet.
            if not error.args[0].retriable() and error.args[0].code() != KafkaError.NOT_COORDINATOR:
                raise
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    for each in answers:
        if each.error is not None:
            raise KafkaException(each.error)
        if each.offset >= 0:
            print(each.partition, each.offset)
    client.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["create", "load", "committed"])
    parser.add_argument("--bootstrap", default="127.0.0.1:9092", help="address of the server")
    parser.add_argument("--topic", default="kill", help="topic to write to and to read from")
    parser.add_argument("--partitions", type=int, default=6, help="number of its partitions")
    parser.add_argument("--producers", type=int, default=2, help="number of producers, each with its own client")
    parser.add_argument("--members", type=int, default=2, help="number of members of the consumer group")
    parser.add_argument("--name", default="py", help="prefix of the producers' names, and name of the group")
    parser.add_argument("--seed", default="1", help="seed of sizes, partitions and pauses")
    parser.add_argument("--journal", help="file to write the journal to")
    options = parser.parse_args()
    {"create": create, "load": load, "committed": committed}[options.command](options)


if __name__ == "__main__":
    main()
