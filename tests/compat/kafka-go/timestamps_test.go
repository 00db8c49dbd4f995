package kafka

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"testing"
	"time"
)

// kafka-go's Conn writes the time of the last record as the maximum timestamp
// of a batch. The server must still find records by their own times.
func TestTimestampsOfRecordsThatAreNotInOrder(t *testing.T) {
	for _, compression := range []Compression{0, Gzip, Snappy, Lz4, Zstd} {
		t.Run(compression.String(), func(t *testing.T) {
			topic := makeTopic()
			createTopic(t, topic, 1)
			defer deleteTopic(t, topic)
			conn, err := DialLeader(context.Background(), "tcp", testBroker, topic, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(30 * time.Second))

			base := time.UnixMilli(time.Now().UnixMilli()).Add(-time.Hour)
			at := func(seconds int) time.Time { return base.Add(time.Duration(seconds) * time.Second) }
			// Each batch with its greatest time in the middle; the second batch is older.
			for _, batch := range [][]int{{20, 50, 10}, {15, 40, 30}} {
				var messages []Message
				for _, seconds := range batch {
					value := []byte(fmt.Sprint(seconds))
					messages = append(messages, Message{Value: value, Time: at(seconds)})
				}
				if _, err := conn.WriteCompressedMessages(compression.Codec(), messages...); err != nil {
					t.Fatal(err)
				}
			}

			for _, wanted := range []struct{ from, offset, found int }{
				{0, 0, 20},
				{20, 0, 20},
				{21, 1, 50},
				{45, 1, 50},
				{50, 1, 50},
				{51, -1, -1},
			} {
				offset, timestamp := offsetOfTime(t, topic, at(wanted.from).UnixMilli())
				found := int64(-1)
				if wanted.found >= 0 {
					found = at(wanted.found).UnixMilli()
				}
				if offset != int64(wanted.offset) || timestamp != found {
					t.Errorf("from second %d on: offset %d at %d, wanted %d at %d",
						wanted.from, offset, timestamp, wanted.offset, found)
				}
				// The client's own request has an older version, without a time in its answer.
				if offset, err := conn.ReadOffset(at(wanted.from)); err != nil || offset != int64(wanted.offset) {
					t.Errorf("ReadOffset from second %d on: %d, %v", wanted.from, offset, err)
				}
			}
			if offset, timestamp := offsetOfTime(t, topic, -3); offset != 1 || timestamp != at(50).UnixMilli() {
				t.Errorf("the greatest time: offset %d at %d", offset, timestamp)
			}
		})
	}
}

// offsetOfTime asks with ListOffsets 7, the first version with -3 for the
// record with the greatest time. kafka-go has none above 5.
func offsetOfTime(t *testing.T, topic string, timestamp int64) (offset, found int64) {
	t.Helper()
	conn, err := net.Dial("tcp", testBroker)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(30 * time.Second))

	var request bytes.Buffer
	put := func(values ...any) {
		for _, value := range values {
			binary.Write(&request, binary.BigEndian, value)
		}
	}
	// Header: key, version, correlation id, no client id, no tags.
	put(int16(2), int16(7), int32(1), int16(-1), int8(0))
	// Replica, isolation level, and one topic with one partition.
	put(int32(-1), int8(0), int8(2), int8(len(topic)+1), []byte(topic), int8(2))
	put(int32(0), int32(-1), timestamp, int8(0), int8(0), int8(0))
	frame := binary.BigEndian.AppendUint32(nil, uint32(request.Len()))
	if _, err := conn.Write(append(frame, request.Bytes()...)); err != nil {
		t.Fatal(err)
	}

	var size int32
	if err := binary.Read(conn, binary.BigEndian, &size); err != nil {
		t.Fatal(err)
	}
	response := make([]byte, size)
	if _, err := io.ReadFull(conn, response); err != nil {
		t.Fatal(err)
	}
	// Correlation id, tags, throttle time, one topic, its name, one partition.
	body := response[4+1+4+1+1+len(topic)+1:]
	var partition struct {
		Index             int32
		Error             int16
		Timestamp, Offset int64
	}
	if err := binary.Read(bytes.NewReader(body), binary.BigEndian, &partition); err != nil {
		t.Fatal(err)
	}
	if partition.Error != 0 {
		t.Fatalf("ListOffsets: %v", Error(partition.Error))
	}
	return partition.Offset, partition.Timestamp
}
