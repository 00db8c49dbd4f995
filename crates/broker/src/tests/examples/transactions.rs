//! Transactions.

use super::*;

pub(super) fn body(key: ApiKey, version: i16, world: &World) -> Option<Bytes> {
    let from = |first: i16| version >= first;
    let id = || TransactionalId(text("no such transaction"));
    let topic = || TopicName(text(world.topic));
    Some(match key {
        ApiKey::AddPartitionsToTxn => {
            use add_partitions_to_txn_request::*;
            let topic =
                AddPartitionsToTxnTopic::default().with_name(topic()).with_partitions(vec![0]);
            let request = AddPartitionsToTxnRequest::default()
                .with_v3_and_below_transactional_id(id())
                .with_v3_and_below_producer_id(ProducerId(5))
                .with_v3_and_below_producer_epoch(1)
                .with_v3_and_below_topics(vec![topic]);
            encode(&request, version)
        }
        ApiKey::AddOffsetsToTxn => encode(
            &AddOffsetsToTxnRequest::default()
                .with_transactional_id(id())
                .with_producer_id(ProducerId(5))
                .with_producer_epoch(1)
                .with_group_id(GroupId(text(&world.group))),
            version,
        ),
        ApiKey::EndTxn => encode(
            &EndTxnRequest::default()
                .with_transactional_id(id())
                .with_producer_id(ProducerId(5))
                .with_producer_epoch(1)
                .with_committed(true),
            version,
        ),
        ApiKey::WriteTxnMarkers => {
            use write_txn_markers_request::*;
            let topic = WritableTxnMarkerTopic::default()
                .with_name(topic())
                .with_partition_indexes(vec![0]);
            let marker = WritableTxnMarker::default()
                .with_producer_id(ProducerId(5_000))
                .with_producer_epoch(1)
                .with_transaction_result(true)
                .with_topics(vec![topic])
                .with_coordinator_epoch(3);
            encode(&WriteTxnMarkersRequest::default().with_markers(vec![marker]), version)
        }
        ApiKey::TxnOffsetCommit => {
            use txn_offset_commit_request::*;
            let mut partition = TxnOffsetCommitRequestPartition::default()
                .with_committed_offset(7)
                .with_committed_metadata(Some(text("metadata")));
            if from(2) {
                partition.committed_leader_epoch = 0;
            }
            let topic = TxnOffsetCommitRequestTopic::default()
                .with_name(topic())
                .with_partitions(vec![partition]);
            let mut request = TxnOffsetCommitRequest::default()
                .with_transactional_id(id())
                .with_group_id(GroupId(text(&world.group)))
                .with_producer_id(ProducerId(5))
                .with_producer_epoch(1)
                .with_topics(vec![topic]);
            if from(3) {
                request.generation_id = 4;
                request.member_id = text("member");
                request.group_instance_id = Some(text("instance"));
            }
            encode(&request, version)
        }
        ApiKey::DescribeProducers => {
            use describe_producers_request::*;
            let topic = TopicRequest::default().with_name(topic()).with_partition_indexes(vec![0]);
            encode(&DescribeProducersRequest::default().with_topics(vec![topic]), version)
        }
        ApiKey::DescribeTransactions => encode(
            &DescribeTransactionsRequest::default().with_transactional_ids(vec![id()]),
            version,
        ),
        ApiKey::ListTransactions => {
            let mut request = ListTransactionsRequest::default()
                .with_state_filters(vec![text("Ongoing"), text("Imaginary")])
                .with_producer_id_filters(vec![ProducerId(3)]);
            if from(1) {
                request.duration_filter = 10;
            }
            if from(2) {
                request.transactional_id_pattern = Some(text("a.*"));
            }
            encode(&request, version)
        }
        _ => return None,
    })
}
