// Package clients tests a running server with franz-go:
//
//	BOOTSTRAP=127.0.0.1:9092 go test -count=1 -v ./...
package clients

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Limit after which a test fails instead of hanging. No test measures time.
const patience = 60 * time.Second

func bootstrap() string {
	if address := os.Getenv("BOOTSTRAP"); address != "" {
		return address
	}
	return "127.0.0.1:9092"
}

func client(t *testing.T, options ...kgo.Opt) *kgo.Client {
	t.Helper()
	c, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(bootstrap()), kgo.MetadataMinAge(100 * time.Millisecond)}, options...)...)
	must(t, err)
	t.Cleanup(c.Close)
	return c
}

func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func equal[T comparable](t *testing.T, got, wanted T, what string) {
	t.Helper()
	if got != wanted {
		t.Fatalf("%s: %v, not %v", what, got, wanted)
	}
}

func createTopic(t *testing.T, name string, partitions int32) string {
	t.Helper()
	_, err := kadm.NewClient(client(t)).CreateTopic(soon(t), partitions, 1, nil, name)
	must(t, err)
	return name
}

// poll reads exactly `count` records, in the order in which the client returns them.
func poll(t *testing.T, c *kgo.Client, count int) []*kgo.Record {
	t.Helper()
	ctx := soon(t)
	var records []*kgo.Record
	for len(records) < count {
		fetches := c.PollFetches(ctx)
		for _, failed := range fetches.Errors() {
			t.Fatalf("after %d of %d records: %s/%d: %v", len(records), count, failed.Topic, failed.Partition, failed.Err)
		}
		records = append(records, fetches.Records()...)
	}
	equal(t, len(records), count, "records")
	return records
}

