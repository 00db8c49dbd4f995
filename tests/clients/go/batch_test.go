package clients

import (
	"encoding/binary"
	"hash/crc32"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// pinned sends a request with a fixed version instead of the highest common one.
type pinned struct {
	kmsg.Request
	version int16
}

// MaxVersion limits the client's negotiation.
func (p pinned) MaxVersion() int16 { return p.version }

func leader(t *testing.T, c *kgo.Client, topic string) int {
	t.Helper()
	request := kmsg.NewPtrMetadataRequest()
	name := kmsg.NewMetadataRequestTopic()
	name.Topic = kmsg.StringPtr(topic)
	request.Topics = append(request.Topics, name)
	response, err := request.RequestWith(soon(t), c)
	must(t, err)
	return int(response.Topics[0].Partitions[0].Leader)
}

// batch encodes an uncompressed record batch (magic 2) with a producer's ID, epoch and first sequence.
func batch(producer int64, epoch int16, sequence int32, count int) []byte {
	now := time.Now().UnixMilli()
	var records []byte
	for n := range count {
		record := kmsg.Record{OffsetDelta: int32(n), Value: []byte{byte(n)}}
		// The length counts the bytes after it: encode once to learn it, then again with it.
		record.Length = int32(len(record.AppendTo(nil)) - 1)
		records = record.AppendTo(records)
	}
	header := kmsg.RecordBatch{
		Magic: 2, PartitionLeaderEpoch: -1, LastOffsetDelta: int32(count - 1), FirstTimestamp: now, MaxTimestamp: now,
		ProducerID: producer, ProducerEpoch: epoch, FirstSequence: sequence, NumRecords: int32(count), Records: records,
	}
	encoded := header.AppendTo(nil)
	binary.BigEndian.PutUint32(encoded[8:], uint32(len(encoded)-12))
	binary.BigEndian.PutUint32(encoded[17:], crc32.Checksum(encoded[21:], crc32.MakeTable(crc32.Castagnoli)))
	return encoded
}
