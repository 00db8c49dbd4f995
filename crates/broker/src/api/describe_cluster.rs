//! DescribeCluster.

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::describe_cluster_response::DescribeClusterBroker;
use kafka_protocol::messages::{BrokerId, DescribeClusterRequest, DescribeClusterResponse};
use kafka_protocol::protocol::StrBytes;

use super::Context;
use crate::security::{Operation, Resource};

/// The operations that the client may do with the cluster, if it may describe it.
pub(super) fn operations(cx: &Context) -> i32 {
    match cx.may(Operation::Describe, Resource::Cluster) {
        true => cx.authorized_operations(Resource::Cluster),
        false => 0,
    }
}

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
                "this endpoint belongs to a broker, not to a controller",
            )));
    }
    response
        .with_controller_id(BrokerId(node.id))
        .with_brokers(vec![
            DescribeClusterBroker::default()
                .with_broker_id(BrokerId(node.id))
                .with_host(cx.peer.listener.host.clone())
                .with_port(cx.peer.listener.port)
                .with_rack(node.rack.clone()),
        ])
        .with_cluster_authorized_operations(if request.include_cluster_authorized_operations {
            operations(cx)
        } else {
            i32::MIN
        })
}
