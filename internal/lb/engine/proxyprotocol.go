package engine

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// PROXY headers are read and written here, and not by a library, because nothing after the header may be read: the bytes that follow
// are passed on without being copied into this process.

var (
	signature1 = []byte("PROXY ")
	signature2 = []byte("\r\n\r\n\x00\r\nQUIT\n")
)

const (
	longest1 = 107  // as the specification says, with CR LF
	longest2 = 4096 // with all that may follow the addresses
)

var errBadProxyHeader = errors.New("the PROXY header is malformed")

// proxyHeader is what one says. Without addresses, the connection's own count.
type proxyHeader struct {
	source, destination netip.AddrPort
}

// readProxyHeader takes a PROXY header off a connection, if it begins with one. A client that says nothing at all within the time has none.
func readProxyHeader(c *net.TCPConn, timeout time.Duration) (*proxyHeader, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	if err := c.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return nil, err
	}
	defer func() { _ = c.SetReadDeadline(time.Time{}) }()
	var header *proxyHeader
	var problem error
	begun := false
	buf := make([]byte, longest2)
	err = raw.Read(func(fd uintptr) bool {
		var n int
		for {
			n, _, problem = unix.Recvfrom(int(fd), buf, unix.MSG_PEEK)
			if problem != unix.EINTR {
				break
			}
		}
		if problem == unix.EAGAIN {
			problem = nil
			return false
		}
		if problem != nil {
			return true
		}
		length := 0
		header, length, problem = parseProxyHeader(buf[:n])
		if errors.Is(problem, errPartial) {
			begun = n > 0
			if n == 0 {
				header, problem = nil, nil // the client has closed its side
				return true
			}
			return false
		}
		if problem == nil && length > 0 {
			_, _, problem = unix.Recvfrom(int(fd), buf[:length], 0)
		}
		return true
	})
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded) && !begun:
		return nil, nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, fmt.Errorf("%w: it is not complete", errBadProxyHeader)
	case err != nil:
		return nil, err
	}
	return header, problem
}

var errPartial = errors.New("more bytes are needed")

// parseProxyHeader reads a header at the begin of what a client sent, and says how long it is: 0 if there is none.
func parseProxyHeader(b []byte) (*proxyHeader, int, error) {
	switch {
	case bytes.HasPrefix(b, signature2):
		return parse2(b)
	case bytes.HasPrefix(b, signature1):
		return parse1(b)
	case bytes.HasPrefix(signature2, b), bytes.HasPrefix(signature1, b):
		return nil, 0, errPartial
	}
	return nil, 0, nil
}

func parse1(b []byte) (*proxyHeader, int, error) {
	end := bytes.Index(b[:min(len(b), longest1)], []byte("\r\n"))
	if end < 0 {
		if len(b) < longest1 {
			return nil, 0, errPartial
		}
		return nil, 0, fmt.Errorf("%w: version 1 with no end in %d bytes", errBadProxyHeader, longest1)
	}
	words := strings.Split(string(b[:end]), " ")
	if words[1] == "UNKNOWN" {
		return nil, end + 2, nil
	}
	bad := fmt.Errorf("%w: version 1, %d words", errBadProxyHeader, len(words))
	if len(words) != 6 || words[1] != "TCP4" && words[1] != "TCP6" {
		return nil, 0, bad
	}
	var ends [2]netip.AddrPort
	for i := range ends {
		a, err := netip.ParseAddr(words[2+i])
		port, err2 := strconv.ParseUint(words[4+i], 10, 16)
		if err != nil || err2 != nil || a.Zone() != "" || a.Is4() != (words[1] == "TCP4") || strconv.FormatUint(port, 10) != words[4+i] {
			return nil, 0, bad
		}
		ends[i] = unmapped(netip.AddrPortFrom(a, uint16(port)))
	}
	return &proxyHeader{ends[0], ends[1]}, end + 2, nil
}

func parse2(b []byte) (*proxyHeader, int, error) {
	if len(b) < 16 {
		return nil, 0, errPartial
	}
	length := 16 + int(binary.BigEndian.Uint16(b[14:]))
	if b[12]>>4 != 2 || b[12]&0xf > 1 {
		return nil, 0, fmt.Errorf("%w: version and command %#x", errBadProxyHeader, b[12])
	}
	if length > longest2 {
		return nil, 0, fmt.Errorf("%w: version 2 with %d bytes, at most %d are read", errBadProxyHeader, length, longest2)
	}
	if len(b) < length {
		return nil, 0, errPartial
	}
	if b[12]&0xf == 0 {
		return nil, length, nil // LOCAL: the proxy itself
	}
	rest := b[16:length]
	size := 0
	switch b[13] {
	case 0x11:
		size = 4
	case 0x21:
		size = 16
	case 0x00, 0x31, 0x32, 0x12, 0x22:
		return nil, length, nil // not known, or not of TCP: the connection's own addresses count
	default:
		return nil, 0, fmt.Errorf("%w: family and protocol %#x", errBadProxyHeader, b[13])
	}
	if len(rest) < 2*size+4 {
		return nil, 0, fmt.Errorf("%w: version 2 with %d bytes of addresses", errBadProxyHeader, len(rest))
	}
	source, _ := netip.AddrFromSlice(rest[:size])
	destination, _ := netip.AddrFromSlice(rest[size : 2*size])
	return &proxyHeader{
		unmapped(netip.AddrPortFrom(source, binary.BigEndian.Uint16(rest[2*size:]))),
		unmapped(netip.AddrPortFrom(destination, binary.BigEndian.Uint16(rest[2*size+2:]))),
	}, length, nil
}

// AppendProxyHeader appends a PROXY header of version 1 or 2. Ends of different families become IPv6 both.
func AppendProxyHeader(b []byte, version int, source, destination netip.AddrPort) []byte {
	four := source.Addr().Is4() && destination.Addr().Is4()
	from, to := source.Addr(), destination.Addr()
	if !four {
		from, to = netip.AddrFrom16(from.As16()), netip.AddrFrom16(to.As16())
	}
	if version == 1 {
		family := "TCP6"
		if four {
			family = "TCP4"
		}
		return fmt.Appendf(b, "PROXY %s %v %v %d %d\r\n", family, from, to, source.Port(), destination.Port())
	}
	b = append(b, signature2...)
	if four {
		b = append(b, 0x21, 0x11, 0, 12)
	} else {
		b = append(b, 0x21, 0x21, 0, 36)
	}
	b = append(b, from.AsSlice()...)
	b = append(b, to.AsSlice()...)
	b = binary.BigEndian.AppendUint16(b, source.Port())
	return binary.BigEndian.AppendUint16(b, destination.Port())
}
