package nf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// script is a connection whose answers are known beforehand: those to each datagram that is sent.
type script struct {
	answers []func(seq uint32) []byte
	sent    [][]byte
	queue   [][]byte
}

func (s *script) Send(msg []byte) error {
	s.sent = append(s.sent, append([]byte(nil), msg...))
	if len(s.answers) > 0 {
		if answer := s.answers[0](binary.NativeEndian.Uint32(msg[8:])); answer != nil {
			s.queue = append(s.queue, answer)
		}
		s.answers = s.answers[1:]
	}
	return nil
}

func (s *script) Receive(buf []byte, deadline time.Time) (int, error) {
	if len(s.queue) == 0 {
		if deadline.After(time.Now().Add(timeout + time.Minute)) {
			return 0, errors.New("no deadline")
		}
		return 0, os.ErrDeadlineExceeded
	}
	n := copy(buf, s.queue[0])
	s.queue = s.queue[1:]
	return n, nil
}

func (s *script) Close() error { return nil }

func packet(typ, flags uint16, seq uint32, body []byte) []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, seq)
	return append(binary.NativeEndian.AppendUint32(b, 0), body...)
}

func status(typ, flags uint16, seq uint32, errno unix.Errno) []byte {
	return packet(typ, flags, seq, append(binary.NativeEndian.AppendUint32(nil, uint32(-int32(errno))), make([]byte, unix.NLMSG_HDRLEN)...))
}

// generation is the answer to that question.
func generation(seq, id uint32) []byte {
	return append(packet(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN, 0, seq, appendUint32(make([]byte, 4), unix.NFTA_GEN_ID, id)), status(unix.NLMSG_ERROR, 0, seq, 0)...)
}

// TestAnswersAreMatched: an answer to an earlier request, which nobody waits for any more, is not taken for this one's.
func TestAnswersAreMatched(t *testing.T) {
	c := &script{answers: []func(uint32) []byte{func(seq uint32) []byte {
		return append(generation(seq-1, 7), generation(seq, 8)...)
	}}}
	if id, err := NewSocket(c).Generation(); id != 8 || err != nil {
		t.Errorf("generation %d, %v", id, err)
	}
	c = &script{answers: []func(uint32) []byte{
		func(seq uint32) []byte { return status(unix.NLMSG_ERROR, 0, seq-1, 0) }, // of an earlier transaction
	}}
	b := NewBatch()
	b.SharedTable(&Table{Family: unix.NFPROTO_IPV4, Name: "t"})
	if err := NewSocket(c).Commit(b); err == nil {
		t.Error("an acknowledgement of something else was taken for this transaction's")
	}
}

// TestErrorsAtTheEnd: a list that ends with an error is an error.
func TestErrorsAtTheEnd(t *testing.T) {
	list := func(s *Socket) (n int, err error) {
		err = s.Chains(&Table{Name: "t"}, func() { n = 0 }, func(string) { n++ })
		return n, err
	}
	chain := func(seq uint32, flags uint16) []byte {
		return packet(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWCHAIN, flags, seq, appendString(make([]byte, 4), unix.NFTA_CHAIN_TABLE, "t"))
	}
	for _, c := range []struct {
		name    string
		answers []func(uint32) []byte
		n       int
		err     error
	}{
		{"whole", []func(uint32) []byte{func(seq uint32) []byte {
			return append(chain(seq, 0), status(unix.NLMSG_DONE, 0, seq, 0)...)
		}}, 1, nil},
		{"done with an error", []func(uint32) []byte{func(seq uint32) []byte {
			return append(chain(seq, 0), status(unix.NLMSG_DONE, 0, seq, unix.ENOMEM)...)
		}}, 1, unix.ENOMEM},
		{"interrupted, then whole", []func(uint32) []byte{func(seq uint32) []byte {
			return append(append(chain(seq, unix.NLM_F_DUMP_INTR), chain(seq, 0)...), status(unix.NLMSG_DONE, 0, seq, 0)...)
		}, func(seq uint32) []byte {
			return append(chain(seq, 0), status(unix.NLMSG_DONE, 0, seq, 0)...)
		}}, 1, nil},
		{"interrupted at the end, then whole", []func(uint32) []byte{func(seq uint32) []byte {
			return append(chain(seq, 0), status(unix.NLMSG_DONE, unix.NLM_F_DUMP_INTR, seq, 0)...)
		}, func(seq uint32) []byte { return status(unix.NLMSG_DONE, 0, seq, 0) }}, 0, nil},
	} {
		if n, err := list(NewSocket(&script{answers: c.answers})); n != c.n || !errors.Is(err, c.err) {
			t.Errorf("%s: %d chains, %v", c.name, n, err)
		}
	}
	always := func(seq uint32) []byte { return status(unix.NLMSG_DONE, unix.NLM_F_DUMP_INTR, seq, 0) }
	s := &script{}
	for range 20 {
		s.answers = append(s.answers, always)
	}
	if _, err := list(NewSocket(s)); !errors.Is(err, unix.EINTR) {
		t.Errorf("a list that is always interrupted: %v", err)
	}
}

