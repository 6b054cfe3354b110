package virtual

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/proxy/nf"
)

// ipvsFamily is IPVS' number in these tests.
const ipvsFamily = 0x23

// kernel is the other end of a connection: IPVS with what a test makes it answer. A datagram without an answer leaves the
// client waiting until its deadline, which passes at once.
type kernel struct {
	t      *testing.T
	answer func(m nf.Message) [][]byte
	queue  [][]byte
	asked  []nf.Message
	// deadlines are those of the datagrams that were waited for.
	deadlines []time.Time
}

func (k *kernel) Send(msg []byte) error {
	for m := range nf.Messages(bytes.Clone(msg)) {
		k.asked = append(k.asked, m)
		if m.Type == unix.GENL_ID_CTRL {
			id := nf.AppendAttr([]byte{unix.CTRL_CMD_NEWFAMILY, 2, 0, 0}, unix.CTRL_ATTR_FAMILY_ID, binary.NativeEndian.AppendUint16(nil, ipvsFamily))
			k.queue = append(k.queue, packet(unix.GENL_ID_CTRL, 0, m.Seq, id), done(unix.NLMSG_ERROR, m.Seq, 0))
			continue
		}
		if m.Type != ipvsFamily {
			k.t.Errorf("a message to the family %#x", m.Type)
		}
		k.queue = append(k.queue, k.answer(m)...)
	}
	return nil
}

func (k *kernel) Receive(buf []byte, deadline time.Time) (int, error) {
	if left := time.Until(deadline); left <= 0 || left > time.Minute {
		k.t.Errorf("the client would wait for %v", left)
	}
	k.deadlines = append(k.deadlines, deadline)
	if len(k.queue) == 0 {
		return 0, os.ErrDeadlineExceeded
	}
	n := copy(buf, k.queue[0])
	k.queue = k.queue[1:]
	return n, nil
}

func (k *kernel) Close() error { return nil }

func packet(typ, flags uint16, seq uint32, body []byte) []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, seq)
	return append(binary.NativeEndian.AppendUint32(b, 0), body...)
}

// done ends an answer: NLMSG_DONE a list, NLMSG_ERROR anything.
func done(typ uint16, seq uint32, errno unix.Errno) []byte {
	return packet(typ, 0, seq, binary.NativeEndian.AppendUint32(nil, uint32(-int32(errno))))
}

func open(t *testing.T, answer func(m nf.Message) [][]byte) (*Table, *kernel) {
	t.Helper()
	k := &kernel{t: t, answer: answer}
	table, err := New(k)
	if err != nil {
		t.Fatal(err)
	}
	return table, k
}

// listed is what the kernel says about a server or an endpoint in a list: addresses have room for the longer ones.
func listed(command byte, seq uint32, typ uint16, attrs []byte) []byte {
	return packet(ipvsFamily, unix.NLM_F_MULTI, seq, request(command, nf.AppendAttr(nil, typ, attrs)))
}

func address(s string) []byte {
	return append(netip.MustParseAddr(s).AsSlice(), make([]byte, 16)...)[:16]
}

var (
	byAddress = Server{Family: unix.AF_INET, Addr: netip.MustParseAddr("10.96.0.10"), Protocol: unix.IPPROTO_UDP, Port: 53, Scheduler: "rr"}
	byMark    = Server{Family: unix.AF_INET6, Mark: 0x5000_0001, Scheduler: "mh", Flags: 0x10}
)

func listedServer(seq uint32, s Server) []byte {
	a := appendUint16(nil, svcFamily, s.Family)
	if s.Mark != 0 {
		a = appendUint32(a, svcMark, s.Mark)
	} else {
		a = appendUint16(a, svcProtocol, s.Protocol)
		a = nf.AppendAttr(a, svcAddr, address(s.Addr.String()))
		a = appendPort(a, svcPort, s.Port)
	}
	a = nf.AppendAttr(a, svcScheduler, append([]byte(s.Scheduler), 0))
	return listed(newService, seq, attrService, nf.AppendAttr(a, svcFlags, binary.NativeEndian.AppendUint64(nil, uint64(s.Flags))))
}

