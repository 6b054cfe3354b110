// Package probes is a list of requests that proxies have read differently, or should refuse, with what Portal does about each. It is
// for tests only.
package probes

import (
	"fmt"
	"strings"
)

// Probe is what a client sends, and what becomes of it.
type Probe struct {
	Name string
	Send string
	// Want are the statuses of the answers, in order: "200" for a request that reaches the endpoint, "200 400" for one that does
	// and a second that is refused.
	Want string
}

// Smuggled is the path that no endpoint may ever see.
const Smuggled = "/smuggled"

const second = "GET " + Smuggled + " HTTP/1.1\r\nHost: a.example\r\n\r\n"

// All returns every probe.
func All() []Probe {
	var all list
	all.lines()
	all.hosts()
	all.fields()
	all.lengths()
	all.codings()
	all.chunks()
	all.connections()
	all.sizes()
	all.paths()
	return all
}

type list []Probe

func (l *list) add(group, name, want, send string) {
	*l = append(*l, Probe{Name: group + ": " + name, Send: send, Want: want})
}

func (l *list) lines() {
	for _, tc := range [][3]string{
		{"plain", "200", "GET / HTTP/1.1"},
		{"HTTP/1.0", "200", "GET / HTTP/1.0"},
		{"lower-case method", "200", "get / HTTP/1.1"},
		{"unknown method", "200", "BREW / HTTP/1.1"},
		{"query", "200", "GET /?a=b&c=%20 HTTP/1.1"},
		{"query with question mark", "200", "GET /?a?b HTTP/1.1"},
		{"pipe and braces", "200", "GET /a|b{c} HTTP/1.1"},
		{"OPTIONS *", "200", "OPTIONS * HTTP/1.1"},
		{"absolute form", "200", "GET http://a.example/ HTTP/1.1"},
		{"absolute form, capitals", "200", "GET HTTP://A.example/ HTTP/1.1"},
		{"absolute form without path", "200", "GET http://a.example HTTP/1.1"},
		{"absolute form, another host", "400", "GET http://b.example/ HTTP/1.1"},
		{"absolute form, user", "400", "GET http://u@a.example/ HTTP/1.1"},
		{"absolute form, empty host", "400", "GET http:///x HTTP/1.1"},
		{"absolute form, other scheme", "400", "GET ftp://a.example/ HTTP/1.1"},
		{"absolute form, query alone", "400", "GET http://a.example?x HTTP/1.1"},
		{"absolute form, bad port", "400", "GET http://a.example:x/ HTTP/1.1"},
		{"GET *", "400", "GET * HTTP/1.1"},
		{"path without slash", "400", "GET index.html HTTP/1.1"},
		{"CONNECT", "405", "CONNECT a.example:80 HTTP/1.1"},
		{"CONNECT with a path", "405", "CONNECT / HTTP/1.1"},
		{"TRACE", "405", "TRACE / HTTP/1.1"},
		{"no version", "400", "GET /"},
		{"no target", "400", "GET HTTP/1.1"},
		{"empty target", "400", "GET  HTTP/1.1"},
		{"two spaces before the target", "400", "GET  / HTTP/1.1"},
		{"two spaces before the version", "400", "GET /  HTTP/1.1"},
		{"space in the target", "400", "GET /a b HTTP/1.1"},
		{"space at the end", "400", "GET / HTTP/1.1 "},
		{"space at the begin", "400", " GET / HTTP/1.1"},
		{"tab instead of space", "400", "GET\t/\tHTTP/1.1"},
		{"tab in the target", "400", "GET /a\tb HTTP/1.1"},
		{"CR in the line", "400", "GET /\r HTTP/1.1"},
		{"NUL in the target", "400", "GET /\x00 HTTP/1.1"},
		{"NUL in the method", "400", "G\x00T / HTTP/1.1"},
		{"form feed", "400", "GET /\x0c HTTP/1.1"},
		{"DEL in the target", "400", "GET /\x7f HTTP/1.1"},
		{"high byte in the target", "400", "GET /\xff HTTP/1.1"},
		{"fragment", "400", "GET /#x HTTP/1.1"},
		{"method with colon", "400", "GE:T / HTTP/1.1"},
		{"method with parenthesis", "400", "GE(T / HTTP/1.1"},
		{"method with quotation mark", "400", "\"GET\" / HTTP/1.1"},
		{"method too long", "501", strings.Repeat("A", 40) + " / HTTP/1.1"},
		{"HTTP/2.0", "505", "GET / HTTP/2.0"},
		{"HTTP/1.2", "505", "GET / HTTP/1.2"},
		{"HTTP/0.9", "505", "GET / HTTP/0.9"},
		{"HTTP/1.10", "400", "GET / HTTP/1.10"},
		{"HTTP/01.1", "400", "GET / HTTP/01.1"},
		{"HTTP/1", "400", "GET / HTTP/1"},
		{"HTTP/1,1", "400", "GET / HTTP/1,1"},
		{"http/1.1", "400", "GET / http/1.1"},
		{"HTTP/ 1.1", "400", "GET / HTTP/ 1.1"},
		{"HTTPS/1.1", "400", "GET / HTTPS/1.1"},
		{"version twice", "400", "GET / HTTP/1.1 HTTP/1.1"},
		{"smuggled by version", "400", "GET / HTTP/1.1\rX"},
	} {
		l.add("line", tc[0], tc[1], tc[2]+"\r\nHost: a.example\r\n\r\n")
	}
	l.add("line", "ends with LF", "400", "GET / HTTP/1.1\nHost: a.example\r\n\r\n")
	l.add("line", "empty line before", "200", "\r\nGET / HTTP/1.1\r\nHost: a.example\r\n\r\n")
	l.add("line", "two empty lines before", "400", "\r\n\r\nGET / HTTP/1.1\r\nHost: a.example\r\n\r\n")
	l.add("line", "bare LF before", "400", "\nGET / HTTP/1.1\r\nHost: a.example\r\n\r\n")
	l.add("line", "HTTP/0.9 request", "400", "GET /\r\n\r\n")
	l.add("line", "TLS", "400", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
	l.add("line", "binary", "400", "\x00\x01\x02\x03\r\n\r\n")
	l.add("line", "SMTP", "400", "EHLO a.example\r\n\r\n")
	l.add("line", "broken HTTP/2 preface", "400", "PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n")
	l.add("line", "HTTP/2 preface second", "200 505", "GET / HTTP/1.1\r\nHost: a.example\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	l.add("line", "end of the connection within", "400", "GET / HT")
	l.add("line", "end of the connection within the header", "400", "GET / HTTP/1.1\r\nHost: a.exa")
}

func (l *list) hosts() {
	for _, tc := range [][3]string{
		{"name", "200", "Host: a.example\r\n"},
		{"no space", "200", "Host:a.example\r\n"},
		{"capitals", "200", "HOST: A.EXAMPLE\r\n"},
		{"port", "200", "Host: a.example:80\r\n"},
		{"empty port", "200", "Host: a.example:\r\n"},
		{"trailing dot", "200", "Host: a.example.\r\n"},
		{"IPv4", "200", "Host: 192.0.2.1\r\n"},
		{"IPv6", "200", "Host: [2001:db8::1]:80\r\n"},
		{"underscore", "200", "Host: a_b.example\r\n"},
		{"none", "400", ""},
		{"empty", "400", "Host:\r\n"},
		{"two", "400", "Host: a.example\r\nHost: b.example\r\n"},
		{"two equal", "400", "Host: a.example\r\nHost: a.example\r\n"},
		{"two, one with space before the colon", "400", "Host: a.example\r\nHost : b.example\r\n"},
		{"two, one folded", "400", "Host: a.example\r\n Host: b.example\r\n"},
		{"list", "200", "Host: a.example,b.example\r\n"}, // a comma may be part of a name; no route has it
		{"space", "400", "Host: a.example b.example\r\n"},
		{"user", "400", "Host: u@a.example\r\n"},
		{"path", "400", "Host: a.example/x\r\n"},
		{"backslash", "400", "Host: a.example\\x\r\n"},
		{"question mark", "400", "Host: a.example?x\r\n"},
		{"bad port", "400", "Host: a.example:x\r\n"},
		{"port too large", "400", "Host: a.example:65536\r\n"},
		{"two ports", "400", "Host: a.example:80:81\r\n"},
		{"port with a plus", "400", "Host: a.example:+80\r\n"},
		{"IPv6 without bracket", "400", "Host: [2001:db8::1\r\n"},
		{"IPv6 and garbage", "400", "Host: [2001:db8::1]x\r\n"},
		{"empty brackets", "400", "Host: []\r\n"},
		{"port alone", "400", "Host: :80\r\n"},
		{"NUL", "400", "Host: a.example\x00.b\r\n"},
		{"high byte", "400", "Host: a\xff.example\r\n"},
		{"angle bracket", "400", "Host: <a.example>\r\n"},
		{"too long", "400", "Host: " + strings.Repeat("a", 300) + "\r\n"},
		{"tab before the value", "200", "Host:\ta.example\r\n"},
	} {
		l.add("host", tc[0], tc[1], "GET / HTTP/1.1\r\n"+tc[2]+"\r\n")
	}
	l.add("host", "none in HTTP/1.0", "200", "GET / HTTP/1.0\r\n\r\n")
	l.add("host", "two in HTTP/1.0", "400", "GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n")
	l.add("host", "absolute form without Host", "400", "GET http://a.example/ HTTP/1.1\r\n\r\n")
}

func (l *list) fields() {
	for _, tc := range [][3]string{
		{"plain", "200", "A: b\r\n"},
		{"empty value", "200", "A:\r\n"},
		{"spaces around the value", "200", "A: \t b \t\r\n"},
		{"high bytes in the value", "200", "A: \xc3\xa4\r\n"},
		{"tab in the value", "200", "A: b\tc\r\n"},
		{"name with punctuation", "200", "!#$%&'*+-.^_`|~: b\r\n"},
		{"digits", "200", "1: b\r\n"},
		{"colon in the value", "200", "A: b:c\r\n"},
		{"space before the colon", "400", "A : b\r\n"},
		{"tab before the colon", "400", "A\t: b\r\n"},
		{"space in the name", "400", "A B: c\r\n"},
		{"no colon", "400", "Abc\r\n"},
		{"no name", "400", ": b\r\n"},
		{"fold by space", "400", "A: b\r\n c\r\n"},
		{"fold by tab", "400", "A: b\r\n\tc\r\n"},
		{"fold, spaces alone", "400", "A: b\r\n \r\n"},
		{"bare LF", "400", "A: b\nC: d\r\n"},
		{"bare CR", "400", "A: b\rC: d\r\n"},
		{"CR before CRLF", "400", "A: b\r\r\n"},
		{"NUL in the value", "400", "A: b\x00c\r\n"},
		{"NUL in the name", "400", "A\x00: b\r\n"},
		{"NUL before the colon", "400", "A: b\r\n\x00: c\r\n"},
		{"bell in the value", "400", "A: \x07\r\n"},
		{"escape in the value", "400", "A: \x1b[31m\r\n"},
		{"DEL in the value", "400", "A: \x7f\r\n"},
		{"vertical tab", "400", "A: b\x0bc\r\n"},
		{"high byte in the name", "400", "\xc3\xa4: b\r\n"},
		{"parenthesis in the name", "400", "A(b): c\r\n"},
		{"slash in the name", "400", "A/b: c\r\n"},
		{"quotation mark in the name", "400", "\"A\": b\r\n"},
		{"at sign in the name", "400", "A@b: c\r\n"},
		{"bracket in the name", "400", "A[0]: c\r\n"},
		{"comma in the name", "400", "A,B: c\r\n"},
		{"equals sign in the name", "400", "A=B: c\r\n"},
		{"request line as field", "400", "GET / HTTP/1.1\r\n"},
		{"underscores", "200", "X_Real_IP: 1.2.3.4\r\n"},
	} {
		l.add("field", tc[0], tc[1], "GET / HTTP/1.1\r\nHost: a.example\r\n"+tc[2]+"\r\n")
		if tc[1] == "400" {
			l.add("field first", tc[0], tc[1], "GET / HTTP/1.1\r\n"+tc[2]+"Host: a.example\r\n\r\n")
		}
	}
	l.add("field", "header ends with LF", "400", "GET / HTTP/1.1\r\nHost: a.example\r\n\n")
	l.add("field", "header ends with LF LF", "400", "GET / HTTP/1.1\r\nHost: a.example\n\n"+second)
	l.add("field", "header ends with CR", "400", "GET / HTTP/1.1\r\nHost: a.example\r\n\r\r\n\r\n")
}

func (l *list) lengths() {
	for _, tc := range [][3]string{
		{"3", "200", "Content-Length: 3\r\n"},
		{"003", "200", "Content-Length: 003\r\n"},
		{"capitals", "200", "CONTENT-LENGTH: 3\r\n"},
		{"spaces", "200", "Content-Length:  3  \r\n"},
		{"twice", "400", "Content-Length: 3\r\nContent-Length: 3\r\n"},
		{"two values", "400", "Content-Length: 3\r\nContent-Length: 5\r\n"},
		{"list", "400", "Content-Length: 3, 3\r\n"},
		{"list of two", "400", "Content-Length: 3,5\r\n"},
		{"plus", "400", "Content-Length: +3\r\n"},
		{"minus", "400", "Content-Length: -3\r\n"},
		{"minus zero", "400", "Content-Length: -0\r\n"},
		{"hexadecimal", "400", "Content-Length: 0x3\r\n"},
		{"fraction", "400", "Content-Length: 3.0\r\n"},
		{"exponent", "400", "Content-Length: 3e0\r\n"},
		{"letter behind", "400", "Content-Length: 3a\r\n"},
		{"letter before", "400", "Content-Length: a3\r\n"},
		{"space within", "400", "Content-Length: 3 3\r\n"},
		{"empty", "400", "Content-Length:\r\n"},
		{"blank", "400", "Content-Length: \t\r\n"},
		{"quoted", "400", "Content-Length: \"3\"\r\n"},
		{"underscore", "400", "Content-Length: 1_0\r\n"},
		{"other digits", "400", "Content-Length: \xd9\xa3\r\n"},
		{"vertical tab", "400", "Content-Length:\x0b3\r\n"},
		{"NUL behind", "400", "Content-Length: 3\x00\r\n"},
		{"semicolon", "400", "Content-Length: 3;x\r\n"},
		{"beyond 64 bits", "400", "Content-Length: 18446744073709551619\r\n"},
		{"beyond 63 bits", "400", "Content-Length: 9223372036854775808\r\n"},
		{"very long", "400", "Content-Length: " + strings.Repeat("0", 30) + "3\r\n"},
		{"space before the colon", "400", "Content-Length : 3\r\n"},
		{"folded", "400", "Content-Length:\r\n 3\r\n"},
		{"folded behind", "400", "Content-Length: 3\r\n 5\r\n"},
		{"with another name", "400", "Content-Length: 3\r\nContent_Length : 5\r\n"},
	} {
		l.add("length", tc[0], tc[1], "POST / HTTP/1.1\r\nHost: a.example\r\n"+tc[2]+"\r\nabc")
	}
	l.add("length", "of GET", "200 200", "GET / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 3\r\n\r\nabcGET /next HTTP/1.1\r\nHost: a.example\r\n\r\n")
	l.add("length", "request within a body", "200", "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: "+fmt.Sprint(len(second))+"\r\n\r\n"+second)
	l.add("length", "0 and a second", "200 200", "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 0\r\n\r\nGET /next HTTP/1.1\r\nHost: a.example\r\n\r\n")
	l.add("length", "two values and a second", "400", "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 0\r\nContent-Length: "+fmt.Sprint(len(second))+"\r\n\r\n"+second)
	l.add("length", "body too short", "400", "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 10\r\n\r\nabc")
	l.add("length", "named by Connection", "200", "POST / HTTP/1.1\r\nHost: a.example\r\nConnection: Content-Length\r\nContent-Length: "+fmt.Sprint(len(second))+"\r\n\r\n"+second)
}

func (l *list) codings() {
	const body = "3\r\nabc\r\n0\r\n\r\n"
	for _, tc := range [][3]string{
		{"chunked", "200", "Transfer-Encoding: chunked\r\n"},
		{"capitals", "200", "TRANSFER-ENCODING: CHUNKED\r\n"},
		{"spaces", "200", "Transfer-Encoding:  chunked \r\n"},
		{"twice", "400", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"},
		{"list twice", "400", "Transfer-Encoding: chunked, chunked\r\n"},
		{"and identity", "400", "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n"},
		{"identity and", "400", "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n"},
		{"list with identity", "400", "Transfer-Encoding: identity, chunked\r\n"},
		{"identity", "400", "Transfer-Encoding: identity\r\n"},
		{"gzip, chunked", "501", "Transfer-Encoding: gzip, chunked\r\n"},
		{"chunked, gzip", "400", "Transfer-Encoding: chunked, gzip\r\n"},
		{"gzip", "400", "Transfer-Encoding: gzip\r\n"},
		{"empty", "400", "Transfer-Encoding:\r\n"},
		{"comma before", "400", "Transfer-Encoding: ,chunked\r\n"},
		{"comma behind", "400", "Transfer-Encoding: chunked,\r\n"},
		{"xchunked", "400", "Transfer-Encoding: xchunked\r\n"},
		{"chunkedx", "400", "Transfer-Encoding: chunkedx\r\n"},
		{"chunk", "400", "Transfer-Encoding: chunk\r\n"},
		{"quoted", "400", "Transfer-Encoding: \"chunked\"\r\n"},
		{"apostrophes", "400", "Transfer-Encoding: 'chunked'\r\n"},
		{"parameter", "400", "Transfer-Encoding: chunked;q=1\r\n"},
		{"space within", "400", "Transfer-Encoding: chun ked\r\n"},
		{"vertical tab before", "400", "Transfer-Encoding: \x0bchunked\r\n"},
		{"form feed behind", "400", "Transfer-Encoding: chunked\x0c\r\n"},
		{"NUL behind", "400", "Transfer-Encoding: chunked\x00\r\n"},
		{"high byte", "400", "Transfer-Encoding: \xffchunked\r\n"},
		{"folded", "400", "Transfer-Encoding:\r\n chunked\r\n"},
		{"folded behind", "400", "Transfer-Encoding: chunked\r\n x\r\n"},
		{"space before the colon", "400", "Transfer-Encoding : chunked\r\n"},
		{"tab before the colon", "400", "Transfer-Encoding\t: chunked\r\n"},
		{"behind a bare LF", "400", "A: b\nTransfer-Encoding: chunked\r\n"},
		{"behind a bare CR", "400", "A: b\rTransfer-Encoding: chunked\r\n"},
		{"with length", "400", "Content-Length: 13\r\nTransfer-Encoding: chunked\r\n"},
		{"before length", "400", "Transfer-Encoding: chunked\r\nContent-Length: 13\r\n"},
		{"identity with length", "400", "Transfer-Encoding: identity\r\nContent-Length: 13\r\n"},
		{"obfuscated with length", "400", "Transfer-Encoding: xchunked\r\nContent-Length: 13\r\n"},
		{"named by Connection", "200", "Connection: Transfer-Encoding\r\nTransfer-Encoding: chunked\r\n"},
	} {
		l.add("coding", tc[0], tc[1], "POST / HTTP/1.1\r\nHost: a.example\r\n"+tc[2]+"\r\n"+body)
	}
	l.add("coding", "in HTTP/1.0", "400", "POST / HTTP/1.0\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n"+body)
	l.add("coding", "CL.TE", "400", "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: "+fmt.Sprint(len("0\r\n\r\n"+second))+"\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"+second)
	l.add("coding", "TE.CL", "400", "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"+fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(second), second))
	l.add("coding", "TE.TE", "400", "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\nTransfer-encoding: cow\r\n\r\n"+fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(second), second))
	l.add("coding", "CL.0", "200 200", "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 5\r\n\r\nabcdeGET /next HTTP/1.1\r\nHost: a.example\r\n\r\n")
	l.add("coding", "of GET", "200", "GET / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n"+body)
}

func (l *list) chunks() {
	for _, tc := range [][3]string{
		{"one", "200", "3\r\nabc\r\n0\r\n\r\n"},
		{"none", "200", "0\r\n\r\n"},
		{"capitals", "200", "A\r\n0123456789\r\n0\r\n\r\n"},
		{"zeros before", "200", "0003\r\nabc\r\n0\r\n\r\n"},
		{"last of many zeros", "200", "3\r\nabc\r\n000\r\n\r\n"},
		{"extension", "200", "3;a\r\nabc\r\n0\r\n\r\n"},
		{"extension with value", "200", "3;a=b;c=\"d e\"\r\nabc\r\n0\r\n\r\n"},
		{"trailer", "200", "3\r\nabc\r\n0\r\nX-Sum: 1\r\n\r\n"},
		{"no size", "400", "\r\nabc\r\n0\r\n\r\n"},
		{"no number", "400", "x\r\nabc\r\n0\r\n\r\n"},
		{"0x", "400", "0x3\r\nabc\r\n0\r\n\r\n"},
		{"plus", "400", "+3\r\nabc\r\n0\r\n\r\n"},
		{"minus", "400", "-3\r\nabc\r\n0\r\n\r\n"},
		{"space before", "400", " 3\r\nabc\r\n0\r\n\r\n"},
		{"space behind", "400", "3 \r\nabc\r\n0\r\n\r\n"},
		{"tab behind", "400", "3\t\r\nabc\r\n0\r\n\r\n"},
		{"NUL behind", "400", "3\x00\r\nabc\r\n0\r\n\r\n"},
		{"underscore", "400", "1_0\r\nabc\r\n0\r\n\r\n"},
		{"fraction", "400", "3.0\r\nabc\r\n0\r\n\r\n"},
		{"comma", "400", "3,3\r\nabc\r\n0\r\n\r\n"},
		{"size ends with LF", "400", "3\nabc\r\n0\r\n\r\n"},
		{"size ends with CR", "400", "3\rabc\r\n0\r\n\r\n"},
		{"size ends with CR CR LF", "400", "3\r\r\nabc\r\n0\r\n\r\n"},
		{"size in 16 digits", "400", "0000000000000003\r\nabc\r\n0\r\n\r\n"},
		{"size beyond 64 bits", "400", "10000000000000003\r\nabc\r\n0\r\n\r\n"},
		{"size of 64 bits", "400", "ffffffffffffffff\r\nabc\r\n0\r\n\r\n"},
		{"data too long", "400", "3\r\nabcd\r\n0\r\n\r\n"},
		{"data too short", "400", "4\r\nabc\r\n0\r\n\r\n"},
		{"data ends with LF", "400", "3\r\nabc\n0\r\n\r\n"},
		{"data ends with CR", "400", "3\r\nabc\r0\r\n\r\n"},
		{"data ends with XX", "400", "3\r\nabcXX0\r\n\r\n"},
		{"data ends with nothing", "400", "3\r\nabc0\r\n\r\n"},
		{"extension without name", "400", "3;\r\nabc\r\n0\r\n\r\n"},
		{"extension with LF", "400", "3;a\nb\r\nabc\r\n0\r\n\r\n"},
		{"extension with CR", "400", "3;a\rb\r\nabc\r\n0\r\n\r\n"},
		{"extension with NUL", "400", "3;a\x00\r\nabc\r\n0\r\n\r\n"},
		{"extension with an open quotation", "400", "3;a=\"b\r\nabc\r\n0\r\n\r\n"},
		{"extension with LF in quotation", "400", "3;a=\"\nb\"\r\nabc\r\n0\r\n\r\n"},
		{"extension after space", "400", "3 ;a\r\nabc\r\n0\r\n\r\n"},
		{"extension too long", "400", "3;a=" + strings.Repeat("b", 1000) + "\r\nabc\r\n0\r\n\r\n"},
		{"last without end", "400", "3\r\nabc\r\n0\r\n"},
		{"last ends with LF", "400", "3\r\nabc\r\n0\n\n"},
		{"last and LF", "400", "3\r\nabc\r\n0\r\n\n"},
		{"no last", "400", "3\r\nabc\r\n"},
		{"trailer with Content-Length", "400", "0\r\nContent-Length: 5\r\n\r\n"},
		{"trailer with Transfer-Encoding", "400", "0\r\nTransfer-Encoding: chunked\r\n\r\n"},
		{"trailer with Host", "400", "0\r\nHost: b.example\r\n\r\n"},
		{"trailer with space before the colon", "400", "0\r\nA : b\r\n\r\n"},
		{"trailer folded", "400", "0\r\nA: b\r\n c\r\n\r\n"},
		{"trailer with bare LF", "400", "0\r\nA: b\n\r\n"},
		{"trailer with NUL", "400", "0\r\nA: \x00\r\n\r\n"},
		{"trailer without colon", "400", "0\r\nabc\r\n\r\n"},
		{"request as trailer", "400", "0\r\n" + second},
	} {
		l.add("chunk", tc[0], tc[1], "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n"+tc[2])
	}
	l.add("chunk", "and a second request", "200 200", "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\nGET /next HTTP/1.1\r\nHost: a.example\r\n\r\n")
	l.add("chunk", "request within", "200", "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n"+fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(second), second))
}

