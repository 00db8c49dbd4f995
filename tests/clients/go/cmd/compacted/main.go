// Command compacted writes to a compacted topic and checks it: for each line on standard input it reads
// the whole topic like a new consumer, and compares. The server may be killed meanwhile; this process is
// not, so it knows what was promised.
//
// Records are numbered. One producer writes plain records; another writes transactions, some of which it
// aborts. A value is "key:number", or null: a tombstone.
//
// With -fill it writes this many MiB of records of 1 KiB with random keys, and ends: for measurements.
package main

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"math/rand"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

var (
	bootstrap  = flag.String("bootstrap", "127.0.0.1:9092", "address of the server")
	topic      = flag.String("topic", "compacted", "topic")
	partitions = flag.Int("partitions", 2, "its partitions")
	keys       = flag.Int("keys", 400, "keys of each producer")
	seed       = flag.Int64("seed", 1, "seed of the written records")
	fillMiB    = flag.Int("fill", 0, "only write this many MiB")
	retention  = flag.Duration("retention", 15*time.Second, "delete.retention.ms: a reader that takes longer may miss a tombstone")
)

type fate int

const (
	committed fate = iota
	aborted
	// The end of a transaction was answered with an error.
	unknown
)

type record struct {
	key       string
	tombstone bool
	fate      fate
}

type load struct {
	random *rand.Rand
	plain  *kgo.Client
	txn    *kgo.Client
	// Chooses partitions by hand.
	ends *kgo.Client
	// By number.
	records []record
	failed  error
	opts    []kgo.Opt
}

func backoff(int) time.Duration { return 100 * time.Millisecond }