// TestDeadlines: no request waits for ever.
func TestDeadlines(t *testing.T) {
	if _, err := NewSocket(&script{}).Generation(); err == nil || !strings.Contains(err.Error(), "has not answered") {
		t.Errorf("a request without an answer: %v", err)
	}
	b := NewBatch()
	b.SharedTable(&Table{Family: unix.NFPROTO_IPV4, Name: "t"})
	if err := NewSocket(&script{}).Commit(b); err == nil || !strings.Contains(err.Error(), "has not answered") {
		t.Errorf("a transaction without an answer: %v", err)
	}
}

// inNamespace moves the test into a network namespace of its own. The thread is never given back.
func inNamespace(t *testing.T) *Socket {
	t.Helper()
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); errors.Is(err, unix.EPERM) && os.Geteuid() != 0 {
		t.Skip("a network namespace needs root")
	} else if err != nil {
		t.Fatal(err)
	}
	s, err := Dial()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func nft(t *testing.T, command string) string {
	t.Helper()
	out, err := exec.Command("nft", command).CombinedOutput()
	if err != nil {
		t.Fatalf("nft %s: %v %s", command, err, out)
	}
	return string(out)
}

// sample is a table with a set, a map, a map of verdicts and intervals.
type sample struct {
	*Table
	addrs, ports, verdicts, ranges *Set
}

func newSample() *sample {
	t := &sample{Table: &Table{Family: unix.NFPROTO_IPV4, Name: "sample", Comment: "a sample"}}
	t.addrs = &Set{Table: t.Table, Name: "addrs", Key: []Field{IPv4Field}}
	t.ports = &Set{Table: t.Table, Name: "ports", Key: []Field{IPv4Field, PortField}, Data: []Field{NumberField}}
	t.verdicts = &Set{Table: t.Table, Name: "verdicts", Key: []Field{IPv4Field}, Verdicts: true}
	t.ranges = &Set{Table: t.Table, Name: "ranges", Key: []Field{PortField, IPv4Field}, Intervals: true}
	return t
}

func addr(i int) []byte { return []byte{192, 0, 2, byte(i)} }

// declare puts some elements and rules into a transaction.
func (t *sample) declare(b *Batch, p *Present, n int) {
	b.Replace(t.Table, p)
	for _, s := range []*Set{t.addrs, t.ports, t.verdicts, t.ranges} {
		b.AddSet(s)
	}
	b.AddChain(t.Table, Chain{Name: "base", Hook: Hook{"filter", unix.NF_INET_PRE_ROUTING, 7}, Rules: []Rule{
		{IPv4.Source(Reg0), VerdictMap(t.verdicts, Reg0)},
		{IPv4.Source(Reg0), IsIn{Set: t.addrs, Key: Reg0}, Counter{}, Drop},
		{IPv4.Source(Reg0), IsIn{Set: t.addrs, Key: Reg0}, Goto("other")},
	}})
	b.AddChain(t.Table, Chain{Name: "other", Rules: IPv4.Reject()})
	for i := range n {
		b.Add(t.addrs, Element{Key: addr(i)})
		b.Add(t.ports, Element{Key: AppendPort(addr(i), 80), Data: Number(uint32(i))})
		b.Add(t.verdicts, Element{Key: addr(i), Verdict: Goto("other")})
		b.Add(t.ranges, Element{Key: append(AppendPort(nil, uint16(i)), 10, 0, 0, 0), End: append(AppendPort(nil, uint16(i)), 10, 0, 0, 255)})
	}
	b.Prune(t.Table)
}

