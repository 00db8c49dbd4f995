//! Kafka's tools with `--command-config`. Each case builds on the previous ones.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use super::{Environment, password};
use crate::Error;
use crate::compat::tools::{Case, OUTPUT, badly, case_passes, fed, well};
use crate::report;

/// Cases on one listener, with the properties files that they use.
struct Cases {
    /// The listener.
    at: fn(&Environment) -> SocketAddr,
    /// Each starts with `--command-config $FILES/NAME.properties` for one of these.
    cases: &'static [Case],
}

const ALL: &[Cases] = &[
    Cases {
        at: |environment| environment.sasl_tls,
        cases: &[
            well(
                "topics",
                "the administrator creates a topic",
                "--command-config $FILES/admin.properties --create --topic tools",
                &["Created topic tools."],
            ),
            badly(
                "topics",
                "other users may not",
                "--command-config $FILES/alice.properties --create --topic more",
                &["*TopicAuthorizationException*"],
            ),
            badly(
                "topics",
                "a wrong password is refused",
                "--command-config $FILES/wrong-password.properties --list",
                &["*SaslAuthenticationException*invalid credentials with SASL mechanism \
                     SCRAM-SHA-512*"],
            ),
            badly(
                "topics",
                "a server of an unknown authority is not trusted",
                "--command-config $FILES/wrong-ca.properties --list",
                &["*SslAuthenticationException*"],
            ),
            fed(
                "console-producer",
                "records of the administrator",
                "--command-config $FILES/admin.properties --topic tools",
                "one\ntwo\n",
            ),
            well(
                "console-consumer",
                "nothing is read without permission",
                "--command-config $FILES/alice.properties --topic tools --from-beginning \
                 --max-messages 2 --group of-alice",
                &[
                    "*TopicAuthorizationException: Not authorized to access topics: *tools*",
                    "Processed a total of 0 messages",
                ],
            ),
            well(
                "acls",
                "reading is allowed by a name",
                "--command-config $FILES/admin.properties --add --allow-principal User:alice \
                 --operation Read --topic tools",
                &["*(principal=User:alice, host=*, operation=READ, permissionType=ALLOW)"],
            ),
            well(
                "acls",
                "groups are allowed by a prefix",
                "--command-config $FILES/admin.properties --add --allow-principal User:alice \
                 --operation Read --group of- --resource-pattern-type prefixed",
                &["*(principal=User:alice, host=*, operation=READ, permissionType=ALLOW)"],
            ),
            well(
                "console-consumer",
                "the topic is then readable",
                "--command-config $FILES/alice.properties --topic tools --from-beginning \
                 --max-messages 2 --group of-alice",
                &["one", "two", "Processed a total of 2 messages"],
            ),
            well(
                "consumer-groups",
                "and the group is described",
                "--command-config $FILES/alice.properties --describe --group of-alice",
                &["of-alice tools 0 2 2 0 *"],
            ),
            well(
                "consumer-groups",
                "another group is not described",
                "--command-config $FILES/alice.properties --describe --group other",
                &["*GroupAuthorizationException*"],
            ),
            well(
                "acls",
                "a denial wins",
                "--command-config $FILES/admin.properties --add --deny-principal User:alice \
                 --operation Read --topic too --resource-pattern-type prefixed",
                &["*(principal=User:alice, host=*, operation=READ, permissionType=DENY)"],
            ),
            well(
                "console-consumer",
                "nothing is read any more",
                "--command-config $FILES/alice.properties --topic tools --from-beginning \
                 --max-messages 2 --group of-alice",
                &[
                    "*TopicAuthorizationException: Not authorized to access topics: *tools*",
                    "Processed a total of 0 messages",
                ],
            ),
            badly(
                "acls",
                "ACLs are not listed without permission",
                "--command-config $FILES/alice.properties --list",
                &["*ClusterAuthorizationException*"],
            ),
            well(
                "configs",
                "a user is created",
                "--command-config $FILES/admin.properties --alter --entity-type users \
                 --entity-name dave --add-config \
                 SCRAM-SHA-512=[iterations=8192,password=dave-has-this-secret]",
                &["Completed updating config for user dave."],
            ),
            well(
                "topics",
                "the user logs in and sees no topics",
                "--command-config $FILES/dave.properties --list",
                &["!tools"],
            ),
        ],
    },
    Cases {
        at: |environment| environment.mutual_tls,
        cases: &[
            well(
                "topics",
                "a certificate maps to a user by the rules",
                "--command-config $FILES/certificate.properties --list",
                &["tools"],
            ),
            badly(
                "topics",
                "a client without a certificate is refused",
                "--command-config $FILES/no-certificate.properties --list",
                &["*SslAuthenticationException*"],
            ),
        ],
    },
];

pub(super) fn run(jars: &Path, environment: &Environment) -> Result<Vec<report::Case>, Error> {
    let files = &environment.files;
    let trusting = |ca: &str| {
        let ca = files.join(ca).display().to_string();
        format!("ssl.truststore.type=PEM\nssl.truststore.location={ca}\n")
    };
    let logging_in = |user: &str, password: &str, ca: &str| {
        format!(
            "{}security.protocol=SASL_SSL\nsasl.mechanism=SCRAM-SHA-512\nsasl.jaas.config=\
             org.apache.kafka.common.security.scram.ScramLoginModule required \
             username=\"{user}\" password=\"{password}\";\n",
            trusting(ca)
        )
    };
    let certificate = files.join("alice.pem").display().to_string();
    let tls = format!("{}security.protocol=SSL\n", trusting("ca.pem"));
    for (name, text) in [
        ("admin", logging_in("admin", &password("admin"), "ca.pem")),
        ("alice", logging_in("alice", &password("alice"), "ca.pem")),
        ("dave", logging_in("dave", &password("dave"), "ca.pem")),
        ("wrong-password", logging_in("alice", &password("bob"), "ca.pem")),
        ("wrong-ca", logging_in("alice", &password("alice"), "stranger-ca.pem")),
        (
            "certificate",
            format!("{tls}ssl.keystore.type=PEM\nssl.keystore.location={certificate}\n"),
        ),
        ("no-certificate", tls),
    ] {
        fs::write(files.join(format!("{name}.properties")), text)?;
    }
    let class_path = format!("{}/*", jars.display());
    let mut done = Vec::new();
    for Cases { at, cases } in ALL {
        let address = at(environment).to_string();
        for case in *cases {
            done.push(report::Case::run(&format!("{}: {}", case.tool, case.what), || {
                case_passes(case, &address, &class_path, files)?;
                environment.keep_errors("tools", &fs::read(files.join(OUTPUT))?)
            }));
        }
    }
    Ok(done)
}