// TestLists: lists come in several datagrams, and read as what the kernel has.
func TestLists(t *testing.T) {
	dests := []Dest{
		{Addr: netip.MustParseAddrPort("10.244.1.5:5353"), Weight: 1, Active: 3, Inactive: 4},
		{Addr: netip.MustParseAddrPort("[fd00::7]:53")},
	}
	table, k := open(t, func(m nf.Message) (out [][]byte) {
		if m.Flags != unix.NLM_F_REQUEST|unix.NLM_F_DUMP {
			t.Errorf("a list is asked for with the flags %#x", m.Flags)
		}
		switch m.Body[0] {
		case getService:
			out = append(out, listedServer(m.Seq, byAddress), listedServer(m.Seq, byMark))
		case getDest:
			for _, d := range dests {
				family := uint16(unix.AF_INET)
				if d.Addr.Addr().Is6() {
					family = unix.AF_INET6
				}
				a := nf.AppendAttr(nil, destAddr, address(d.Addr.Addr().String()))
				a = appendPort(a, destPort, d.Addr.Port())
				a = appendUint32(a, destWeight, uint32(d.Weight))
				a = appendUint32(appendUint32(a, destActive, uint32(d.Active)), destInactive, uint32(d.Inactive))
				out = append(out, listed(newDest, m.Seq, attrDest, appendUint16(a, destFamily, family)))
			}
		}
		return append(out, done(unix.NLMSG_DONE, m.Seq, 0))
	})
	servers, err := table.Servers()
	if want := []Server{byAddress, byMark}; err != nil || !reflect.DeepEqual(servers, want) {
		t.Errorf("servers %+v, %v; want %+v", servers, err, want)
	}
	if got, err := table.Dests(byAddress); err != nil || !reflect.DeepEqual(got, dests) {
		t.Errorf("endpoints %+v, %v; want %+v", got, err, dests)
	}
	if of := attributes(attributes(k.asked[len(k.asked)-1].Body[4:])[attrService]); of.addr(svcAddr, unix.AF_INET) != byAddress.Addr || of.port(svcPort) != 53 {
		t.Errorf("the endpoints of %v were asked for", of)
	}
}

// TestRequests: each change says all that the kernel needs to know, in the bytes that it reads on processors that begin with
// the lower one.
func TestRequests(t *testing.T) {
	table, k := open(t, func(m nf.Message) [][]byte { return [][]byte{done(unix.NLMSG_ERROR, m.Seq, 0)} })
	dest := Dest{Addr: netip.MustParseAddrPort("10.244.1.5:5353"), Weight: 7}
	if err := errors.Join(table.AddServer(byAddress), table.SetServer(byMark), table.DelServer(byMark), table.AddDest(byAddress, dest), table.SetDest(byMark, dest),
		table.DelDest(byMark, dest), table.SetTimeouts(Timeouts{TCP: time.Minute, UDP: time.Second}), table.Flush()); err != nil {
		t.Fatal(err)
	}
	type change struct {
		command      byte
		server, dest attrs
	}
	none := appendUint32(nil, svcTimeout, 0)[4:]
	address := attrs{
		svcFamily: {unix.AF_INET, 0}, svcProtocol: {unix.IPPROTO_UDP, 0}, svcAddr: {10, 96, 0, 10}, svcPort: {0, 53}, svcScheduler: []byte("rr\x00"),
		svcFlags: {0, 0, 0, 0, 255, 255, 255, 255}, svcTimeout: none, svcNetmask: {255, 255, 255, 255},
	}
	mark := attrs{
		svcFamily: {unix.AF_INET6, 0}, svcMark: {1, 0, 0, 0x50}, svcScheduler: []byte("mh\x00"),
		svcFlags: {0x10, 0, 0, 0, 255, 255, 255, 255}, svcTimeout: none, svcNetmask: {128, 0, 0, 0},
	}
	endpoint := attrs{destAddr: {10, 244, 1, 5}, destPort: {0x14, 0xe9}, destForward: none, destWeight: {7, 0, 0, 0}, destUpper: none, destLower: none}
	want := []change{
		{newService, address, nil}, {setService, mark, nil}, {delService, mark, nil}, {newDest, address, endpoint}, {setDest, mark, endpoint}, {delDest, mark, endpoint},
		{setConfig, nil, nil}, {flush, nil, nil},
	}
	nested := func(a attrs, typ uint16) attrs {
		if v, found := a[typ]; found {
			return attributes(v)
		}
		return nil
	}
	for i, m := range k.asked[1:] {
		if m.Flags != unix.NLM_F_REQUEST|unix.NLM_F_ACK {
			t.Errorf("change %d has the flags %#x", i, m.Flags)
		}
		a := attributes(m.Body[4:])
		if m.Body[0] == setConfig {
			if a.uint32(attrTimeoutTCP) != 60 || a.uint32(attrTimeoutTCPFin) != 0 || a.uint32(attrTimeoutUDP) != 1 {
				t.Errorf("timeouts %v", a)
			}
			a = nil
		}
		if got := (change{m.Body[0], nested(a, attrService), nested(a, attrDest)}); !reflect.DeepEqual(got, want[i]) {
			t.Errorf("change %d is %v, want %v", i, got, want[i])
		}
	}
}