// connect starts a new incarnation of the transactional producer, which aborts what an earlier one left open.
func (l *load) connect(ctx context.Context) (err error) {
	for range 1000 {
		if l.txn != nil {
			l.txn.Close()
		}
		l.txn, err = kgo.NewClient(append(l.opts, kgo.TransactionalID("compacted"), kgo.TransactionTimeout(60*time.Second))...)
		if err != nil {
			return err
		}
		// The server may be down.
		if _, _, err = l.txn.ProducerID(ctx); err == nil {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return err
}

func (l *load) produce(ctx context.Context, client *kgo.Client, prefix string, failed *error) {
	number := len(l.records)
	key := prefix + strconv.Itoa(l.random.Intn(*keys))
	r := kgo.KeyStringRecord(key, key+":"+strconv.Itoa(number))
	// Keeps all records of a key in order, whatever their value.
	r.Headers = []kgo.RecordHeader{{Key: "n", Value: []byte(strconv.Itoa(number))}}
	tombstone := l.random.Intn(8) == 0
	if tombstone {
		r.Value = nil
	} else {
		r.Value = append(r.Value, []byte(":"+strings.Repeat("x", l.random.Intn(400)))...)
	}
	l.records = append(l.records, record{key: key, tombstone: tombstone})
	client.Produce(ctx, r, func(_ *kgo.Record, err error) {
		if err != nil {
			*failed = fmt.Errorf("record %d was refused: %w", number, err)
		}
	})
}

// A transaction and its outcome.
func (l *load) transaction(ctx context.Context) error {
	first := len(l.records)
	if err := l.txn.BeginTransaction(); err != nil {
		return err
	}
	var failed error
	for range 1 + l.random.Intn(40) {
		l.produce(ctx, l.txn, "t", &failed)
	}
	how, is := kgo.TryCommit, committed
	if l.random.Intn(3) == 0 {
		how, is = kgo.TryAbort, aborted
	}
	err := l.txn.Flush(ctx)
	if err == nil {
		err = failed
	}
	if err == nil {
		err = l.txn.EndTransaction(ctx, how)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "a transaction with unknown outcome:", err)
		is = unknown
		if err := l.connect(ctx); err != nil {
			return err
		}
	}
	for n := first; n < len(l.records); n++ {
		l.records[n].fate = is
	}
	return nil
}

// read returns the numbers of the records that a read_committed consumer sees, by key, in order.
func (l *load) read(ctx context.Context) (map[string][]int, int, error) {
	client, err := kgo.NewClient(append(l.opts, kgo.ConsumeTopics(*topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.FetchMaxWait(100*time.Millisecond))...)
	if err != nil {
		return nil, 0, err
	}
	defer client.Close()
	// The last record of each partition. No pass drops it while it is the last, so that the end can be recognized.
	for partition := range int32(*partitions) {
		end := kgo.KeyStringRecord("end", "")
		end.Partition = partition
		if err := l.ends.ProduceSync(ctx, end).FirstErr(); err != nil {
			return nil, 0, err
		}
	}
	ends, err := kadm.NewClient(client).ListCommittedOffsets(ctx, *topic)
	if err != nil {
		return nil, 0, err
	}
	left := map[int32]int64{}
	ends.Each(func(end kadm.ListedOffset) {
		if end.Offset > 0 {
			left[end.Partition] = end.Offset
		}
	})
	found, count := map[string][]int{}, 0
	last := map[int32]int64{}
	for len(left) > 0 {
		fetches := client.PollFetches(ctx)
		if err := ctx.Err(); err != nil {
			return nil, 0, fmt.Errorf("not read to the end: %v", left)
		}
		var wrong error
		fetches.EachRecord(func(r *kgo.Record) {
			if before, ok := last[r.Partition]; ok && r.Offset <= before {
				wrong = fmt.Errorf("offset %d follows %d", r.Offset, before)
			}
			last[r.Partition] = r.Offset
			if r.Offset+1 >= left[r.Partition] {
				delete(left, r.Partition)
			}
			if string(r.Key) == "end" {
				return
			}
			n, err := strconv.Atoi(string(r.Headers[0].Value))
			if err != nil {
				wrong = err
				return
			}
			value := strings.Split(string(r.Value), ":")
			is := l.records[n]
			if is.key != string(r.Key) || is.tombstone != (r.Value == nil) || (!is.tombstone && value[1] != strconv.Itoa(n)) {
				wrong = fmt.Errorf("record %d differs from what was written: %q %q", n, r.Key, r.Value)
			}
			found[is.key] = append(found[is.key], n)
			count++
		})
		if wrong != nil {
			return nil, 0, wrong
		}
	}
	return found, count, nil
}

// check compares the topic with what was promised, and returns its number of records.
func (l *load) check(ctx context.Context) (int, error) {
	found, count, err := l.read(ctx)
	if err != nil {
		return 0, err
	}
	last := map[string]int{}
	for n, r := range l.records {
		if r.fate == committed {
			last[r.key] = n
		}
	}
	for key, numbers := range found {
		for i, n := range numbers {
			if l.records[n].fate == aborted {
				return 0, fmt.Errorf("record %d was aborted", n)
			}
			if i > 0 && n <= numbers[i-1] {
				return 0, fmt.Errorf("key %s: record %d follows %d", key, n, numbers[i-1])
			}
		}
	}
	for key, wanted := range last {
		numbers := found[key]
		if len(numbers) == 0 {
			if !l.records[wanted].tombstone {
				return 0, fmt.Errorf("key %s: record %d and all others are missing", key, wanted)
			}
			continue
		}
		// Records after it belong to transactions with unknown outcome.
		if is := numbers[len(numbers)-1]; is < wanted {
			return 0, fmt.Errorf("key %s: the last record is %d, but %d was committed", key, is, wanted)
		}
	}
	return count, nil
}

func (l *load) create(ctx context.Context) error {
	set := func(value string) *string { return &value }
	_, err := kadm.NewClient(l.plain).CreateTopic(ctx, int32(*partitions), 1, map[string]*string{
		"cleanup.policy":            set("compact"),
		"min.cleanable.dirty.ratio": set("0.1"),
		"delete.retention.ms":       set(strconv.FormatInt(retention.Milliseconds(), 10)),
	}, *topic)
	return err
}

// fill writes incompressible records, 1024 per MiB.
func (l *load) fill(ctx context.Context) error {
	value := make([]byte, 1024)
	for range *fillMiB * 1024 {
		l.random.Read(value)
		r := kgo.KeySliceRecord([]byte("key-"+strconv.Itoa(l.random.Intn(*keys))), append([]byte(nil), value...))
		l.plain.Produce(ctx, r, func(_ *kgo.Record, err error) {
			if err != nil {
				l.failed = err
			}
		})
	}
	if err := l.plain.Flush(ctx); err != nil {
		return err
	}
	return l.failed
}

func run(ctx context.Context) error {
	l := &load{random: rand.New(rand.NewSource(*seed)), opts: []kgo.Opt{
		kgo.SeedBrokers(*bootstrap), kgo.DefaultProduceTopic(*topic), kgo.ProducerLinger(0), kgo.RetryBackoffFn(backoff), kgo.UnknownTopicRetries(-1),
		kgo.ProducerBatchCompression(kgo.Lz4Compression()),
	}}
	var err error
	if l.plain, err = kgo.NewClient(l.opts...); err != nil {
		return err
	}
	defer l.plain.Close()
	if *fillMiB > 0 {
		if err := l.create(ctx); err != nil {
			return err
		}
		return l.fill(ctx)
	}
	if l.ends, err = kgo.NewClient(append(l.opts, kgo.RecordPartitioner(kgo.ManualPartitioner()))...); err != nil {
		return err
	}
	defer l.ends.Close()
	if err = l.connect(ctx); err != nil {
		return err
	}
	if err := l.create(ctx); err != nil {
		return err
	}
	asked := make(chan bool)
	go func() {
		lines := bufio.NewScanner(os.Stdin)
		for lines.Scan() {
			asked <- true
		}
		close(asked)
	}()
	for {
		select {
		case _, ok := <-asked:
			if !ok {
				l.txn.Close()
				return nil
			}
			if err := l.plain.Flush(ctx); err != nil {
				return err
			}
			if l.failed != nil {
				return l.failed
			}
			begun := time.Now()
			count, err := l.check(ctx)
			if err != nil && time.Since(begun) > *retention {
				fmt.Fprintln(os.Stderr, "retrying, since it took too long:", err)
				count, err = l.check(ctx)
			}
			if err != nil {
				return err
			}
			fmt.Printf("%d records written, %d present\n", len(l.records), count)
		default:
			for range 20 {
				l.produce(ctx, l.plain, "p", &l.failed)
			}
			if err := l.transaction(ctx); err != nil {
				return err
			}
		}
	}
}

func main() {
	flag.Parse()
	ctx, cancel := context.WithTimeout(context.Background(), 6*time.Hour)
	defer cancel()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "compacted:", err)
		os.Exit(1)
	}
}
