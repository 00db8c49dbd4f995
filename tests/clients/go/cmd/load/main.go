// Command load is the franz-go half of the kill test's load; tests/clients/python/load.py is the librdkafka half.
// Both write the same journal, which tests/clients/README.md describes.
package main

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

var (
	bootstrap  = flag.String("bootstrap", "127.0.0.1:9092", "address of the server")
	topic      = flag.String("topic", "kill", "topic to write to and to read from")
	partitions = flag.Int("partitions", 6, "number of its partitions")
	producers  = flag.Int("producers", 2, "number of producers, each with its own client")
	members    = flag.Int("members", 1, "number of members of the consumer group")
	name       = flag.String("name", "go", "prefix of the producers' names, and name of the group")
	seed       = flag.Uint64("seed", 1, "seed of sizes, partitions and pauses")
	path       = flag.String("journal", "", "file to write the journal to")
)

// journal writes one line per event. A line is in the file before the client that caused it continues.
type journal struct {
	mu sync.Mutex
	w  *bufio.Writer
}

func (j *journal) line(format string, arguments ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	fmt.Fprintf(j.w, format+"\n", arguments...)
	if err := j.w.Flush(); err != nil {
		panic(err)
	}
}

// size returns mostly small and sometimes large sizes: small records share blocks, large ones span several.
func size(random *rand.Rand) int {
	switch n := random.IntN(100); {
	case n < 90:
		return 20 + random.IntN(480)
	case n < 99:
		return 1_000 + random.IntN(7_000)
	default:
		return 50_000 + random.IntN(150_000)
	}
}

func produce(stop <-chan struct{}, out *journal, number int) {
	who := fmt.Sprintf("%s%d", *name, number)
	// Idempotent by default; it never gives up, since a producer that drops a record may continue after the gap.
	client, err := kgo.NewClient(kgo.SeedBrokers(*bootstrap), kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.RetryBackoffFn(func(int) time.Duration { return 100 * time.Millisecond }), kgo.UnknownTopicRetries(-1),
		kgo.ProducerLinger(0), kgo.DefaultProduceTopic(*topic))
	if err != nil {
		out.line("F %s: %v", who, err)
		return
	}
	defer client.Close()
	random := rand.New(rand.NewPCG(*seed, uint64(number)))
	filler := make([]byte, 300_000)
	for n := range filler {
		filler[n] = byte(random.Uint32())
	}
	next := make([]int, *partitions)
	for {
		select {
		case <-stop:
			if err := client.Flush(context.Background()); err != nil {
				out.line("F %s: flush: %v", who, err)
			}
			return
		case <-time.After(time.Duration(random.IntN(20)) * time.Millisecond):
		}
		for range 1 + random.IntN(20) {
			partition := random.IntN(*partitions)
			sequence := next[partition]
			next[partition]++
			start := random.IntN(100_000)
			record := &kgo.Record{
				Partition: int32(partition),
				Key:       fmt.Appendf(nil, "%s:%d", who, sequence),
				Value:     filler[start : start+size(random)],
			}
			client.Produce(context.Background(), record, func(r *kgo.Record, err error) {
				if err != nil {
					out.line("F %s: record %d of partition %d: %v", who, sequence, partition, err)
					return
				}
				out.line("A %s %d %d %d", who, sequence, r.Partition, r.Offset)
			})
		}
	}
}

func consume(stop <-chan struct{}, out *journal) {
	client, err := kgo.NewClient(kgo.SeedBrokers(*bootstrap), kgo.ConsumerGroup(*name), kgo.ConsumeTopics(*topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.DisableAutoCommit(), kgo.BlockRebalanceOnPoll(),
		kgo.RetryBackoffFn(func(int) time.Duration { return 100 * time.Millisecond }),
		kgo.SessionTimeout(6*time.Second), kgo.HeartbeatInterval(time.Second))
	if err != nil {
		out.line("F group %s: %v", *name, err)
		return
	}
	defer client.Close()
	for {
		select {
		case <-stop:
			return
		default:
		}
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		records := client.PollRecords(ctx, 500).Records()
		cancel()
		for _, record := range records {
			out.line("R %d %d %s", record.Partition, record.Offset, record.Key)
		}
		ends := map[int32]int64{}
		for _, record := range records {
			ends[record.Partition] = record.Offset + 1
		}
		ctx, cancel = context.WithTimeout(context.Background(), 5*time.Second)
		if len(records) > 0 && client.CommitRecords(ctx, records...) == nil {
			for partition, end := range ends {
				out.line("C %s %d %d", *name, partition, end)
			}
		} // A commit that failed (the server is gone, the group rebalances) promises nothing.
		cancel()
		client.AllowRebalance()
	}
}

func main() {
	flag.Parse()
	file, err := os.Create(*path)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	out := &journal{w: bufio.NewWriter(file)}
	stop := make(chan struct{})
	var running sync.WaitGroup
	for number := range *producers {
		running.Go(func() { produce(stop, out, number) })
	}
	for range *members {
		running.Go(func() { consume(stop, out) })
	}
	// Runs until standard input ends, then waits until everything sent is acknowledged.
	_, _ = io.Copy(io.Discard, os.Stdin)
	close(stop)
	running.Wait()
	out.line("END")
}