// TestNoAnswer: a request that the kernel doesn't answer is an error when its deadline has passed, also if answers to others come.
func TestNoAnswer(t *testing.T) {
	for name, answer := range map[string]func(m nf.Message) [][]byte{
		"nothing":     func(nf.Message) [][]byte { return nil },
		"to another":  func(m nf.Message) [][]byte { return [][]byte{done(unix.NLMSG_ERROR, m.Seq-1, 0)} },
		"half a list": func(m nf.Message) [][]byte { return [][]byte{listedServer(m.Seq, byMark)} },
	} {
		table, _ := open(t, answer)
		for what, err := range map[string]error{"list": second(table.Servers()), "endpoints": second(table.Dests(byMark)), "change": table.AddServer(byMark)} {
			if err == nil || !strings.Contains(err.Error(), "IPVS has not answered") {
				t.Errorf("%s, %s: %v", name, what, err)
			}
		}
	}
}

func second[T any](_ T, err error) error { return err }

// TestErrors: what the kernel refuses is an error, whether it says so at once or at the end of a list, which is not all then.
func TestErrors(t *testing.T) {
	for _, typ := range []uint16{unix.NLMSG_ERROR, unix.NLMSG_DONE} {
		table, _ := open(t, func(m nf.Message) [][]byte {
			return [][]byte{listedServer(m.Seq, byMark), done(typ, m.Seq, unix.ENOMEM)}
		})
		for what, err := range map[string]error{"list": second(table.Servers()), "change": table.DelServer(byMark)} {
			if !errors.Is(err, unix.ENOMEM) {
				t.Errorf("%s that ends with message %d: %v", what, typ, err)
			}
		}
	}
	table, _ := open(t, func(m nf.Message) [][]byte {
		whole := listedServer(m.Seq, byAddress)
		binary.NativeEndian.PutUint16(whole[6:], unix.NLM_F_MULTI|unix.NLM_F_DUMP_INTR)
		return [][]byte{whole, done(unix.NLMSG_DONE, m.Seq, 0)}
	})
	if _, err := table.Servers(); !errors.Is(err, unix.EINTR) {
		t.Errorf("a list that was interrupted: %v", err)
	}
	table, _ = open(t, func(m nf.Message) [][]byte {
		return [][]byte{listed(newService, m.Seq, attrService, appendUint16(nil, svcFamily, unix.AF_INET)), done(unix.NLMSG_DONE, m.Seq, 0)}
	})
	if list, err := table.Servers(); err == nil {
		t.Errorf("a server without an address is listed: %+v", list)
	}
}

// TestAnswersAreMatched: answers to an earlier request, which nobody waits for any more, are not taken for this one's.
func TestAnswersAreMatched(t *testing.T) {
	table, _ := open(t, func(m nf.Message) [][]byte {
		return [][]byte{listedServer(m.Seq-1, byMark), done(unix.NLMSG_DONE, m.Seq-1, unix.EPERM), listedServer(m.Seq, byAddress), done(unix.NLMSG_DONE, m.Seq, 0)}
	})
	if got, err := table.Servers(); err != nil || !reflect.DeepEqual(got, []Server{byAddress}) {
		t.Errorf("%+v, %v", got, err)
	}
}

// TestDeadline: answers to others don't make a request last longer.
func TestDeadline(t *testing.T) {
	table, k := open(t, func(m nf.Message) [][]byte { return [][]byte{done(unix.NLMSG_ERROR, m.Seq-1, 0)} })
	if err := table.AddServer(byMark); err == nil {
		t.Error("done without an answer")
	}
	if n := len(k.deadlines); !k.deadlines[n-1].Equal(k.deadlines[n-2]) {
		t.Errorf("the deadline moved: %v", k.deadlines)
	}
}

// TestFind asks this machine's kernel: the family of the families is there everywhere, and one is missing everywhere.
func TestFind(t *testing.T) {
	c, err := nf.Connect(unix.NETLINK_GENERIC, 0)
	if err != nil {
		t.Fatal(err)
	}
	table := &Table{client: nf.NewClient(c, "generic netlink")}
	defer table.Close()
	if err := table.find("nlctrl"); err != nil || table.family != unix.GENL_ID_CTRL {
		t.Errorf("nlctrl: %#x, %v", table.family, err)
	}
	if err := table.find("portal-nothing"); !errors.Is(err, ErrNone) {
		t.Errorf("a family that is missing: %v", err)
	}
}