func sync(t *testing.T, s *Socket, table *sample, n int) (messages int) {
	t.Helper()
	p, err := s.Read(table.Table)
	if err != nil {
		t.Fatal(err)
	}
	b := NewBatch()
	table.declare(b, p, n)
	b.closeElements()
	messages = b.count
	if err := s.Commit(b); err != nil {
		t.Fatal(err)
	}
	return messages
}

// TestReplace: only the difference is written, also by another process, and whatever somebody changes is put right.
func TestReplace(t *testing.T) {
	s := inNamespace(t)
	if n := sync(t, s, newSample(), 20); n == 0 {
		t.Error("nothing was written")
	}
	for _, c := range []struct {
		harm     string
		messages int
	}{
		{"", 0},
		{"delete element ip sample addrs { 192.0.2.3 }", 1},
		{"add element ip sample addrs { 192.0.2.77 }", 1},
		{"delete element ip sample ports { 192.0.2.3 . 80 }", 1},
		{"delete element ip sample verdicts { 192.0.2.3 }", 1},
		{"delete element ip sample ranges { 3 . 10.0.0.0/24 }", 1},
		{"flush chain ip sample other", 2},
		{"insert rule ip sample base accept", 4},
		{"add chain ip sample strange", 1},
		{"add set ip sample strange { type ipv4_addr; }", 1},
	} {
		fresh := newSample()
		if c.harm != "" {
			nft(t, c.harm)
		}
		if n := sync(t, s, fresh, 20); n != c.messages {
			t.Errorf("after %q: %d messages, not %d", c.harm, n, c.messages)
		}
		if n := sync(t, s, newSample(), 20); n != 0 {
			t.Errorf("after %q: %d messages the second time", c.harm, n)
		}
		nft(t, "add table ip another")
		if err := s.Check(fresh.Table); err != nil {
			t.Errorf("after %q: %v", c.harm, err)
		}
	}
	// A set in another form is replaced, with the rules that use it.
	other := newSample()
	other.addrs.Size = 100
	sync(t, s, other, 20)
	if err := s.Check(other.Table); err != nil {
		t.Error(err)
	}
	if text := nft(t, "list table ip sample"); !strings.Contains(text, "size 100") || strings.Count(text, "@addrs") != 2 || !strings.Contains(text, "a sample") {
		t.Errorf("the table is\n%s", text)
	}
	if err := s.Remove(other.Table, &Table{Family: unix.NFPROTO_IPV6, Name: "sample"}); err != nil {
		t.Error(err)
	}
}

// interrupted is a connection on which no list of elements is ever complete.
type interrupted struct{ Conn }

func (c interrupted) Receive(buf []byte, deadline time.Time) (int, error) {
	n, err := c.Conn.Receive(buf, deadline)
	for at := 0; at+unix.NLMSG_HDRLEN <= n; at += align(int(binary.NativeEndian.Uint32(buf[at:]))) {
		if binary.NativeEndian.Uint16(buf[at+4:]) == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWSETELEM {
			buf[at+6] |= unix.NLM_F_DUMP_INTR
		}
	}
	return n, err
}

// TestReplaceUnread: where others change something all the time, a table is written without having been read.
func TestReplaceUnread(t *testing.T) {
	s := inNamespace(t)
	sync(t, s, newSample(), 20)
	nft(t, "add element ip sample addrs { 192.0.2.77 }; delete element ip sample verdicts { 192.0.2.3 }")
	busy, err := Dial()
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	busy.Wrap(func(c Conn) Conn { return interrupted{c} })
	fresh := newSample()
	sync(t, busy, fresh, 19)
	if err := s.Check(fresh.Table); err != nil {
		t.Error(err)
	}
}