func (l *list) connections() {
	for _, tc := range [][3]string{
		{"close", "200", "Connection: close\r\n"},
		{"names Host", "200", "Connection: Host\r\n"},
		{"names X-Forwarded-For", "200", "Connection: X-Forwarded-For\r\nX-Forwarded-For: 1.2.3.4\r\n"},
		{"upgrade to h2c", "200", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"},
		{"upgrade to h2c among others", "200", "Connection: Upgrade\r\nUpgrade: websocket, h2c\r\n"},
		{"upgrade without Connection", "200", "Upgrade: websocket\r\n"},
		{"upgrade twice", "400", "Connection: Upgrade\r\nUpgrade: a\r\nUpgrade: b\r\n"},
		{"expectation", "417", "Expect: the-moon\r\n"},
		{"TE", "200", "TE: trailers\r\nConnection: TE\r\n"},
		{"Keep-Alive", "200", "Keep-Alive: timeout=5\r\n"},
		{"Proxy-Connection", "200", "Proxy-Connection: keep-alive\r\n"},
	} {
		l.add("connection", tc[0], tc[1], "GET / HTTP/1.1\r\nHost: a.example\r\n"+tc[2]+"\r\n")
	}
	l.add("connection", "close and a second", "200", "GET / HTTP/1.1\r\nHost: a.example\r\nConnection: close\r\n\r\n"+second)
	l.add("connection", "keep-alive, close and a second", "200", "GET / HTTP/1.1\r\nHost: a.example\r\nConnection: keep-alive, close\r\n\r\n"+second)
	l.add("connection", "HTTP/1.0 and a second", "200", "GET / HTTP/1.0\r\nHost: a.example\r\n\r\n"+second)
	l.add("connection", "pipelined", "200 200 200", strings.Repeat("GET / HTTP/1.1\r\nHost: a.example\r\n\r\n", 3))
	l.add("connection", "second is bad", "200 400", "GET / HTTP/1.1\r\nHost: a.example\r\n\r\nGET / HTTP/1.1\r\nHost : a.example\r\n\r\n")
	l.add("connection", "bad one ends it", "400", "GET / HTTP/1.1\r\nHost : a.example\r\n\r\n"+second)
}

func (l *list) sizes() {
	long := strings.Repeat("a", 100_000)
	l.add("size", "target of 4,000", "200", "GET /"+long[:4000]+" HTTP/1.1\r\nHost: a.example\r\n\r\n")
	l.add("size", "target of 100,000", "414", "GET /"+long+" HTTP/1.1\r\nHost: a.example\r\n\r\n")
	l.add("size", "field of 7,000", "200", "GET / HTTP/1.1\r\nHost: a.example\r\nA: "+long[:7000]+"\r\n\r\n")
	l.add("size", "field of 100,000", "431", "GET / HTTP/1.1\r\nHost: a.example\r\nA: "+long+"\r\n\r\n")
	l.add("size", "100 fields", "200", "GET / HTTP/1.1\r\nHost: a.example\r\n"+strings.Repeat("A: b\r\n", 90)+"\r\n")
	l.add("size", "1,000 fields", "431", "GET / HTTP/1.1\r\nHost: a.example\r\n"+strings.Repeat("A: b\r\n", 1000)+"\r\n")
	l.add("size", "name of 100,000", "431", "GET / HTTP/1.1\r\nHost: a.example\r\n"+long+": b\r\n\r\n")
	l.add("size", "method of 100,000", "414", long+" / HTTP/1.1\r\nHost: a.example\r\n\r\n")
	l.add("size", "trailer of 100,000", "431", "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: "+long+"\r\n\r\n")
	l.add("size", "100,000 tiny chunks", "400", "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n"+strings.Repeat("1;abcdefghijklmnopqrst\r\na\r\n", 10_000)+"0\r\n\r\n")
}

func (l *list) paths() {
	for _, tc := range [][2]string{
		{"/a//b", "200"}, {"//", "200"}, {"/%61", "200"}, {"/a%2Fb", "200"}, {"/.well-known/x", "200"}, {"/a..b", "200"}, {"/?../", "200"},
		{"/./", "400"}, {"/..", "400"}, {"/a/../b", "400"}, {"/%2e%2e/b", "400"}, {"/a%2F..%2Fb", "400"}, {"/a/..;/b", "400"}, {"/a\\..\\b", "400"},
		{"/%", "400"}, {"/%g0", "400"}, {"/%00", "400"}, {"/..%5cb", "400"},
	} {
		l.add("path", tc[0], tc[1], "GET "+tc[0]+" HTTP/1.1\r\nHost: a.example\r\n\r\n")
	}
}
