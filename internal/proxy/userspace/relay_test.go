package userspace

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"
)

// pair is a connection over loopback, by both its ends.
func pair(tb testing.TB) (a, b *net.TCPConn) {
	tb.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		tb.Fatal(err)
	}
	defer l.Close()
	if a, err = net.DialTCP("tcp4", nil, l.Addr().(*net.TCPAddr)); err == nil {
		b, err = l.AcceptTCP()
	}
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

// joined is a client and a server with a relay between them; done is closed when it has ended.
func joined(tb testing.TB, idle pipes) (client, server *net.TCPConn, done chan struct{}) {
	client, in := pair(tb)
	out, server := pair(tb)
	done = make(chan struct{})
	go func() {
		idle.relay(in, out)
		in.Close()
		out.Close()
		close(done)
	}()
	deadline := time.Now().Add(20 * time.Second)
	client.SetDeadline(deadline)
	server.SetDeadline(deadline)
	return client, server, done
}

func ends(t *testing.T, done chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal("the relay goes on")
	}
}

// TestHalfClose: a client that has said all still hears the answer.
func TestHalfClose(t *testing.T) {
	idle := newPipes()
	defer idle.close()
	client, server, done := joined(t, idle)
	question := make([]byte, 3<<20)
	rand.Read(question)
	go func() {
		client.Write(question)
		client.CloseWrite()
	}()
	heard, err := io.ReadAll(server)
	if err != nil || !bytes.Equal(heard, question) {
		t.Fatalf("heard %d bytes of %d: %v", len(heard), len(question), err)
	}
	server.Write([]byte("the answer"))
	server.Close()
	if answer, err := io.ReadAll(client); err != nil || string(answer) != "the answer" {
		t.Fatalf("%q, %v", answer, err)
	}
	ends(t, done)
}

// TestReset: an end that is none is not passed on as one.
func TestReset(t *testing.T) {
	idle := newPipes()
	defer idle.close()
	client, server, done := joined(t, idle)
	client.Write([]byte("hello"))
	io.ReadFull(server, make([]byte, 5))
	server.SetLinger(0)
	server.Close()
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client saw %v", err)
	}
	ends(t, done)
}

// TestBackpressure: what the server does not take is not taken from the client.
func TestBackpressure(t *testing.T) {
	idle := newPipes()
	defer idle.close()
	client, server, done := joined(t, idle)
	client.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
	sent := 0
	chunk := make([]byte, 64<<10)
	for {
		n, err := client.Write(chunk)
		sent += n
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err != nil || sent > 64<<20 {
			t.Fatalf("%d bytes were taken, %v", sent, err)
		}
	}
	client.CloseWrite()
	if n, err := io.Copy(io.Discard, server); err != nil || int(n) != sent {
		t.Errorf("%d bytes arrived of %d: %v", n, sent, err)
	}
	server.Close()
	ends(t, done)
}

// TestSilentConnectionsHoldNoPipe: data passes, and the pipe is back.
func TestSilentConnectionsHoldNoPipe(t *testing.T) {
	idle := newPipes()
	defer idle.close()
	for range 50 {
		client, server, _ := joined(t, idle)
		client.Write([]byte("hello"))
		if _, err := io.ReadFull(server, make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(20 * time.Millisecond)
	if n := len(idle); n == 0 || n > 10 {
		t.Errorf("50 connections, one after another, needed %d pipes", n)
	}
}

// BenchmarkRelay moves data through a relay, and for comparison over one connection.
func BenchmarkRelay(b *testing.B) {
	idle := newPipes()
	defer idle.close()
	move := func(b *testing.B, from, to *net.TCPConn) {
		from.SetDeadline(time.Time{})
		to.SetDeadline(time.Time{})
		chunk := make([]byte, 256<<10)
		b.SetBytes(int64(len(chunk)))
		go func() {
			buf := make([]byte, 256<<10)
			for {
				if _, err := to.Read(buf); err != nil {
					return
				}
			}
		}()
		for b.Loop() {
			if _, err := from.Write(chunk); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.Run("direct", func(b *testing.B) { from, to := pair(b); move(b, from, to) })
	b.Run("relayed", func(b *testing.B) { client, server, _ := joined(b, idle); move(b, client, server) })
}
