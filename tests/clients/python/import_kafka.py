"""`alluvium import` from a real Apache Kafka: `import_kafka.py BINARY SOURCE SECURE CA MEBIBYTES`.

SOURCE is the cluster's plaintext address, SECURE its address with TLS and SCRAM, and CA the file with its certificate.
The data set is the text of package descriptions, MEBIBYTES of it for each codec."""

import json
import random
import signal
import subprocess
import sys
import tempfile
import time

import tap
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding, AclBindingFilter, AclOperation, AclPermissionType, AdminClient, AlterConfigOpType, ConfigEntry,
    ConfigResource, NewPartitions, NewTopic, OffsetSpec, ResourcePatternType, ResourceType, ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion)
from tap import BOOTSTRAP, PATIENCE_SECONDS, check, equal, eventually, test

BINARY, SOURCE, SECURE, CA, MEBIBYTES = sys.argv[1:6]
USER, PASSWORD = "importer", "a-password"
CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
BASE_TIMESTAMP = 1_600_000_000_000
# Many times what a debug build needs on a slow disk.
IMPORT_SECONDS = 300

source = AdminClient({"bootstrap.servers": SOURCE})
target = AdminClient({"bootstrap.servers": BOOTSTRAP})
files = tempfile.TemporaryDirectory()


def descriptions():
    """Yields name, section and text of Debian packages: of all known ones, or of those that are installed."""
    known = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, check=False).stdout
    if len(known) < 1 << 20:
        with open("/var/lib/dpkg/status", "rb") as status:
            known = status.read()
    while True:
        for paragraph in known.split(b"\n\n"):
            named = [each for each in paragraph.split(b"\n") if b": " in each and each[:1] != b" "]
            fields = dict(each.split(b": ", 1) for each in named)
            yield fields.get(b"Package", b""), fields.get(b"Section", b""), paragraph


DESCRIPTIONS = descriptions()


def create(admin, name, partitions=1, **config):
    config = {key: str(value) for key, value in config.items()}
    new = NewTopic(name, num_partitions=partitions, replication_factor=-1, config=config)
    admin.create_topics([new])[name].result(PATIENCE_SECONDS)


def producer(**settings):
    return Producer({"bootstrap.servers": SOURCE, "linger.ms": 20, "partitioner": "random", **settings})


def flush(client):
    equal(client.flush(PATIENCE_SECONDS), 0, "records left after flush")


def fill(client, topic, size):
    """Produces descriptions of this total size, with keys, headers and timestamps."""
    number = 0
    while size > 0:
        name, section, text = next(DESCRIPTIONS)
        headers = [("section", section), ("empty", None)] if number % 3 else None
        try:
            client.produce(topic, key=name if number % 5 else None, value=text if number % 50 else None,
                           headers=headers, timestamp=BASE_TIMESTAMP + 7 * number)
        except BufferError:
            client.poll(0.1)
            continue
        client.poll(0)
        size -= len(text)
        number += 1
    flush(client)


def transactions(identity, topics, outcomes):
    client = producer(**{"transactional.id": identity})
    client.init_transactions(PATIENCE_SECONDS)
    for number, outcome in enumerate(outcomes):
        client.begin_transaction()
        for topic in topics:
            for part in range(3):
                client.produce(topic, key=b"%s" % identity.encode(), value=b"%d.%d %s" % (number, part, outcome.encode()))
        flush(client)
        if outcome == "commit":
            client.commit_transaction(PATIENCE_SECONDS)
        elif outcome == "abort":
            client.abort_transaction(PATIENCE_SECONDS)
        else:
            return client
    return None


def names(admin):
    listed = admin.list_topics(timeout=PATIENCE_SECONDS).topics
    return sorted(name for name in listed if not name.startswith("__"))


def partitions(admin):
    listed = admin.list_topics(timeout=PATIENCE_SECONDS).topics
    return {(name, index) for name in listed if not name.startswith("__") for index in listed[name].partitions}


