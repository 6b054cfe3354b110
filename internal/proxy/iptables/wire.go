package iptables

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/proxy/nf"
)

// wire turns the text of our rules into what the nft variant of the commands would tell the kernel, so that people and
// programs find nothing but iptables rules there. It knows the words that this package uses, and no others: what it
// doesn't know is an error, and the command's business.
type wire struct {
	family intent.Family

	// Of the rule in the making: what is asked of a packet in the order in which the commands ask, and what happens to it.
	proto            uint8
	iface, src, dst  []byte
	matches, verdict []byte
	recent           recentMatch
	to               target

	// What the rule before had in common with many others: whom it was for. Rules of a frontend begin alike.
	last struct {
		text       string
		proto      uint8
		dst, ports []byte
	}
}

type recentMatch struct {
	name    string
	how     uint8
	seconds uint32
}

// target is where a rule leads.
type target struct {
	name    string
	jump    bool // -j, not -g
	value   string
	option  string
	present bool
}

// appendRule writes the attributes of a rule behind its table and chain.
func (w *wire) appendRule(b []byte, text string) ([]byte, error) {
	w.proto, w.recent, w.to = 0, recentMatch{}, target{}
	w.iface, w.src, w.dst = w.iface[:0], w.src[:0], w.dst[:0]
	w.matches, w.verdict = w.matches[:0], w.verdict[:0]
	if err := w.read(words{rest: w.known(text)}); err != nil {
		return b, fmt.Errorf("%w in the rule %q", err, text)
	}
	if w.proto != 0 {
		// Extensions want to know whether the rule is for their protocol.
		b = nf.AppendNested(b, unix.NFTA_RULE_COMPAT, func(b []byte) []byte {
			b = nf.AppendUint32(b, unix.NFTA_RULE_COMPAT_PROTO, uint32(w.proto))
			return nf.AppendUint32(b, unix.NFTA_RULE_COMPAT_FLAGS, 0)
		})
	}
	return nf.AppendNested(b, unix.NFTA_RULE_EXPRESSIONS, func(b []byte) []byte {
		b = append(b, w.iface...)
		if w.proto != 0 {
			b = appendMeta(b, unix.NFT_META_L4PROTO)
			b = appendCmp(b, unix.NFT_CMP_EQ, []byte{w.proto})
		}
		b = append(append(append(b, w.src...), w.dst...), w.matches...)
		b = appendCounter(b)
		return append(b, w.verdict...)
	}), nil
}

// known takes over what a rule has in common with the one before, and returns the rest of its text.
func (w *wire) known(text string) string {
	if rest, same := strings.CutPrefix(text, w.last.text); same && w.last.text != "" && strings.HasPrefix(rest, " ") {
		w.proto = w.last.proto
		w.dst, w.matches = append(w.dst, w.last.dst...), append(w.matches, w.last.ports...)
		return rest
	}
	return text
}

// remember notes what a rule has said so far.
func (w *wire) remember(text string) {
	w.last.text, w.last.proto = text, w.proto
	w.last.dst, w.last.ports = append(w.last.dst[:0], w.dst...), append(w.last.ports[:0], w.matches...)
}

// words are what is left of a rule's text.
type words struct{ rest string }

func (s *words) next() string {
	s.rest = strings.TrimLeft(s.rest, " ")
	if after, quoted := strings.CutPrefix(s.rest, `"`); quoted {
		word, rest, _ := strings.Cut(after, `"`)
		s.rest = rest
		return word
	}
	word, rest, _ := strings.Cut(s.rest, " ")
	s.rest = rest
	return word
}

var errWord = errors.New("an unknown word")

func (w *wire) read(s words) error {
	not, whole, plain := false, s.rest, true
	for {
		word := s.next()
		if word == "" {
			return w.finish()
		}
		if word == "!" {
			not = true
			continue
		}
		if err := w.option(word, &s, not); err != nil {
			return fmt.Errorf("%s: %w", word, err)
		}
		switch word {
		case "-d", "-p":
		case "--dport":
			if plain && !not {
				w.remember(strings.TrimRight(strings.TrimSuffix(whole, s.rest), " "))
			}
			plain = false
		default:
			plain = false
		}
		not = false
	}
}

func (w *wire) option(word string, s *words, not bool) (err error) {
	switch word {
	case "-d":
		w.dst, err = w.address(w.dst, s.next(), not, 16, 24)
	case "-s":
		w.src, err = w.address(w.src, s.next(), not, 12, 8)
	case "--mark":
		return w.packetMark(s.next(), not)
	case "--ctstate":
		return w.state(s.next(), not)
	default:
		if not {
			return errWord
		}
		return w.plainOption(word, s)
	}
	return err
}

// plainOption is one that is never inverted.
func (w *wire) plainOption(word string, s *words) error {
	switch word {
	case "-i":
		w.interfaceName(s.next())
	case "-p":
		switch s.next() {
		case "tcp":
			w.proto = unix.IPPROTO_TCP
		case "udp":
			w.proto = unix.IPPROTO_UDP
		case "sctp":
			w.proto = unix.IPPROTO_SCTP
		default:
			return errWord
		}
	case "--dport":
		return w.port(s.next())
	case "-m":
		return w.begin(s.next())
	case "--mode":
		if s.next() != "random" {
			return errWord
		}
	case "--probability":
		return w.chance(s.next())
	case "--src-type":
		return w.addressType(s.next(), 0)
	case "--dst-type":
		return w.addressType(s.next(), 2)
	case "--bytecode":
		return w.program(s.next())
	case "--name":
		w.recent.name = s.next()
	case "--set":
		w.recent.how = recentSet
	case "--update":
		w.recent.how |= recentUpdate
	case "--reap":
		w.recent.how |= recentReap
	case "--seconds":
		n, err := strconv.ParseUint(s.next(), 10, 32)
		w.recent.seconds = uint32(n)
		return err
	case "-j", "-g":
		w.endRecent()
		w.to = target{name: s.next(), jump: word == "-j", present: true}
	case "--set-xmark", "--to-destination", "--reject-with":
		w.to.option, w.to.value = word, s.next()
	case "--random-fully":
		w.to.option = word
	default:
		return errWord
	}
	return nil
}

// begin is a match's name, whose options follow.
func (w *wire) begin(name string) error {
	w.endRecent()
	switch name {
	case "statistic", "addrtype", "mark", "conntrack", "recent", "bpf":
		return nil
	}
	return errWord
}
