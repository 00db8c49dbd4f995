//! DescribeCluster.

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::describe_cluster_response::DescribeClusterBroker;
use kafka_protocol::messages::{BrokerId, DescribeClusterRequest, DescribeClusterResponse};
use kafka_protocol::protocol::StrBytes;

use super::Context;

// Sets of operations, one bit for each of Kafka's AclOperation codes. Without an authorizer all that a resource
// has are allowed.
const READ: i32 = 1 << 3;
const WRITE: i32 = 1 << 4;
const CREATE: i32 = 1 << 5;
const DELETE: i32 = 1 << 6;
const ALTER: i32 = 1 << 7;
const DESCRIBE: i32 = 1 << 8;
const CLUSTER_ACTION: i32 = 1 << 9;
const DESCRIBE_CONFIGS: i32 = 1 << 10;
const ALTER_CONFIGS: i32 = 1 << 11;
const IDEMPOTENT_WRITE: i32 = 1 << 12;

/// What may be done with a topic.
pub(super) const TOPIC_OPERATIONS: i32 =
    READ | WRITE | CREATE | DELETE | ALTER | DESCRIBE | DESCRIBE_CONFIGS | ALTER_CONFIGS;

/// What may be done with the cluster.
pub(super) const CLUSTER_OPERATIONS: i32 = CREATE
    | ALTER
    | DESCRIBE
    | CLUSTER_ACTION
    | DESCRIBE_CONFIGS
    | ALTER_CONFIGS
    | IDEMPOTENT_WRITE;

const BROKERS: i8 = 1;

pub(super) async fn handle(
    cx: &Context,
    request: DescribeClusterRequest,
) -> DescribeClusterResponse {
    let node = &cx.server.node;
    let response = DescribeClusterResponse::default().with_cluster_id(node.cluster_id.clone());
    if request.endpoint_type != BROKERS {
        return response
            .with_endpoint_type(request.endpoint_type)
            .with_error_code(ResponseError::MismatchedEndpointType.code())
            .with_error_message(Some(StrBytes::from_static_str(
                "this is an endpoint of a broker",
            )));
    }
    response
        .with_controller_id(BrokerId(node.id))
        .with_brokers(vec![
            DescribeClusterBroker::default()
                .with_broker_id(BrokerId(node.id))
                .with_host(node.host.clone())
                .with_port(node.port),
        ])
        .with_cluster_authorized_operations(if request.include_cluster_authorized_operations {
            CLUSTER_OPERATIONS
        } else {
            i32::MIN
        })
}