// TestCheck: one element more, less or another is noticed and named, and reading costs nothing while nobody changes
// anything.
func TestCheck(t *testing.T) {
	s := inNamespace(t)
	table := newSample()
	sync(t, s, table, 20)
	for harm, says := range map[string]string{
		"delete element ip sample addrs { 192.0.2.3 }":                                                            "the set addrs has 19 elements instead of 20",
		"add element ip sample addrs { 192.0.2.99 }":                                                              "the set addrs has 21 elements instead of 20",
		"delete element ip sample ports { 192.0.2.3 . 80 }; add element ip sample ports { 192.0.2.3 . 80 : 0x7 }": "the set ports has other elements",
		"delete element ip sample verdicts { 192.0.2.3 }":                                                         "the set verdicts has 19 elements",
		"flush chain ip sample other":                                                                             "the chain other has 0 rules instead of 2",
		"insert rule ip sample base accept":                                                                       "the chain base has 4 rules instead of 3",
		"delete table ip sample":                                                                                  "it is missing",
	} {
		if err := s.Check(table.Table); err != nil {
			t.Fatalf("before %q: %v", harm, err)
		}
		nft(t, harm)
		if err := s.Check(table.Table); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("after %q: %v", harm, err)
		}
		sync(t, s, table, 20)
	}
	// Changes of our own are known, and nothing is read.
	if err := s.Check(table.Table); err != nil {
		t.Fatal(err)
	}
	b := NewBatch()
	b.Add(table.addrs, Element{Key: addr(200)})
	b.Delete(table.ports, Element{Key: AppendPort(addr(3), 80), Data: Number(3)})
	if err := s.Commit(b); err != nil {
		t.Fatal(err)
	}
	if err := s.Verify(func() error { return errors.New("compared") }); err != nil {
		t.Error(err)
	}
	nft(t, "add table ip another")
	if err := s.Check(table.Table); err != nil {
		t.Error(err)
	}
}

// TestOnlyAt: a transaction that was made for what was read is refused when somebody has changed something since.
func TestOnlyAt(t *testing.T) {
	s := inNamespace(t)
	id, err := s.Generation()
	if err != nil {
		t.Fatal(err)
	}
	nft(t, "add table ip another")
	b := NewBatch()
	b.OnlyAt(id)
	newSample().declare(b, nil, 1)
	if err := s.Commit(b); !errors.Is(err, unix.ERESTART) {
		t.Errorf("a transaction for an old generation: %v", err)
	}
}

// TestBlame: the kernel's refusal says which element or rule it is about, and whose it is.
func TestBlame(t *testing.T) {
	s := inNamespace(t)
	table := newSample()
	sync(t, s, table, 20)
	b := NewBatch()
	for i := range 5 {
		b.Owner(i + 1)
		b.Add(table.addrs, Element{Key: addr(100 + i)})
		if i == 3 {
			b.Delete(table.addrs, Element{Key: addr(150)})
		}
	}
	b.Owner(0)
	err := s.Commit(b)
	var bad Refusal
	if !errors.As(err, &bad) || len(bad) != 1 || bad[0].Owner != 4 || bad[0].Errno != unix.ENOENT {
		t.Fatalf("%#v", err)
	}
	if want := fmt.Sprintf("nf_tables refused deleting elements of the set addrs of the table sample, element %x: ", addr(150)); !strings.HasPrefix(err.Error(), want) {
		t.Errorf("%v, not %s", err, want)
	}
	b = NewBatch()
	b.AddChain(table.Table, Chain{Name: "wrong", Rules: []Rule{{Goto("nowhere")}}})
	if err := s.Commit(b); err == nil || !strings.Contains(err.Error(), "adding a rule to the chain wrong of the table sample") {
		t.Errorf("a rule that leads nowhere: %v", err)
	}
	// Nothing of a refused transaction is remembered.
	nft(t, "add table ip another")
	if err := s.Check(table.Table); err != nil {
		t.Error(err)
	}
}

