package test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// selector is a series in an expression of PromQL, with the labels that its matchers and the aggregations around it name.
type selector struct {
	name   string
	labels []string
}

// selectors reads an expression as far as is needed to know which series and labels it uses. Prometheus itself checks the rest.
func selectors(text string) (out []selector) {
	s := promScanner{text: text}
	var around [][]string // the labels of each open parenthesis' aggregation
	var next []string     // those of the aggregation whose parenthesis comes
	for {
		token := s.next()
		switch token {
		case "":
			return out
		case "by", "on", "without", "ignoring", "group_left", "group_right":
			if labels := s.list("(", ")"); token == "by" {
				next = labels
			}
		case "(":
			around, next = append(around, next), nil
		case ")":
			around = around[:max(0, len(around)-1)]
		case "and", "or", "unless", "bool", "offset":
		default:
			if !letter(token[0]) || s.peek() == '(' || slices.Contains(aggregations, token) { // not a series
				continue
			}
			found := selector{name: token, labels: slices.Concat(around...)}
			if s.peek() == '{' {
				found.labels = append(found.labels, s.list("{", "}")...)
			}
			out = append(out, found)
		}
	}
}

// aggregations can be followed by `by`.
var aggregations = []string{"sum", "max", "min", "count", "avg"}

func letter(c byte) bool {
	return c == '_' || c == ':' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
}

// promScanner cuts an expression into names and single characters, without strings, numbers and durations.
type promScanner struct {
	text string
	at   int
}

// peek is the next character that is not a space.
func (s *promScanner) peek() byte {
	for s.at < len(s.text) && strings.IndexByte(" \t\n", s.text[s.at]) >= 0 {
		s.at++
	}
	if s.at == len(s.text) {
		return 0
	}
	return s.text[s.at]
}

func (s *promScanner) next() string {
	c := s.peek()
	from := s.at
	skip := func(end func(byte) bool) {
		for s.at < len(s.text) && !end(s.text[s.at]) {
			s.at++
		}
	}
	switch {
	case c == 0:
		return ""
	case c == '"':
		s.at++
		skip(func(c byte) bool { return c == '"' })
		s.at++
		return `""`
	case c == '[':
		skip(func(c byte) bool { return c == ']' })
		s.at++
		return "[]"
	case c >= '0' && c <= '9':
		skip(func(c byte) bool { return !letter(c) && c != '.' && (c < '0' || c > '9') })
		return "0"
	case letter(c):
		skip(func(c byte) bool { return !letter(c) && (c < '0' || c > '9') })
		return s.text[from:s.at]
	}
	s.at++
	return string(c)
}

// list are the names between two characters: labels, or matchers without what they match.
func (s *promScanner) list(open, end string) (out []string) {
	if s.peek() != open[0] {
		return nil
	}
	for token := s.next(); token != "" && token != end; token = s.next() {
		if letter(token[0]) {
			out = append(out, token)
		}
	}
	return out
}

// The reader of expressions finds series and labels where PromQL has them.
func TestSelectors(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		`a`:                        "[{a []}]",
		`rate(a_total[5m]) > 0.05`: "[{a_total []}]",
		`sum by (x, y) (rate(a{b="c d", e!~"f{g}"}[1h])) / on (x) (z or vector(0))`: "[{a [x y b e]} {z []}]",
		`histogram_quantile(0.99, sum by (le) (rate(a_bucket[1m])))`:                "[{a_bucket [le]}]",
		`max(a) == 1e3 and time() - portal:b:ratio5m{i=~"j"} > 7 * 86400`:           "[{a []} {portal:b:ratio5m [i]}]",
	} {
		if got := fmt.Sprint(selectors(text)); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}
