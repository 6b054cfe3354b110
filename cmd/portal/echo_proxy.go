package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"
)

// proxyListener accepts connections that begin with a PROXY header.
type proxyListener struct{ net.Listener }

func (l proxyListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &proxyConn{Conn: c, in: bufio.NewReader(c)}, nil
}

// proxyConn is such a connection. The header is read when somebody first wants to know something of it.
type proxyConn struct {
	net.Conn
	in      *bufio.Reader
	once    sync.Once
	err     error
	client  net.Addr
	version int
}

const headerLimit = 5 * time.Second

func (c *proxyConn) header() {
	c.once.Do(func() {
		_ = c.SetReadDeadline(time.Now().Add(headerLimit))
		var client netip.AddrPort
		if client, c.version, c.err = readProxyHeader(c.in); c.err == nil {
			c.client = net.TCPAddrFromAddrPort(client)
		}
		_ = c.SetReadDeadline(time.Time{})
	})
}

func (c *proxyConn) Read(b []byte) (int, error) {
	if c.header(); c.err != nil {
		return 0, c.err
	}
	return c.in.Read(b)
}

func (c *proxyConn) RemoteAddr() net.Addr {
	if c.header(); c.client != nil {
		return c.client
	}
	return c.Conn.RemoteAddr()
}

var errNoHeader = errors.New("the connection does not begin with a PROXY header")

// readProxyHeader reads a header of version 1 or 2: who the client is.
func readProxyHeader(in *bufio.Reader) (client netip.AddrPort, version int, err error) {
	start, err := in.Peek(5)
	if err != nil {
		return client, 0, err
	}
	if string(start) == "PROXY" {
		line, err := in.ReadString('\n')
		f := strings.Fields(line)
		if err != nil || len(f) != 6 {
			return client, 0, errNoHeader
		}
		client, err = netip.ParseAddrPort(net.JoinHostPort(f[2], f[4]))
		return client, 1, err
	}
	head := make([]byte, 16)
	if _, err := io.ReadFull(in, head); err != nil || !bytes.HasPrefix(head, []byte("\r\n\r\n\x00\r\nQUIT\n\x21")) {
		return client, 0, errNoHeader
	}
	body := make([]byte, binary.BigEndian.Uint16(head[14:]))
	if _, err := io.ReadFull(in, body); err != nil {
		return client, 0, err
	}
	width := map[byte]int{0x11: 4, 0x21: 16}[head[13]]
	if width == 0 || len(body) < 2*width+4 {
		return client, 0, errNoHeader
	}
	addr, _ := netip.AddrFromSlice(body[:width])
	return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(body[2*width:])), 2, nil
}

// proxiedConn is where a request's context has its connection.
type proxiedConn struct{}

func withProxiedConn(ctx context.Context, c net.Conn) context.Context {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	if p, ok := c.(*proxyConn); ok {
		return context.WithValue(ctx, proxiedConn{}, p)
	}
	return ctx
}

// proxyVersion is that of the header that a request's connection began with, 0 for none.
func proxyVersion(ctx context.Context) int {
	if p, ok := ctx.Value(proxiedConn{}).(*proxyConn); ok {
		p.header()
		return p.version
	}
	return 0
}

// selfSigned speaks TLS with a certificate of its own.
func selfSigned(l net.Listener) (net.Listener, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	name, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), DNSNames: []string{name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(1, 0, 0)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make a certificate: %w", err)
	}
	return tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, NextProtos: []string{"http/1.1"}}), nil
}
