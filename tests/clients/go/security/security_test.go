// Package security tests franz-go on listeners with authentication, which the environment names with their files.
package security

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

// Limit after which a test fails instead of hanging. No test measures time.
const patience = 60 * time.Second

const (
	saslAuthenticate = 36
	topic            = "go-records"
)

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

func read(t *testing.T, name string) []byte {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(os.Getenv("FILES"), name))
	must(t, err)
	return content
}

func client(t *testing.T, listener string, options ...kgo.Opt) *kgo.Client {
	t.Helper()
	c, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(os.Getenv(listener)), kgo.RequestRetries(0)}, options...)...)
	must(t, err)
	t.Cleanup(c.Close)
	return c
}

// trusting returns a TLS configuration that trusts an authority and presents a certificate, if one is named.
func trusting(t *testing.T, authority, certificate string) kgo.Opt {
	t.Helper()
	config := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
	if !config.RootCAs.AppendCertsFromPEM(read(t, authority)) {
		t.Fatalf("%s has no certificate", authority)
	}
	if certificate != "" {
		both := read(t, certificate)
		pair, err := tls.X509KeyPair(both, both)
		must(t, err)
		config.Certificates = []tls.Certificate{pair}
	}
	return kgo.DialTLSConfig(config)
}

func secret(user string) string {
	return user + "-has-this-secret"
}

func scram512(user, password string) sasl.Mechanism {
	return scram.Auth{User: user, Pass: password}.AsSha512Mechanism()
}

func token(t *testing.T, name string) sasl.Mechanism {
	return oauth.Auth{Token: strings.TrimSpace(string(read(t, name)))}.AsMechanism()
}

var prepare = sync.OnceValue(func() error {
	ca := x509.NewCertPool()
	pem, err := os.ReadFile(filepath.Join(os.Getenv("FILES"), "ca.pem"))
	if err != nil {
		return err
	}
	ca.AppendCertsFromPEM(pem)
	c, err := kgo.NewClient(kgo.SeedBrokers(os.Getenv("SASL_TLS")), kgo.SASL(scram512("admin", secret("admin"))),
		kgo.DialTLSConfig(&tls.Config{RootCAs: ca, MinVersion: tls.VersionTLS12}))
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	admin := kadm.NewClient(c)
	if _, err := admin.CreateTopic(ctx, 1, 1, nil, topic); err != nil {
		return err
	}
	acls := kadm.NewACLs().Topics(topic).Operations(kadm.OpRead, kadm.OpWrite).
		ResourcePatternType(kadm.ACLPatternLiteral).Allow("User:alice").AllowHosts("127.0.0.1")
	created, err := admin.CreateACLs(ctx, acls)
	if err != nil {
		return err
	}
	for _, one := range created {
		if one.Err != nil {
			return one.Err
		}
	}
	return nil
})

// thereAndBack writes a record as alice and reads it back.
func thereAndBack(t *testing.T, listener string, options ...kgo.Opt) {
	t.Helper()
	must(t, prepare())
	c := client(t, listener, append(options, kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().AtStart()}}))...)
	value := fmt.Sprint(time.Now().UnixNano())
	record, err := c.ProduceSync(soon(t), &kgo.Record{Topic: topic, Value: []byte(value)}).First()
	must(t, err)
	for ctx := soon(t); ; {
		fetches := c.PollFetches(ctx)
		for _, failed := range fetches.Errors() {
			t.Fatal(failed.Err)
		}
		for _, found := range fetches.Records() {
			if found.Offset == record.Offset {
				if string(found.Value) != value {
					t.Fatalf("got %q, not %q", found.Value, value)
				}
				return
			}
		}
	}
}

