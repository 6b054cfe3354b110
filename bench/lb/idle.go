package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"portal/bench/report"
)

// idleSituation is a kind of connection that has had one answer and says nothing more.
type idleSituation struct {
	name     string
	port     int
	protocol string // by ALPN; empty: without TLS
}

var idleSituations = []idleSituation{
	{"Idle connections, HTTP/1.1", plainPort, ""},
	{"Idle connections, HTTP/1.1 over TLS", securePort, "http/1.1"},
	{"Idle connections, HTTP/2 over TLS", securePort, "h2"},
}

// idleFor is how long connections are idle before their memory is read: what was needed to set them up may be given back.
const idleFor = 15 * time.Second

// idleMemory opens many connections, each of which has had one answer.
func (b *bench) idleMemory(s idleSituation) error {
	report.Logf("%d × %s", b.idle, s.name)
	at := b.report.At(s.name, b.idle, "connections")
	for _, one := range b.subjects {
		if one.name == goTLS {
			continue
		}
		// A process of its own for each kind: what the one before has left behind would be filled first.
		fresh, err := b.again(one)
		if err != nil {
			return err
		}
		each, err := b.idleOf(fresh, s)
		b.end(fresh)
		if err != nil {
			return fmt.Errorf("%s: %w", one.name, err)
		}
		at.Lower(one.name, memory, each, "kB")
	}
	return nil
}

// idleOf is how many kB one connection costs.
func (b *bench) idleOf(one *subject, s idleSituation) (float64, error) {
	var open []net.Conn
	defer func() {
		for _, c := range open {
			_ = c.Close()
		}
	}()
	add := func(n int) error {
		for range n {
			c, err := s.open(one.address(s.port))
			if err != nil {
				return err
			}
			open = append(open, c)
		}
		return nil
	}
	// What is made once is there before.
	if err := add(100); err != nil {
		return 0, err
	}
	time.Sleep(idleFor)
	before, err := report.Read(one.cmd.Process.Pid)
	if err != nil {
		return 0, err
	}
	if err := add(b.idle); err != nil {
		return 0, err
	}
	time.Sleep(idleFor)
	after, err := report.Read(one.cmd.Process.Pid)
	if err != nil {
		return 0, err
	}
	return max(after.PSS-before.PSS, 0) * 1e3 / float64(b.idle), nil
}

// open opens one, and reads one answer.
func (s idleSituation) open(address string) (net.Conn, error) {
	c, err := net.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	if s.protocol != "" {
		c = tls.Client(c, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{s.protocol}})
	}
	if s.protocol == "h2" {
		err = askHTTP2(c, address)
	} else {
		err = askHTTP1(c, address)
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

func askHTTP1(c net.Conn, host string) error {
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: "+host+"\r\n\r\n"); err != nil {
		return err
	}
	res, err := http.ReadResponse(bufio.NewReaderSize(c, 1<<10), nil)
	if err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, res.Body); err != nil || res.StatusCode != http.StatusOK {
		return fmt.Errorf("%s, %w", res.Status, err)
	}
	return nil
}

func askHTTP2(c net.Conn, host string) error {
	var out, block bytes.Buffer
	f := http2.NewFramer(&out, c)
	enc := hpack.NewEncoder(&block)
	for _, field := range [][2]string{{":method", "GET"}, {":scheme", "https"}, {":path", "/"}, {":authority", host}} {
		if err := enc.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]}); err != nil {
			return err
		}
	}
	out.WriteString(http2.ClientPreface)
	if err := errors.Join(f.WriteSettings(), f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndStream: true, EndHeaders: true})); err != nil {
		return err
	}
	if _, err := c.Write(out.Bytes()); err != nil {
		return err
	}
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return err
		}
		switch frame := frame.(type) {
		case *http2.RSTStreamFrame, *http2.GoAwayFrame:
			return fmt.Errorf("no answer, but %v", frame)
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				out.Reset()
				if err := f.WriteSettingsAck(); err != nil {
					return err
				}
				if _, err := c.Write(out.Bytes()); err != nil {
					return err
				}
			}
		case *http2.DataFrame:
			if frame.StreamEnded() {
				return nil
			}
		}
	}
}