// TestExpressions: the kernel takes every expression, and the nft tool understands it.
func TestExpressions(t *testing.T) {
	s := inNamespace(t)
	for _, ip := range []IP{IPv4, IPv6} {
		table := &Table{Family: ip.Family, Name: "all"}
		clients := &Set{Table: table, Name: "clients", Key: []Field{ip.AddrField()}, Dynamic: true, Size: 1000}
		nat := Hook{"nat", unix.NF_INET_PRE_ROUTING, -100}
		b := NewBatch()
		b.Replace(table, nil)
		b.AddSet(clients)
		loopback := ip.AppendAddr(nil, ip.Loopback().Addr())
		b.AddChain(table, Chain{Name: "nat", Hook: nat, Rules: []Rule{
			{Immediate{Reg0, loopback}, Immediate{Reg0 + 4, AppendPort(nil, 80)[:2]}, DNAT{ip.Family, Reg0, Reg0 + 4}},
			append(IsProto(unix.IPPROTO_TCP), Immediate{Reg0, AppendPort(nil, 80)[:2]}, Redirect{Reg0}),
		}})
		b.AddChain(table, Chain{Name: "out", Hook: Hook{"nat", unix.NF_INET_POST_ROUTING, 100}, Rules: []Rule{{Masquerade{}}}})
		rules := append(ip.Reject(), ip.From([]netip.Prefix{ip.Loopback()}, "eth0", "veth")...)
		rules = append(rules, ip.NotLoopback(), IsLocal(true, true), MarkBit(0x4000), CtMarkBit(0x4000), HasBit(Mark(Reg0), 8, false),
			Rule{DestinationPort(Reg0), Range{Reg0, []byte{0, 1}, []byte{1, 0}}, Continue},
			Rule{Transparent{Reg0}, Cmp{Reg: Reg0, Data: []byte{1}}, Accept},
			Rule{Ct{Key: unix.NFT_CT_SRC, Dst: Reg0, Direction: Reply}, Cmp{Reg: Reg0, Data: loopback}, Return},
			Rule{ip.Source(Reg0), Dynset{Set: clients, Op: unix.NFT_DYNSET_OP_UPDATE, Key: Reg0, Timeout: time.Minute}},
			Rule{Random{Reg0, 10, 5}, Cmp{Reg: Reg0, Data: Number(7)}, Drop},
		)
		b.AddChain(table, Chain{Name: "filter", Hook: Hook{"filter", unix.NF_INET_PRE_ROUTING, -150}, Rules: rules})
		if err := s.Commit(b); err != nil {
			t.Fatal(err)
		}
		if err := s.Check(table); err != nil {
			t.Error(err)
		}
	}
	text := nft(t, "list ruleset")
	for _, want := range []string{
		"redirect to :80", "dnat to 127.0.0.0:80", "masquerade fully-random", "reject with tcp reset", `iifname "veth*"`, "fib daddr type local",
		"socket transparent 1 accept", "update @clients", "numgen random mod 10 offset 5", "ct reply ip saddr 127.0.0.0 return", "th dport 1-256",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
}

func TestDisjoint(t *testing.T) {
	p := netip.MustParsePrefix
	got := Disjoint([]netip.Prefix{p("10.1.0.0/16"), p("10.0.0.0/8"), p("10.0.0.0/8"), p("192.0.2.7/24"), p("fd00::/64")})
	want := []netip.Prefix{p("10.0.0.0/8"), p("192.0.2.0/24"), p("fd00::/64")}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// FuzzMessages: whatever the kernel sends, reading it ends.
func FuzzMessages(f *testing.F) {
	f.Add(generation(1, 2))
	f.Fuzz(func(_ *testing.T, b []byte) {
		for m := range Messages(b) {
			_, _ = m.errno(), m.errorOffset()
			for _, v := range Attributes(m.Body) {
				readElement(v)
			}
			describe(m.Type&0xff, m.Body, 40)
		}
	})
}