def offsets(admin, spec, of):
    asked = admin.list_offsets({TopicPartition(*partition): spec for partition in of})
    return {(each.topic, each.partition): future.result(PATIENCE_SECONDS).offset for each, future in asked.items()}


def ends(admin, of):
    return offsets(admin, OffsetSpec.latest(), of)


def starts(admin, of):
    return offsets(admin, OffsetSpec.earliest(), of)


def records(bootstrap, partition, end):
    """Returns all committed records of a partition up to an end offset."""
    client = Consumer({"bootstrap.servers": bootstrap, "group.id": "reader", "isolation.level": "read_committed",
                       "enable.auto.commit": False, "auto.offset.reset": "earliest", "enable.partition.eof": True})
    found = []
    try:
        client.assign([TopicPartition(*partition, 0)])
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            for message in client.consume(5000, 0.2):
                if message.error() is None:
                    found.append((message.offset(), message.timestamp(), message.key(), message.value(),
                                  message.headers()))
                elif message.error().name() != "_PARTITION_EOF":
                    raise KafkaException(message.error())
                elif message.offset() >= end:
                    return found
        raise AssertionError(f"{partition} of {bootstrap}: not read up to {end}")
    finally:
        client.close()


def config(admin, topic):
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    found = admin.describe_configs([resource])[resource].result(PATIENCE_SECONDS)
    return {name: entry.value for name, entry in found.items() if not entry.is_default and entry.source == 1}


def committed(bootstrap, group, of):
    client = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    try:
        found = client.committed([TopicPartition(*partition) for partition in of], PATIENCE_SECONDS)
        return {(each.topic, each.partition): (each.offset, each.metadata) for each in found}
    finally:
        client.close()


