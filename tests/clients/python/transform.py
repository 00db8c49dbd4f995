"""The librdkafka half of the exactly-once test: consume, transform and produce in transactions, until killed or standard
input ends. tests/clients/go/cmd/exactlyonce is the other half, and feeds and verifies."""

import argparse
import sys
import threading
import time

from confluent_kafka import Consumer, KafkaException, Producer


def session(options, stop):
    common = {"bootstrap.servers": options.bootstrap, "reconnect.backoff.max.ms": 500}
    consumer = Consumer(
        common
        | {
            "group.id": options.group,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "partition.assignment.strategy": "range",
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 500,
        }
    )
    producer = Producer(
        common | {"transactional.id": options.id, "transaction.timeout.ms": 10000, "linger.ms": 0}
    )
    producer.init_transactions(30)
    consumer.subscribe([options.source])
    try:
        while not stop.is_set():
            messages = [m for m in consumer.consume(500, 0.2) if m.error() is None]
            if not messages:
                continue
            producer.begin_transaction()
            try:
                for message in messages:
                    producer.produce(options.target, message.value())
                positions = consumer.position(consumer.assignment())
                producer.send_offsets_to_transaction(
                    [p for p in positions if p.offset >= 0], consumer.consumer_group_metadata(), 30
                )
                retriable(lambda: producer.commit_transaction(30))
            except KafkaException as error:
                if not error.args[0].txn_requires_abort():
                    raise
                print("abort:", error, file=sys.stderr)
                retriable(lambda: producer.abort_transaction(30))
                # Aborted input is read again from the last commit.
                raise
    finally:
        consumer.close()


def retriable(call):
    while True:
        try:
            return call()
        except KafkaException as error:
            if not error.args[0].retriable():
                raise
            time.sleep(0.1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--from", dest="source", default="input")
    parser.add_argument("--to", dest="target", default="output")
    parser.add_argument("--group", default="transform")
    parser.add_argument("--id", default="python")
    options = parser.parse_args()
    stop = threading.Event()

    def wait_for_the_end():
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    while not stop.is_set():
        try:
            session(options, stop)
        except KafkaException as error:
            print("transform:", error, file=sys.stderr)
            time.sleep(0.2)


if __name__ == "__main__":
    main()
