// Command exactlyonce is the franz-go part of the exactly-once test, with version 2 of transactions (KIP-890);
// tests/clients/python/transform.py is the librdkafka half of the transformers, with version 1.
//
//	exactlyonce feed       produce numbered records until standard input ends, then print how many there are
//	exactlyonce transform  consume, transform and produce in transactions, until killed or standard input ends
//	exactlyonce verify     read committed records; each number must occur exactly once
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

var (
	bootstrap  = flag.String("bootstrap", "127.0.0.1:9092", "address of the server")
	from       = flag.String("from", "input", "topic that transformers read")
	to         = flag.String("to", "output", "topic that transformers write to")
	group      = flag.String("group", "transform", "their group")
	partitions = flag.Int("partitions", 4, "partitions of both topics")
	id         = flag.String("id", "go", "transactional id")
	records    = flag.Int("records", 0, "verify: expected number of records")
)

func backoff(int) time.Duration { return 100 * time.Millisecond }

// stopped is closed when standard input ends.
func stopped() <-chan struct{} {
	stop := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(stop)
	}()
	return stop
}

func feed(ctx context.Context) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(*bootstrap), kgo.DefaultProduceTopic(*from), kgo.ProducerLinger(0),
		kgo.RetryBackoffFn(backoff), kgo.UnknownTopicRetries(-1))
	if err != nil {
		return err
	}
	defer client.Close()
	stop := stopped()
	var lost atomic.Int64
	for next := 0; ; {
		select {
		case <-stop:
			if err := client.Flush(ctx); err != nil {
				return err
			}
			if lost.Load() > 0 {
				return fmt.Errorf("%d records were refused", lost.Load())
			}
			fmt.Println(next)
			return nil
		case <-time.After(5 * time.Millisecond):
		}
		for range 10 {
			client.Produce(ctx, kgo.StringRecord(strconv.Itoa(next)), func(_ *kgo.Record, err error) {
				if err != nil {
					lost.Add(1)
					fmt.Fprintln(os.Stderr, "feed:", err)
				}
			})
			next++
		}
	}
}

func transform(ctx context.Context) error {
	stop := stopped()
	for {
		err := session(ctx, stop)
		if err == nil {
			return nil
		}
		// A fatal error of the protocol: start again, as an application would.
		fmt.Fprintln(os.Stderr, "transform:", err)
		time.Sleep(200 * time.Millisecond)
	}
}

func session(ctx context.Context, stop <-chan struct{}) error {
	session, err := kgo.NewGroupTransactSession(kgo.SeedBrokers(*bootstrap), kgo.TransactionalID(*id),
		kgo.TransactionTimeout(10*time.Second), kgo.ConsumerGroup(*group), kgo.ConsumeTopics(*from),
		kgo.DefaultProduceTopic(*to), kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.RequireStableFetchOffsets(),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.Balancers(kgo.RangeBalancer()),
		kgo.SessionTimeout(6*time.Second), kgo.HeartbeatInterval(500*time.Millisecond),
		kgo.RetryBackoffFn(backoff), kgo.ProducerLinger(0))
	if err != nil {
		return err
	}
	defer session.Close()
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		poll, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
		fetches := session.PollRecords(poll, 500)
		cancel()
		for _, failed := range fetches.Errors() {
			if !errors.Is(failed.Err, context.DeadlineExceeded) {
				return failed.Err
			}
		}
		if fetches.NumRecords() == 0 {
			continue
		}
		if err := session.Begin(); err != nil {
			return err
		}
		failure := kgo.AbortingFirstErrPromise(session.Client())
		fetches.EachRecord(func(record *kgo.Record) {
			session.Produce(ctx, kgo.StringRecord(string(record.Value)), failure.Promise())
		})
		failed := failure.Err()
		if _, err := session.End(ctx, kgo.TransactionEndTry(failed == nil)); err != nil {
			return err
		}
	}
}

func verify(ctx context.Context) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(*bootstrap), kgo.ConsumeTopics(*to),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.KeepControlRecords())
	if err != nil {
		return err
	}
	defer client.Close()
	ends, err := kadm.NewClient(client).ListEndOffsets(ctx, *to)
	if err != nil {
		return err
	}
	stable, err := kadm.NewClient(client).ListCommittedOffsets(ctx, *to)
	if err != nil {
		return err
	}
	left := make(map[int32]int64)
	for partition, end := range ends[*to] {
		if open := end.Offset - stable[*to][partition].Offset; open != 0 {
			return fmt.Errorf("partition %d: the last %d offsets are not stable", partition, open)
		}
		if end.Offset > 0 {
			left[partition] = end.Offset
		}
	}
	times := make(map[int]int)
	for len(left) > 0 {
		poll, cancel := context.WithTimeout(ctx, 30*time.Second)
		fetches := client.PollFetches(poll)
		cancel()
		if err := fetches.Err(); err != nil {
			return fmt.Errorf("not read to the end, left are %v: %w", left, err)
		}
		fetches.EachRecord(func(record *kgo.Record) {
			if record.Offset+1 >= left[record.Partition] {
				delete(left, record.Partition)
			}
			if record.Attrs.IsControl() {
				return
			}
			number, err := strconv.Atoi(string(record.Value))
			if err != nil || number < 0 || number >= *records {
				fmt.Printf("partition %d, offset %d: %q was not fed\n", record.Partition, record.Offset, record.Value)
				number = -1
			}
			times[number]++
		})
	}
	wrong := 0
	for number := -1; number < *records; number++ {
		want := 1
		if number < 0 {
			want = 0
		}
		if times[number] != want {
			wrong++
			if wrong <= 20 {
				fmt.Printf("%d occurs %d times\n", number, times[number])
			}
		}
	}
	if wrong > 0 {
		return fmt.Errorf("%d of %d numbers do not occur exactly once", wrong, *records)
	}
	return nil
}

func create(ctx context.Context) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(*bootstrap))
	if err != nil {
		return err
	}
	defer client.Close()
	created, err := kadm.NewClient(client).CreateTopics(ctx, int32(*partitions), 1, nil, *from, *to)
	if err != nil {
		return err
	}
	return created.Error()
}

// lag prints the number of input records that the group has not committed.
func lag(ctx context.Context) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(*bootstrap))
	if err != nil {
		return err
	}
	defer client.Close()
	admin := kadm.NewClient(client)
	ends, err := admin.ListEndOffsets(ctx, *from)
	if err != nil {
		return err
	}
	committed, err := admin.FetchOffsets(ctx, *group)
	if err != nil {
		return err
	}
	behind := int64(0)
	for partition, end := range ends[*from] {
		behind += end.Offset
		if at, there := committed.Lookup(*from, partition); there {
			behind -= at.At
		}
	}
	fmt.Println(behind)
	return nil
}

func main() {
	commands := map[string]func(context.Context) error{
		"create": create, "feed": feed, "transform": transform, "lag": lag, "verify": verify,
	}
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: exactlyonce create|feed|transform|lag|verify [flags]")
		os.Exit(2)
	}
	if err := flag.CommandLine.Parse(os.Args[2:]); err != nil {
		os.Exit(2)
	}
	if err := commands[os.Args[1]](context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, os.Args[1]+":", err)
		os.Exit(1)
	}
}