def commit(group, metadata=""):
    """Commits some offset of each partition of the source."""
    client = Consumer({"bootstrap.servers": SOURCE, "group.id": group})
    at = [TopicPartition(topic, index, end - end // 3, metadata)
          for (topic, index), end in ends(source, partitions(source)).items() if end > 0]
    client.commit(offsets=at, asynchronous=False)
    client.close()


def command(*words, at=SOURCE):
    return [BINARY, "import", "--from", at, "--bootstrap", BOOTSTRAP, *words]


def run(code, *words, at=SOURCE):
    """Runs an import that must end with this exit code. Returns its JSON, or its errors if it failed."""
    done = subprocess.run([*command(*words, at=at), "--json"], capture_output=True, text=True, check=False,
                          timeout=IMPORT_SECONDS)
    equal(done.returncode, code, f"exit code of import {words}: {done.stderr}")
    return json.loads(done.stdout) if done.stdout else done.stderr


@test
def the_source_is_written():
    size = int(MEBIBYTES) << 20
    for codec in CODECS:
        create(source, f"text-{codec}", 4)
        fill(producer(**{"compression.type": codec, "enable.idempotence": codec == "lz4"}), f"text-{codec}", size)
    create(source, "empty", 12, **{"min.insync.replicas": 2, "max.message.bytes": 2_000_000})
    create(source, "appended", 1, **{"message.timestamp.type": "LogAppendTime", "compression.type": "zstd"})
    fill(producer(), "appended", 200_000)
    create(source, "trimmed", 2)
    fill(producer(), "trimmed", 400_000)
    cut = {partition: end - 5 for partition, end in ends(source, {("trimmed", 0), ("trimmed", 1)}).items()}
    deleted = source.delete_records([TopicPartition(*partition, offset) for partition, offset in cut.items()])
    for future in deleted.values():
        future.result(PATIENCE_SECONDS)
    create(source, "many", 1)
    transactions("one", ["many", "text-gzip"], ["commit", "abort", "commit", "abort", "abort"])
    transactions("two", ["many", "text-gzip"], ["abort", "commit"])
    create(source, "compacted", 2, **{"cleanup.policy": "compact", "segment.ms": 200, "min.cleanable.dirty.ratio": 0.01,
                                      "segment.bytes": 1 << 20})
    client = producer(**{"compression.type": "zstd"})
    for number in range(4000):
        client.produce("compacted", key=b"%d" % (number % 97), value=b"value %d" % number)
        if number % 400 == 399:
            flush(client)
            time.sleep(0.25)
    both = {("compacted", 0), ("compacted", 1)}
    eventually("the log is compacted", lambda: all(
        len(records(SOURCE, partition, end)) < end - 100 for partition, end in ends(source, both).items()))
    commit("readers", "a note")
    commit("others")
    source.create_acls([acl()])[acl()].result(PATIENCE_SECONDS)


def acl():
    return AclBinding(ResourceType.TOPIC, "many", ResourcePatternType.LITERAL, "User:reader", "*", AclOperation.READ,
                      AclPermissionType.ALLOW)


@test
def a_dry_run_changes_nothing():
    planned = run(0, "--dry-run")["topics"]
    equal(sorted(planned), names(source), "topics")
    equal({topic["state"] for topic in planned.values()}, {"planned"}, "states")
    equal(planned["trimmed"]["partitions"][0]["start"] > 0, True, "the start of a trimmed partition")
    equal(names(target), [], "topics of the target")
    check("has no topic none" in run(2, "--dry-run", "--topics", "none"), "a topic that does not exist")


@test
def an_import_that_is_killed_goes_on():
    dice, copied = random.Random(1), []
    total = sum(ends(source, partitions(source)).values())
    for kill in range(12):
        running = subprocess.Popen(command("--follow"), stderr=subprocess.PIPE, text=True)
        time.sleep(0.1 + kill * dice.uniform(0.02, 0.08))
        running.send_signal(signal.SIGKILL)
        running.communicate()
        copied.append(sum(ends(target, partitions(target)).values()))
    print(f"# offsets after each SIGKILL, of {total}: {copied}", flush=True)
    check(any(0 < each < total for each in copied), "a kill came in the middle of copying")


following = None


@test
def it_follows_the_source():
    global following
    following = subprocess.Popen([*command("--follow"), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until_equal()
    fill(producer(**{"compression.type": "gzip"}), "text-gzip", 300_000)
    transactions("three", ["many", "text-lz4"], ["commit", "abort", "commit"])
    create(source, "late", 3, **{"flush.ms": 60_000})
    fill(producer(), "late", 100_000)
    source.create_partitions([NewPartitions("late", 5)])["late"].result(PATIENCE_SECONDS)
    for index in range(5):
        client = producer()
        client.produce("late", b"in each partition", partition=index)
        flush(client)
    eventually("the topic is imported", lambda: ("late", 4) in partitions(target))
    equal(config(target, "late")["flush.ms"], "60000", "a setting")
    resource = ConfigResource(ConfigResource.Type.TOPIC, "late", incremental_configs=[
        ConfigEntry("flush.ms", None, incremental_operation=AlterConfigOpType.DELETE)])
    source.incremental_alter_configs([resource])[resource].result(PATIENCE_SECONDS)
    commit("readers", "another note")
    wait_until_equal()
    eventually("committed offsets are copied", lambda: groups_are_equal("readers"))
    client = Producer({"bootstrap.servers": BOOTSTRAP, "message.timeout.ms": 5000})
    errors = []
    client.produce("many", b"too early", on_delivery=lambda error, _: errors.append(error))
    client.flush(PATIENCE_SECONDS)
    equal([error.name() for error in errors], ["POLICY_VIOLATION"], "producing to a topic that is imported")


def wait_until_equal():
    def attempt():
        check(following.poll() is None, "the import has ended")
        of = partitions(source)
        return partitions(target) == of and ends(target, of) == ends(source, of)
    eventually("the target has everything", attempt)


def groups_are_equal(group):
    of = partitions(source)
    return committed(SOURCE, group, of) == committed(BOOTSTRAP, group, of)


@test
def a_follower_ends_on_sigint():
    following.send_signal(signal.SIGINT)
    out, errors = following.communicate(timeout=PATIENCE_SECONDS)
    equal(following.returncode, 0, f"exit code: {errors}")
    topics = json.loads(out)["topics"]
    equal({topic["state"] for topic in topics.values()}, {"importing"}, "states")


@test
def an_open_transaction_keeps_a_topic_closed():
    client = transactions("four", ["many"], ["open"])
    report = run(3)["topics"]
    equal(report["many"]["state"], "source_active", "a topic with an open transaction")
    equal(report["empty"]["state"], "opened", "another topic")
    client.commit_transaction(PATIENCE_SECONDS)


@test
def a_group_with_members_at_the_target_keeps_its_topics_closed():
    member = Consumer({"bootstrap.servers": BOOTSTRAP, "group.id": "readers", "enable.auto.commit": False})
    member.subscribe(["many"])
    eventually("the group has a member", lambda: member.poll(0.2) is None and member.assignment())
    topic = run(3)["topics"]["many"]
    equal(topic["state"], "blocked", "a topic whose committed offsets cannot be copied")
    check("readers" in topic["reason"], topic["reason"])
    member.close()


@test
def the_rest_is_opened():
    report = run(0)
    states = {name: topic["state"] for name, topic in report["topics"].items()}
    equal(states.pop("many"), "opened", "the topic that was not opened before")
    equal(set(states.values()), {"complete"}, "the others")


@test
def records_are_equal():
    of = partitions(source)
    equal(partitions(target), of, "partitions")
    equal(starts(target, of), starts(source, of), "first offsets")
    last = ends(source, of)
    equal(ends(target, of), last, "last offsets")
    count = 0
    for partition in sorted(of):
        mine = records(BOOTSTRAP, partition, last[partition])
        other = records(SOURCE, partition, last[partition])
        if partition[0] == "compacted":
            # Both sides compact on their own.
            equal(latest(mine), latest(other), f"last records by key of {partition}")
            both = {each[0] for each in mine} & {each[0] for each in other}
            mine, other = ([each for each in side if each[0] in both] for side in (mine, other))
        equal(mine, other, f"records of {partition}")
        count += len(mine)
    print(f"# {count} records of {len(of)} partitions are equal", flush=True)


def latest(found):
    return {each[2]: each for each in found}


@test
def settings_groups_and_acls_are_equal():
    for name in names(source):
        # The retention of the source's brokers is not the default of the target.
        expected = {"retention.ms": "-1", **config(source, name)}
        expected.pop("min.insync.replicas", None)
        equal(config(target, name), expected, f"settings of {name}")
    check(groups_are_equal("readers") and groups_are_equal("others"), "committed offsets")
    found = target.describe_acls(AclBindingFilter(ResourceType.ANY, None, ResourcePatternType.ANY, None, None,
                                                  AclOperation.ANY, AclPermissionType.ANY)).result(PATIENCE_SECONDS)
    equal(found, [acl()], "ACLs")


@test
def a_comparison_finds_everything_equal():
    report = run(0, "--verify")
    found = {name: [partition["compared"] for partition in topic["partitions"]]
             for name, topic in report["topics"].items()}

    def total(key, of):
        return sum(each[key] for name in of for each in found[name])
    check(total("equal", found) > 1000, "records were compared")
    equal(total("different", found), 0, "different records")
    others = found.keys() - {"compacted"}
    equal((total("missing", others), total("additional", others)), (0, 0), "missing and additional records")


@test
def a_comparison_finds_differences():
    for admin, bootstrap, values in [(source, SOURCE, [b"1", b"2", b"3"]), (target, BOOTSTRAP, [b"1", b"x", b"3"])]:
        create(admin, "other", 1)
        client = Producer({"bootstrap.servers": bootstrap})
        for number, value in enumerate(values):
            client.produce("other", value, timestamp=BASE_TIMESTAMP + number)
            flush(client)
    client = producer()
    client.produce("other", b"4")
    flush(client)
    found = run(3, "--verify", "--topics", "other")["topics"]["other"]["partitions"][0]
    equal(found["compared"], {"equal": 2, "missing": 0, "additional": 0, "different": 1, "first": 1}, "differences")
    equal(found["behind"], 1, "records that the target does not have")
    create(source, "missing", 1)
    equal(run(3, "--verify", "--topics", "missing")["topics"]["missing"]["state"], "missing", "state")


@test
def an_existing_topic_is_left_alone():
    report = run(3, "--topics", "other,miss*")["topics"]
    equal({name: topic["state"] for name, topic in report.items()}, {"other": "exists", "missing": "opened"}, "states")
    equal([value for *_, value, _ in records(BOOTSTRAP, ("other", 0), 3)], [b"1", b"x", b"3"], "its records")


@test
def a_snapshot_opens_a_topic_that_is_written():
    create(source, "busy", 1)
    fill(producer(), "busy", 20_000)
    client = transactions("five", ["busy"], ["open"])
    topic = run(0, "--topics", "busy", "--snapshot")["topics"]["busy"]
    equal((topic["state"], topic["has_more"]), ("opened", True), "the snapshot")
    client.abort_transaction(PATIENCE_SECONDS)


@test
def settings_that_are_refused_are_listed():
    create(source, "strict", 1, **{"min.insync.replicas": 2, "retention.ms": 86_400_000})
    topic = run(0, "--topics", "strict")["topics"]["strict"]
    equal((topic["state"], list(topic["refused_settings"])), ("opened", ["min.insync.replicas"]), "the topic")
    run(0, "--verify", "--topics", "strict")
    equal(config(target, "strict"), {"retention.ms": "86400000"}, "its settings")


@test
def a_source_with_tls_and_a_login_is_imported():
    upsert = UserScramCredentialUpsertion(USER, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096),
                                          PASSWORD.encode())
    source.alter_user_scram_credentials([upsert])[USER].result(PATIENCE_SECONDS)
    create(source, "secured", 2)
    fill(producer(), "secured", 50_000)
    path = f"{files.name}/client.properties"

    def login(password):
        with open(path, "w", encoding="utf-8") as out:
            out.write(f"security.protocol=SASL_SSL\nssl.ca.location={CA}\nsasl.mechanism=SCRAM-SHA-512\n"
                      f"sasl.username={USER}\nsasl.password={password}\n")
    login("wrong")
    words = ["--topics", "secured", "--from-config", path]
    check("cannot log in" in run(1, *words, at=SECURE), "a wrong password")
    login(PASSWORD)
    report = eventually("the user is known", lambda: try_run(*words, at=SECURE))
    equal(report["topics"]["secured"]["state"], "opened", "state")
    equal(report["users"], [USER], "users whose passwords have to be set")


def try_run(*words, at):
    done = subprocess.run([*command(*words, at=at), "--json"], capture_output=True, text=True, check=False,
                          timeout=IMPORT_SECONDS)
    return json.loads(done.stdout) if done.returncode == 0 else None


@test
def producers_and_groups_continue_at_the_target():
    last = ends(target, {("many", 0)})[("many", 0)]
    client = Producer({"bootstrap.servers": BOOTSTRAP, "transactional.id": "one"})
    client.init_transactions(PATIENCE_SECONDS)
    client.begin_transaction()
    client.produce("many", b"after the move")
    client.commit_transaction(PATIENCE_SECONDS)
    equal(records(BOOTSTRAP, ("many", 0), last + 2)[-1][3], b"after the move", "the record")
    (position, _), = committed(BOOTSTRAP, "readers", [("many", 0)]).values()
    expected = [each for each in records(BOOTSTRAP, ("many", 0), last + 2) if each[0] >= position]
    reader = Consumer({"bootstrap.servers": BOOTSTRAP, "group.id": "readers", "isolation.level": "read_committed"})
    reader.subscribe(["many"])
    found = []

    def attempt():
        found.extend(message.offset() for message in reader.consume(100, 0.5) if message.error() is None)
        return len(found) >= len(expected)
    eventually("the group continues", attempt)
    equal(found, [each[0] for each in expected], "offsets that the group reads")
    reader.close()


if __name__ == "__main__":
    tap.main(sys.argv[6:])