func readFromStart(t *testing.T, count int, topics ...string) []*kgo.Record {
	t.Helper()
	c := client(t, kgo.ConsumeTopics(topics...), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	return poll(t, c, count)
}

func TestEveryCompressionComesBack(t *testing.T) {
	codecs := map[string]kgo.CompressionCodec{
		"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(),
		"lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
	}
	for name, codec := range codecs {
		t.Run(name, func(t *testing.T) {
			topic := createTopic(t, "go-codec-"+name, 1)
			producer := client(t, kgo.ProducerBatchCompression(codec), kgo.DefaultProduceTopic(topic))
			var sent []*kgo.Record
			for n := range 2000 {
				value := fmt.Appendf(nil, "%d %s", n, slices.Repeat([]byte("compress me "), n%100))
				sent = append(sent, &kgo.Record{Key: fmt.Appendf(nil, "%d", n), Value: value})
			}
			must(t, producer.ProduceSync(soon(t), sent...).FirstErr())
			for n, record := range readFromStart(t, len(sent), topic) {
				equal(t, record.Offset, int64(n), "offset")
				equal(t, string(record.Key), string(sent[n].Key), "key")
				equal(t, string(record.Value), string(sent[n].Value), "value")
			}
		})
	}
}

func TestShapesOfRecords(t *testing.T) {
	topic := createTopic(t, "go-shapes", 1)
	sent := []*kgo.Record{
		{},
		{Key: []byte{}, Value: []byte{}},
		{Key: []byte("key")},
		{Value: []byte("\x00\xff"), Headers: []kgo.RecordHeader{{Key: "a", Value: []byte("1")}, {Key: "a", Value: nil}, {Key: "", Value: []byte{}}}},
	}
	producer := client(t, kgo.DefaultProduceTopic(topic))
	must(t, producer.ProduceSync(soon(t), sent...).FirstErr())
	for n, record := range readFromStart(t, len(sent), topic) {
		equal(t, fmt.Sprintf("%#v", record.Key), fmt.Sprintf("%#v", sent[n].Key), "key")
		equal(t, fmt.Sprintf("%#v", record.Value), fmt.Sprintf("%#v", sent[n].Value), "value")
		equal(t, fmt.Sprintf("%#v", record.Headers), fmt.Sprintf("%#v", sent[n].Headers), "headers")
		if record.Timestamp.UnixMilli() != sent[n].Timestamp.UnixMilli() {
			t.Fatalf("timestamp %v, not %v", record.Timestamp, sent[n].Timestamp)
		}
	}
}

// Small batches, several requests of one idempotent producer in flight on one connection (five by default): the server
// must process the sequences in order and answer in order.
func TestPipelinedIdempotentProduce(t *testing.T) {
	const partitions, perPartition = 4, 5000
	topic := createTopic(t, "go-pipelined", partitions)
	producer := client(t, kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchMaxBytes(2000),
		kgo.ProducerLinger(0))
	var mu sync.Mutex
	var failures []error
	for n := range perPartition {
		for partition := range int32(partitions) {
			record := &kgo.Record{Topic: topic, Partition: partition, Value: []byte(strconv.Itoa(n))}
			producer.Produce(soon(t), record, func(r *kgo.Record, err error) {
				mu.Lock()
				defer mu.Unlock()
				if err == nil && strconv.FormatInt(r.Offset, 10) != string(r.Value) {
					err = fmt.Errorf("record %s got offset %d", r.Value, r.Offset)
				}
				if err != nil {
					failures = append(failures, err)
				}
			})
		}
	}
	must(t, producer.Flush(soon(t)))
	must(t, errors.Join(failures...))
	next := make([]int, partitions)
	for _, record := range readFromStart(t, partitions*perPartition, topic) {
		equal(t, string(record.Value), strconv.Itoa(next[record.Partition]), "value")
		next[record.Partition]++
	}
}

// A duplicate, a gap, an old epoch: what a producer that lost responses may send.
func TestSequencesAreChecked(t *testing.T) {
	topic := createTopic(t, "go-sequences", 1)
	raw := client(t)
	init := kmsg.NewPtrInitProducerIDRequest()
	init.ProducerID, init.ProducerEpoch = -1, -1
	session, err := init.RequestWith(soon(t), raw)
	must(t, err)
	must(t, kerr.ErrorForCode(session.ErrorCode))

	produce := func(epoch int16, sequence int32, count int) (int64, error) {
		request := kmsg.NewPtrProduceRequest()
		request.SetVersion(9) // by topic name
		request.Acks, request.TimeoutMillis = -1, 10_000
		partition := kmsg.NewProduceRequestTopicPartition()
		partition.Records = batch(session.ProducerID, epoch, sequence, count)
		requestTopic := kmsg.NewProduceRequestTopic()
		requestTopic.Topic = topic
		requestTopic.Partitions = append(requestTopic.Partitions, partition)
		request.Topics = append(request.Topics, requestTopic)
		responses, err := raw.Broker(leader(t, raw, topic)).Request(soon(t), pinned{request, 9})
		must(t, err)
		answer := responses.(*kmsg.ProduceResponse).Topics[0].Partitions[0]
		return answer.BaseOffset, kerr.ErrorForCode(answer.ErrorCode)
	}
	expect := func(epoch int16, sequence int32, count int, wantedOffset int64, wanted error) {
		t.Helper()
		offset, err := produce(epoch, sequence, count)
		if !errors.Is(err, wanted) {
			t.Fatalf("epoch %d, sequence %d: error %v, not %v", epoch, sequence, err, wanted)
		}
		if wanted == nil {
			equal(t, offset, wantedOffset, fmt.Sprintf("offset of sequence %d", sequence))
		}
	}
	epoch := session.ProducerEpoch
	for n := range int32(5) {
		expect(epoch, n*10, 10, int64(n)*10, nil)
	}
	for n := range int32(5) { // the last five batches are remembered: a retry gets the original answer
		expect(epoch, n*10, 10, int64(n)*10, nil)
	}
	expect(epoch, 60, 10, 0, kerr.OutOfOrderSequenceNumber)
	expect(epoch+1, 0, 10, 50, nil)
	expect(epoch, 50, 10, 0, kerr.InvalidProducerEpoch)
	expect(epoch+1, 10, 10, 60, nil)
	equal(t, len(readFromStart(t, 70, topic)), 70, "records")
}

// A fetch session is an incremental fetch: partitions that did not change are left out of request and answer.
func TestFetchSessionsCarryManyPartitions(t *testing.T) {
	const topics, partitions, rounds = 5, 20, 5
	var names []string
	for n := range topics {
		names = append(names, createTopic(t, fmt.Sprintf("go-session-%d", n), partitions))
	}
	consumer := client(t, kgo.ConsumeTopics(names...), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	producer := client(t, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	random := rand.New(rand.NewPCG(1, 2))
	for round := range rounds {
		var sent []*kgo.Record
		for _, name := range names {
			for partition := range int32(partitions) {
				if random.IntN(3) > 0 { // most fetches change only a part of the session
					continue
				}
				sent = append(sent, &kgo.Record{Topic: name, Partition: partition, Value: fmt.Appendf(nil, "%s/%d/%d", name, partition, round)})
			}
		}
		must(t, producer.ProduceSync(soon(t), sent...).FirstErr())
		var got, wanted []string
		for _, record := range sent {
			wanted = append(wanted, string(record.Value))
		}
		for _, record := range poll(t, consumer, len(sent)) {
			got = append(got, string(record.Value))
			equal(t, string(record.Value), fmt.Sprintf("%s/%d/%d", record.Topic, record.Partition, round), "value")
		}
		slices.Sort(got)
		slices.Sort(wanted)
		if !slices.Equal(got, wanted) {
			t.Fatalf("round %d: read %v, not %v", round, got, wanted)
		}
		// One partition leaves the session and returns: it must be forgotten and added again.
		consumer.PauseFetchPartitions(map[string][]int32{names[0]: {0}})
		must(t, producer.ProduceSync(soon(t), &kgo.Record{Topic: names[0], Partition: 1, Value: fmt.Appendf(nil, "pause")}).FirstErr())
		equal(t, string(poll(t, consumer, 1)[0].Value), "pause", "value while one partition is paused")
		consumer.ResumeFetchPartitions(map[string][]int32{names[0]: {0}})
	}
}

// Clients that set small limits must still make progress, record by record.
func TestByteLimitsOfFetches(t *testing.T) {
	topic := createTopic(t, "go-limits", 3)
	producer := client(t, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	for n := range 30 {
		value := make([]byte, 50_000)
		copy(value, strconv.Itoa(n))
		must(t, producer.ProduceSync(soon(t), &kgo.Record{Topic: topic, Partition: int32(n % 3), Value: value}).FirstErr())
	}
	consumer := client(t, kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchMaxBytes(1000), kgo.FetchMaxPartitionBytes(500))
	next := map[int32]int64{}
	for _, record := range poll(t, consumer, 30) {
		equal(t, record.Offset, next[record.Partition], "offset")
		equal(t, len(record.Value), 50_000, "length of the value")
		next[record.Partition]++
	}
}

func TestGroupSharesReadsAndHandsOver(t *testing.T) {
	for name, balancer := range map[string]kgo.GroupBalancer{
		"range": kgo.RangeBalancer(), "round-robin": kgo.RoundRobinBalancer(), "cooperative-sticky": kgo.CooperativeStickyBalancer(),
	} {
		t.Run(name, func(t *testing.T) {
			const partitions, perRound = 6, 600
			topic, group := createTopic(t, "go-group-"+name, partitions), "go-group-"+name
			join := func() *kgo.Client {
				return client(t, kgo.ConsumerGroup(group), kgo.ConsumeTopics(topic), kgo.Balancers(balancer), kgo.DisableAutoCommit(),
					kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.SessionTimeout(6*time.Second), kgo.HeartbeatInterval(500*time.Millisecond))
			}
			producer := client(t, kgo.RecordPartitioner(kgo.RoundRobinPartitioner()), kgo.DefaultProduceTopic(topic))
			written := 0
			write := func() {
				t.Helper()
				for range perRound {
					producer.Produce(context.Background(), &kgo.Record{Value: []byte(strconv.Itoa(written))}, func(_ *kgo.Record, err error) {
						if err != nil {
							t.Error(err)
						}
					})
					written++
				}
				must(t, producer.Flush(soon(t)))
			}
			seen := map[string]int{}
			// Reads with all members until every written record has been seen, then commits.
			drain := func(members ...*kgo.Client) {
				t.Helper()
				deadline := time.Now().Add(patience)
				for len(seen) < written {
					if time.Now().After(deadline) {
						t.Fatalf("%d of %d records after %v", len(seen), written, patience)
					}
					for _, member := range members {
						ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
						fetches := member.PollFetches(ctx)
						cancel()
						fetches.EachRecord(func(r *kgo.Record) { seen[string(r.Value)]++ })
					}
				}
				for _, member := range members {
					must(t, member.CommitUncommittedOffsets(soon(t)))
				}
			}
			admin := kadm.NewClient(client(t))
			settled := func(members int) {
				t.Helper()
				deadline := time.Now().Add(patience)
				for {
					described, err := admin.DescribeGroups(soon(t), group)
					must(t, err)
					owned := map[int32]int{}
					for _, member := range described[group].Members {
						if assigned, ok := member.Assigned.AsConsumer(); ok {
							for _, each := range assigned.Topics {
								for _, partition := range each.Partitions {
									owned[partition]++
								}
							}
						}
					}
					if described[group].State == "Stable" && len(described[group].Members) == members && len(owned) == partitions {
						for partition, owners := range owned {
							equal(t, owners, 1, fmt.Sprintf("owners of partition %d", partition))
						}
						return
					}
					if time.Now().After(deadline) {
						t.Fatalf("no stable group of %d members: %+v", members, described[group])
					}
					time.Sleep(50 * time.Millisecond)
				}
			}

			first := join()
			write()
			drain(first)
			settled(1)
			second, third := join(), join()
			settled(3)
			write()
			drain(first, second, third)
			second.Close()
			settled(2)
			write()
			drain(first, third)
			for value, times := range seen {
				equal(t, times, 1, "deliveries of record "+value)
			}
			offsets, err := admin.FetchOffsets(soon(t), group)
			must(t, err)
			total := int64(0)
			offsets.Each(func(o kadm.OffsetResponse) { total += o.At })
			equal(t, total, int64(written), "sum of the committed offsets")
			lag, err := admin.Lag(soon(t), group)
			must(t, err)
			equal(t, lag[group].Lag.Total(), 0, "lag")
		})
	}
}

func TestAdminListsWhatThereIs(t *testing.T) {
	topic := createTopic(t, "go-admin", 3)
	admin := kadm.NewClient(client(t))
	metadata, err := admin.Metadata(soon(t))
	must(t, err)
	equal(t, len(metadata.Topics[topic].Partitions), 3, "partitions")
	equal(t, metadata.Controller >= 0, true, "a controller exists")
	brokers, err := admin.ListBrokers(soon(t))
	must(t, err)
	equal(t, len(brokers), 1, "brokers")
	versions, err := admin.ApiVersions(soon(t))
	must(t, err)
	for _, broker := range versions {
		must(t, broker.Err)
	}

	producer := client(t, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	must(t, producer.ProduceSync(soon(t), &kgo.Record{Topic: topic, Partition: 2, Value: []byte("x")}).FirstErr())
	ends, err := admin.ListEndOffsets(soon(t), topic)
	must(t, err)
	for partition, wanted := range map[int32]int64{0: 0, 1: 0, 2: 1} {
		found, ok := ends.Lookup(topic, partition)
		equal(t, ok, true, "the partition is listed")
		equal(t, found.Offset, wanted, fmt.Sprintf("end of partition %d", partition))
	}

	manual := kadm.Offsets{}
	manual.Add(kadm.Offset{Topic: topic, Partition: 2, At: 1, LeaderEpoch: -1, Metadata: "by hand"})
	committed, err := admin.CommitOffsets(soon(t), "go-admin-group", manual)
	must(t, err)
	must(t, committed.Error())
	fetched, err := admin.FetchOffsets(soon(t), "go-admin-group")
	must(t, err)
	offset, ok := fetched.Lookup(topic, 2)
	equal(t, ok, true, "the offset exists")
	equal(t, offset.At, 1, "offset")
	equal(t, offset.Metadata, "by hand", "metadata")
	groups, err := admin.ListGroups(soon(t))
	must(t, err)
	equal(t, slices.Contains(groups.Groups(), "go-admin-group"), true, "the group is listed")

	_, err = admin.UpdatePartitions(soon(t), 4, topic)
	must(t, err)
	_, err = admin.DeleteTopic(soon(t), topic)
	must(t, err)
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		// A server may answer before the deletion has reached its metadata.
		deleted, err := admin.ListTopics(soon(t), topic)
		must(t, err)
		if errors.Is(deleted[topic].Err, kerr.UnknownTopicOrPartition) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("describing a deleted topic returned %v", deleted[topic].Err)
		}
	}
}