// keep writes an error to the file in which the suite checks what the server reveals to clients.
func keep(t *testing.T, reported error) {
	t.Helper()
	if reported == nil {
		return
	}
	file, err := os.OpenFile(os.Getenv("ERRORS"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	must(t, err)
	defer file.Close()
	_, err = fmt.Fprintf(file, "go: %s\n", strings.ReplaceAll(reported.Error(), "\n", " "))
	must(t, err)
}

func refused(t *testing.T, wanted error, listener string, options ...kgo.Opt) {
	t.Helper()
	err := client(t, listener, options...).Ping(soon(t))
	keep(t, err)
	if !errors.Is(err, wanted) {
		t.Fatalf("it failed with %v, not with %v", err, wanted)
	}
}

func TestPasswords(t *testing.T) {
	ca := trusting(t, "ca.pem", "")
	for _, listener := range []string{"SASL", "SASL_TLS"} {
		for name, mechanism := range map[string]func(string) sasl.Mechanism{
			"PLAIN":         func(p string) sasl.Mechanism { return plain.Auth{User: "alice", Pass: p}.AsMechanism() },
			"SCRAM-SHA-256": func(p string) sasl.Mechanism { return scram.Auth{User: "alice", Pass: p}.AsSha256Mechanism() },
			"SCRAM-SHA-512": func(p string) sasl.Mechanism { return scram512("alice", p) },
		} {
			t.Run(listener+"-"+name, func(t *testing.T) {
				var options []kgo.Opt
				if listener == "SASL_TLS" {
					options = append(options, ca)
				}
				thereAndBack(t, listener, append(options, kgo.SASL(mechanism(secret("alice"))))...)
				refused(t, kerr.SaslAuthenticationFailed, listener, append(options, kgo.SASL(mechanism(os.Getenv("WRONG_PASSWORD"))))...)
			})
		}
	}
}

func TestTokens(t *testing.T) {
	ca := trusting(t, "ca.pem", "")
	thereAndBack(t, "SASL_TLS", ca, kgo.SASL(token(t, "alice.jwt")))
	for _, wrong := range []string{"expired.jwt", "forged.jwt"} {
		// The server answers with a JSON document (RFC 7628), for which this client has no specific error.
		err := client(t, "SASL_TLS", ca, kgo.SASL(token(t, wrong))).Ping(soon(t))
		keep(t, err)
		if err == nil || !strings.Contains(err.Error(), "oauth") {
			t.Fatalf("%s: %v", wrong, err)
		}
	}
	err := client(t, "SASL", kgo.SASL(token(t, "alice.jwt"))).Ping(soon(t))
	keep(t, err)
	if err == nil || !strings.Contains(err.Error(), "OAUTHBEARER") && !errors.Is(err, kerr.UnsupportedSaslMechanism) {
		t.Fatalf("a mechanism that the listener does not offer: %v", err)
	}
}

func TestCertificates(t *testing.T) {
	thereAndBack(t, "MUTUAL_TLS", trusting(t, "ca.pem", "alice.pem"))
	for _, options := range []kgo.Opt{trusting(t, "ca.pem", ""), trusting(t, "ca.pem", "stranger.pem")} {
		err := client(t, "MUTUAL_TLS", options).Ping(soon(t))
		keep(t, err)
		if err == nil || !strings.Contains(err.Error(), "remote error: tls") {
			t.Fatalf("it failed with %v, not with a TLS alert", err)
		}
	}
	var unknown x509.UnknownAuthorityError
	if err := client(t, "TLS", trusting(t, "stranger-ca.pem", "")).Ping(soon(t)); !errors.As(err, &unknown) {
		t.Fatalf("it failed with %v, not with an unknown authority", err)
	}
}

func TestClientsWithoutPermissionsAreRefused(t *testing.T) {
	must(t, prepare())
	bob := []kgo.Opt{trusting(t, "ca.pem", ""), kgo.SASL(scram512("bob", secret("bob")))}
	for name, c := range map[string]*kgo.Client{
		"bob":       client(t, "SASL_TLS", bob...),
		"anonymous": client(t, "TLS", trusting(t, "ca.pem", "")),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.ProduceSync(soon(t), &kgo.Record{Topic: topic, Value: []byte("x")}).First()
			keep(t, err)
			if !errors.Is(err, kerr.TopicAuthorizationFailed) {
				t.Fatalf("writing failed with %v", err)
			}
			listed, err := kadm.NewClient(c).ListTopics(soon(t))
			must(t, err)
			if len(listed) != 0 {
				t.Fatalf("it sees %v", listed.Names())
			}
		})
	}
}

// counting counts connections and authentication requests.
type counting struct{ connections, logins atomic.Int64 }

func (c *counting) OnBrokerConnect(kgo.BrokerMetadata, time.Duration, net.Conn, error) {
	c.connections.Add(1)
}

func (c *counting) OnBrokerWrite(_ kgo.BrokerMetadata, key int16, _ int, _, _ time.Duration, _ error) {
	if key == saslAuthenticate {
		c.logins.Add(1)
	}
}

func TestLoggingInAgain(t *testing.T) {
	must(t, prepare())
	counts := new(counting)
	c := client(t, "SASL_TLS", trusting(t, "ca.pem", ""), kgo.SASL(scram512("alice", secret("alice"))), kgo.WithHooks(counts))
	write := func() {
		t.Helper()
		_, err := c.ProduceSync(soon(t), &kgo.Record{Topic: topic, Value: []byte("x")}).First()
		must(t, err)
	}
	write()
	connections, logins := counts.connections.Load(), counts.logins.Load()
	for ctx := soon(t); counts.logins.Load() < logins+4; write() {
		must(t, ctx.Err())
	}
	if now := counts.connections.Load(); now != connections {
		t.Fatalf("%d connections, not %d", now, connections)
	}
}

// All the clients of a machine reconnect at once when a server is restarted.
func TestManyLogInAtOnce(t *testing.T) {
	const clients = 200
	start := make(chan struct{})
	failed := make(chan error, clients)
	for range clients {
		c := client(t, "SASL", kgo.SASL(scram512("alice", secret("alice"))))
		go func() {
			<-start
			failed <- c.Ping(soon(t))
		}()
	}
	close(start)
	for range clients {
		must(t, <-failed)
	}
}

func TestWhatIsToBeSentBeforeLoggingIn(t *testing.T) {
	conn, err := net.DialTimeout("tcp", os.Getenv("SASL"), patience)
	must(t, err)
	defer conn.Close()
	must(t, conn.SetDeadline(time.Now().Add(patience)))
	ask := func(request kmsg.Request) error {
		if _, err := conn.Write(kmsg.NewRequestFormatter().AppendRequest(nil, request, 1)); err != nil {
			return err
		}
		var length int32
		if err := binary.Read(conn, binary.BigEndian, &length); err != nil {
			return err
		}
		_, err := io.CopyN(io.Discard, conn, int64(length))
		return err
	}
	must(t, ask(kmsg.NewPtrApiVersionsRequest()))
	if err := ask(kmsg.NewPtrMetadataRequest()); err != io.EOF {
		t.Fatalf("metadata without authentication ended with %v, not with a closed connection", err)
	}
}
