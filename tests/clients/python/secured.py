"""librdkafka on listeners with authentication, which the environment names with their files."""

import json
import os
import socket
import ssl
import sys

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding, AclOperation, AclPermissionType, AdminClient, NewTopic, ResourcePatternType, ResourceType,
)

import tap
from tap import PATIENCE_SECONDS, check, equal, eventually

FILES = os.environ["FILES"]
TOPIC = "python-records"


def file(name):
    return os.path.join(FILES, name)


def tls(listener, ca="ca.pem"):
    return {"bootstrap.servers": os.environ[listener], "security.protocol": "SSL", "ssl.ca.location": file(ca)}


def certificate(name):
    return {**tls("MUTUAL_TLS"), "ssl.certificate.location": file(name), "ssl.key.location": file(name)}


def login(listener, mechanism, user="alice", password=None):
    return {
        **tls(listener),
        "security.protocol": "SASL_PLAINTEXT" if listener == "SASL" else "SASL_SSL",
        "sasl.mechanism": mechanism,
        "sasl.username": user,
        "sasl.password": password or f"{user}-has-this-secret",
    }


def token(name):
    with open(file(name), encoding="ascii") as content:
        value = content.read()
    # Only the client uses this expiration, to request a new token in time; the server reads the token's own.
    return {
        **tls("SASL_TLS"),
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "oauth_cb": lambda _: (value, 4e9),
    }


def oidc():
    return {
        **tls("SASL_TLS"),
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "alice",
        "sasl.oauthbearer.client.secret": "alice-has-this-secret",
        "sasl.oauthbearer.token.endpoint.url": os.environ["TOKENS"],
        "https.ca.location": file("ca.pem"),
    }


def produce(client, value):
    """Writes a record and returns its offset."""
    done = []
    client.produce(TOPIC, value=value, partition=0, on_delivery=lambda error, message: done.append((error, message)))

    def answer():
        client.poll(0.1)
        return done
    error, message = eventually("an answer", answer)[0]
    if error is not None:
        raise KafkaException(error)
    return message.offset()


def there_and_back(config):
    value = os.urandom(8)
    offset = produce(Producer(config), value)
    consumer = Consumer({**config, "group.id": "python-group", "enable.auto.commit": False})
    try:
        consumer.assign([TopicPartition(TOPIC, 0, offset)])
        message = eventually("the record", lambda: consumer.poll(0.5))
        if message.error() is not None:
            raise KafkaException(message.error())
        equal(message.value(), value, "what was read")
    finally:
        consumer.close()


def keep(error):
    """Stores an error, for the suite to check what the server reveals to clients."""
    with open(os.environ["ERRORS"], "a", encoding="utf-8") as errors:
        errors.write("python: " + error.str().replace("\n", " ") + "\n")


def refused(code, config, words=""):
    """Asserts that the client is refused with this error."""
    errors = []

    def take(error):
        keep(error)
        errors.append(error)
    client = Producer({**config, "error_cb": take})

    def is_refused():
        client.poll(0.1)
        return any(error.code() == code and words in error.str() for error in errors)
    eventually("a refusal", is_refused)


@tap.test
def the_administrator_gives_rights():
    admin = AdminClient(login("SASL_TLS", "SCRAM-SHA-512", "admin"))
    for future in admin.create_topics([NewTopic(TOPIC, 1, 1)]).values():
        future.result(PATIENCE_SECONDS)
    acls = [
        AclBinding(kind, "python-", ResourcePatternType.PREFIXED, "User:alice", "*", AclOperation.ALL,
                   AclPermissionType.ALLOW)
        for kind in (ResourceType.TOPIC, ResourceType.GROUP)
    ]
    for future in admin.create_acls(acls).values():
        future.result(PATIENCE_SECONDS)


@tap.test
def passwords_let_in_and_wrong_ones_do_not():
    for listener in ("SASL", "SASL_TLS"):
        for mechanism in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"):
            there_and_back(login(listener, mechanism))
            refused(KafkaError._AUTHENTICATION, login(listener, mechanism, password=os.environ["WRONG_PASSWORD"]))


@tap.test
def tokens_let_in_and_wrong_ones_do_not():
    there_and_back(token("alice.jwt"))
    refused(KafkaError._AUTHENTICATION, token("expired.jwt"))
    refused(KafkaError._AUTHENTICATION, token("forged.jwt"))


@tap.test
def a_token_of_the_issuers_endpoint():
    there_and_back(oidc())


@tap.test
def certificates_let_in_and_wrong_ones_do_not():
    there_and_back(certificate("alice.pem"))
    # The server names the authority that it trusts, so the client does not present the certificate.
    refused(KafkaError._TRANSPORT, certificate("stranger.pem"), "alert certificate required")
    refused(KafkaError._SSL, tls("TLS", "stranger-ca.pem"))


@tap.test
def who_has_no_right_is_refused():
    for config in (login("SASL_TLS", "SCRAM-SHA-256", "bob"), tls("TLS")):
        try:
            produce(Producer(config), b"x")
        except KafkaException as error:
            keep(error.args[0])
            equal(error.args[0].code(), KafkaError.TOPIC_AUTHORIZATION_FAILED, "the error")
        else:
            raise AssertionError("it writes")


@tap.test
def clients_authenticate_again():
    errors, brokers = [], {}
    client = Producer({
        **login("SASL_TLS", "SCRAM-SHA-512"), "error_cb": errors.append, "statistics.interval.ms": 200,
        "stats_cb": lambda text: brokers.update(json.loads(text)["brokers"]),
    })

    def counted():
        """Handshakes and connections of the broker that it writes to, from its latest statistics."""
        produce(client, b"again")
        counts = [(b["req"].get("SaslHandshake", 0), b["connects"]) for b in brokers.values() if b["req"].get("Produce")]
        return counts and counts[0]
    handshakes, connections = eventually("statistics", counted)
    # Sessions last five seconds.
    eventually("reauthentication", lambda: counted()[0] >= handshakes + 2)
    equal(counted()[1], connections, "connections")
    equal(errors, [], "errors")


@tap.test
def a_renewed_certificate_is_taken_under_load():
    host, port = os.environ["TLS"].rsplit(":", 1)

    def shown():
        context = ssl.create_default_context(cafile=file("ca.pem"))
        with socket.create_connection((host, int(port)), PATIENCE_SECONDS) as plain:
            with context.wrap_socket(plain, server_hostname=host) as encrypted:
                return encrypted.getpeercert()["subject"]

    before, errors = shown(), []
    lasting = Producer({**certificate("alice.pem"), "error_cb": errors.append})
    produce(lasting, b"before")
    os.replace(file("renewed.pem"), file("server.pem"))

    def renewed():
        produce(lasting, b"on an earlier connection")
        produce(Producer({**certificate("alice.pem"), "error_cb": errors.append}), b"on a new one")
        return shown() != before
    eventually("the new certificate", renewed)
    there_and_back(certificate("alice.pem"))
    produce(lasting, b"behind")
    equal(errors, [], "errors")
    check(("commonName", "renewed") in [pair for part in shown() for pair in part], "the name of the new one")


if __name__ == "__main__":
    tap.main(sys.argv[1:])
