package apiserver

import (
	"crypto/tls"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// TestHandshakesTakeTurns: a client that sends half of a greeting, or nothing, keeps nobody waiting; and no turn is lost when connections end in the middle.
func TestHandshakesTakeTurns(t *testing.T) {
	t.Parallel()
	s := start(t, testOptions(t))
	turns := s.listener.handshakes.turns
	connect := func() error {
		conn, err := tls.DialWithDialer(&net.Dialer{Timeout: 10 * time.Second}, "tcp", s.Address(), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			return err
		}
		return conn.Close()
	}
	for range 20 {
		half, err := net.Dial("tcp", s.Address())
		if err != nil {
			t.Fatal(err)
		}
		defer half.Close()
		if _, err := half.Write([]byte{22, 3, 1, 2, 0, 1}); err != nil { // the first bytes of a record of 512
			t.Fatal(err)
		}
	}
	begun := time.Now()
	if err := connect(); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begun); took >= handshakeWait {
		t.Errorf("the handshake took %s: it waited for clients that send nothing", took)
	}
	var group sync.WaitGroup
	for i := range 100 {
		group.Go(func() {
			if i%2 == 0 { // ends after its greeting
				if conn, err := net.Dial("tcp", s.Address()); err == nil {
					client := tls.Client(struct{ net.Conn }{onlyWrites{conn}}, &tls.Config{InsecureSkipVerify: true})
					_ = client.Handshake()
					_ = conn.Close()
				}
				return
			}
			if err := connect(); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	for end := time.Now().Add(5 * time.Second); len(turns) > 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d turns of %d are still taken after all handshakes", len(turns), cap(turns))
		}
	}
}

// onlyWrites is a connection on which the client hears nothing.
type onlyWrites struct{ net.Conn }

func (onlyWrites) Read([]byte) (int, error) { return 0, io.EOF }
