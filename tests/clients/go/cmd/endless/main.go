// Command endless writes many bytes and reads all of them back from the start. Every value can be computed from the seed,
// its partition and its number, so that nothing has to be stored for the comparison.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

var (
	bootstrap  = flag.String("bootstrap", "127.0.0.1:9092", "address of the server")
	topic      = flag.String("topic", "endless", "topic that is created, written and read")
	partitions = flag.Int("partitions", 4, "number of its partitions")
	total      = flag.Int64("bytes", 1<<30, "bytes of values to write")
	recordSize = flag.Int("record-bytes", 16<<10, "bytes of one value")
	seed       = flag.Uint64("seed", 1, "seed of the values")
)

// pool holds random bytes that values are cut from: values must be incompressible and cheap to make.
var pool = make([]byte, 1<<20)

func value(partition, number int64) []byte {
	random := rand.New(rand.NewPCG(*seed^uint64(partition)<<48, uint64(number)))
	v := make([]byte, *recordSize)
	binary.BigEndian.PutUint64(v, uint64(partition))
	binary.BigEndian.PutUint64(v[8:], uint64(number))
	copy(v[16:], pool[random.IntN(len(pool)-*recordSize):])
	return v
}

func write(ctx context.Context, perPartition int64) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(*bootstrap), kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerBatchCompression(kgo.NoCompression()), kgo.MaxBufferedBytes(64<<20))
	if err != nil {
		return err
	}
	defer client.Close()
	var failed atomic.Pointer[error]
	for number := range perPartition {
		for partition := range int64(*partitions) {
			record := &kgo.Record{Topic: *topic, Partition: int32(partition), Value: value(partition, number)}
			client.Produce(ctx, record, func(r *kgo.Record, err error) {
				if err == nil && r.Offset != number {
					err = fmt.Errorf("record %d of partition %d got offset %d", number, partition, r.Offset)
				}
				if err != nil {
					failed.CompareAndSwap(nil, &err)
				}
			})
		}
		if err := failed.Load(); err != nil {
			return *err
		}
	}
	if err := client.Flush(ctx); err != nil {
		return err
	}
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

func read(ctx context.Context, perPartition int64) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(*bootstrap), kgo.ConsumeTopics(*topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		return err
	}
	defer client.Close()
	next := make([]int64, *partitions)
	for remaining := perPartition * int64(*partitions); remaining > 0; {
		fetches := client.PollFetches(ctx)
		for _, failed := range fetches.Errors() {
			return fmt.Errorf("partition %d, next record %d: %w", failed.Partition, next[failed.Partition], failed.Err)
		}
		for _, record := range fetches.Records() {
			partition := int64(record.Partition)
			if record.Offset != next[partition] {
				return fmt.Errorf("partition %d: offset %d follows %d", partition, record.Offset, next[partition]-1)
			}
			if !bytes.Equal(record.Value, value(partition, record.Offset)) {
				return fmt.Errorf("partition %d: wrong value at offset %d", partition, record.Offset)
			}
			next[partition]++
			remaining--
		}
	}
	return nil
}

func run() error {
	random := rand.New(rand.NewPCG(*seed, 0))
	for n := range pool {
		pool[n] = byte(random.Uint32())
	}
	perPartition := *total / int64(*recordSize) / int64(*partitions)
	if perPartition == 0 || *recordSize < 16 || *recordSize > len(pool) {
		return errors.New("-bytes and -record-bytes are inconsistent")
	}
	ctx := context.Background()
	client, err := kgo.NewClient(kgo.SeedBrokers(*bootstrap))
	if err != nil {
		return err
	}
	defer client.Close()
	if _, err := kadm.NewClient(client).CreateTopic(ctx, int32(*partitions), 1, nil, *topic); err != nil {
		return err
	}
	mebibytes := float64(perPartition*int64(*partitions)*int64(*recordSize)) / (1 << 20)
	for _, phase := range []struct {
		name string
		run  func(context.Context, int64) error
	}{{"written", write}, {"read back and compared", read}} {
		start := time.Now()
		if err := phase.run(ctx, perPartition); err != nil {
			return err
		}
		fmt.Printf("%.0f MiB %s in %.1f s\n", mebibytes, phase.name, time.Since(start).Seconds())
	}
	return nil
}

func main() {
	flag.Parse()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
