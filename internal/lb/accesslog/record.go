// Package accesslog writes down who asked for what: one line for each request or connection, in the format of a classic ELB or as JSON,
// gathered into files that are put into a bucket at an interval. It knows nothing of how requests are served.
package accesslog

import (
	"crypto/tls"
	"encoding/json"
	"net/netip"
	"strconv"
	"time"

	"portal/internal/lb/config"
)

// Record is one request, or one connection that is not parsed.
type Record struct {
	// Time is when the client's request was complete or its connection accepted; the classic format wants the time of the answer, which
	// is Time and the three durations.
	Time     time.Time
	Balancer string
	Listener string
	Owner    config.Owner
	Client   netip.AddrPort
	Endpoint netip.AddrPort // invalid: none was reached
	// RequestTime is until the endpoint had the request, EndpointTime until it began to answer, ResponseTime until the client had the
	// begin of the answer. Negative: it did not come to that.
	RequestTime, EndpointTime, ResponseTime time.Duration
	// Duration is of the whole request or connection.
	Duration time.Duration
	// Status is what the client got, EndpointStatus what the endpoint said; 0: none.
	Status, EndpointStatus int
	Received, Sent         int64
	// Method, URL and Proto are empty for connections that are not parsed.
	Method, URL, Proto, UserAgent string
	TLSVersion, TLSSuite          uint16
	Retries                       int
	Tags                          map[string]string
}

// AppendELB appends a line in the format of a classic ELB.
func (r *Record) AppendELB(out []byte) []byte {
	at := r.Time
	for _, d := range []time.Duration{r.RequestTime, r.EndpointTime, r.ResponseTime} {
		if d > 0 {
			at = at.Add(d)
		}
	}
	out = at.UTC().AppendFormat(out, "2006-01-02T15:04:05.000000Z")
	out = append(out, ' ')
	out = appendWord(out, r.Balancer)
	out = append(out, ' ')
	out = r.Client.AppendTo(out)
	out = append(out, ' ')
	if r.Endpoint.IsValid() {
		out = r.Endpoint.AppendTo(out)
	} else {
		out = append(out, '-')
	}
	for _, d := range []time.Duration{r.RequestTime, r.EndpointTime, r.ResponseTime} {
		out = append(out, ' ')
		if d < 0 {
			out = append(out, "-1"...)
			continue
		}
		out = strconv.AppendFloat(out, d.Seconds(), 'f', 6, 64)
	}
	for _, status := range []int{r.Status, r.EndpointStatus} {
		out = append(out, ' ')
		switch {
		case r.Method == "":
			out = append(out, '-')
		default:
			out = strconv.AppendInt(out, int64(status), 10)
		}
	}
	out = append(out, ' ')
	out = strconv.AppendInt(out, r.Received, 10)
	out = append(out, ' ')
	out = strconv.AppendInt(out, r.Sent, 10)
	out = append(out, ' ', '"')
	if r.Method == "" {
		out = append(out, "- - - "...)
	} else {
		out = appendQuoted(out, r.Method)
		out = append(out, ' ')
		out = appendQuoted(out, r.URL)
		out = append(out, ' ')
		out = appendQuoted(out, r.Proto)
	}
	out = append(out, `" "`...)
	out = appendQuoted(out, orDash(r.UserAgent))
	out = append(out, `" `...)
	if r.TLSVersion == 0 {
		out = append(out, "- -"...)
	} else {
		out = append(out, suiteName(r.TLSSuite)...)
		out = append(out, ' ')
		out = append(out, versionName(r.TLSVersion)...)
	}
	return append(out, '\n')
}

// appendQuoted appends text of strangers within quotation marks: what could end the quotation or the line is escaped.
func appendQuoted(out []byte, s string) []byte {
	const digits = "0123456789abcdef"
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			out = append(out, '\\', c)
		case c < ' ' || c >= 0x7f:
			out = append(out, '\\', 'x', digits[c>>4], digits[c&15])
		default:
			out = append(out, c)
		}
	}
	return out
}

func appendWord(out []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c <= ' ' || c >= 0x7f {
			out = append(out, '_')
		} else {
			out = append(out, c)
		}
	}
	if s == "" {
		out = append(out, '-')
	}
	return out
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func versionName(v uint16) string {
	switch v {
	case tls.VersionTLS10:
		return "TLSv1"
	case tls.VersionTLS11:
		return "TLSv1.1"
	case tls.VersionTLS12:
		return "TLSv1.2"
	case tls.VersionTLS13:
		return "TLSv1.3"
	}
	return "-"
}

// openSSL are the names by which ELB knows the suites; those of TLS 1.3 are the same everywhere.
var openSSL = map[uint16]string{
	tls.TLS_RSA_WITH_RC4_128_SHA:                      "RC4-SHA",
	tls.TLS_RSA_WITH_3DES_EDE_CBC_SHA:                 "DES-CBC3-SHA",
	tls.TLS_RSA_WITH_AES_128_CBC_SHA:                  "AES128-SHA",
	tls.TLS_RSA_WITH_AES_256_CBC_SHA:                  "AES256-SHA",
	tls.TLS_RSA_WITH_AES_128_CBC_SHA256:               "AES128-SHA256",
	tls.TLS_RSA_WITH_AES_128_GCM_SHA256:               "AES128-GCM-SHA256",
	tls.TLS_RSA_WITH_AES_256_GCM_SHA384:               "AES256-GCM-SHA384",
	tls.TLS_ECDHE_ECDSA_WITH_RC4_128_SHA:              "ECDHE-ECDSA-RC4-SHA",
	tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA:          "ECDHE-ECDSA-AES128-SHA",
	tls.TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA:          "ECDHE-ECDSA-AES256-SHA",
	tls.TLS_ECDHE_RSA_WITH_RC4_128_SHA:                "ECDHE-RSA-RC4-SHA",
	tls.TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA:           "ECDHE-RSA-DES-CBC3-SHA",
	tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA:            "ECDHE-RSA-AES128-SHA",
	tls.TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA:            "ECDHE-RSA-AES256-SHA",
	tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256:       "ECDHE-ECDSA-AES128-SHA256",
	tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256:         "ECDHE-RSA-AES128-SHA256",
	tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256:         "ECDHE-RSA-AES128-GCM-SHA256",
	tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256:       "ECDHE-ECDSA-AES128-GCM-SHA256",
	tls.TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384:         "ECDHE-RSA-AES256-GCM-SHA384",
	tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384:       "ECDHE-ECDSA-AES256-GCM-SHA384",
	tls.TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256:   "ECDHE-RSA-CHACHA20-POLY1305",
	tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256: "ECDHE-ECDSA-CHACHA20-POLY1305",
}

func suiteName(id uint16) string {
	if name := openSSL[id]; name != "" {
		return name
	}
	return tls.CipherSuiteName(id)
}

// AppendJSON appends a line with the same as a JSON object.
func (r *Record) AppendJSON(out []byte) []byte {
	seconds := func(d time.Duration) float64 {
		if d < 0 {
			return -1
		}
		return d.Seconds()
	}
	line := struct {
		Time           string            `json:"time"`
		Balancer       string            `json:"balancer"`
		Listener       string            `json:"listener,omitempty"`
		Kind           string            `json:"kind,omitempty"`
		Namespace      string            `json:"namespace,omitempty"`
		Name           string            `json:"name,omitempty"`
		Client         string            `json:"client"`
		Endpoint       string            `json:"endpoint,omitempty"`
		RequestTime    float64           `json:"requestTime"`
		EndpointTime   float64           `json:"endpointTime"`
		ResponseTime   float64           `json:"responseTime"`
		Duration       float64           `json:"duration"`
		Status         int               `json:"status,omitempty"`
		EndpointStatus int               `json:"endpointStatus,omitempty"`
		Received       int64             `json:"received"`
		Sent           int64             `json:"sent"`
		Method         string            `json:"method,omitempty"`
		URL            string            `json:"url,omitempty"`
		Proto          string            `json:"proto,omitempty"`
		UserAgent      string            `json:"userAgent,omitempty"`
		TLSVersion     string            `json:"tlsVersion,omitempty"`
		TLSSuite       string            `json:"tlsSuite,omitempty"`
		Retries        int               `json:"retries,omitempty"`
		Tags           map[string]string `json:"tags,omitempty"`
	}{
		Time: r.Time.UTC().Format(time.RFC3339Nano), Balancer: r.Balancer, Listener: r.Listener, Kind: r.Owner.Kind, Namespace: r.Owner.Namespace, Name: r.Owner.Name,
		Client: r.Client.String(), RequestTime: seconds(r.RequestTime), EndpointTime: seconds(r.EndpointTime), ResponseTime: seconds(r.ResponseTime),
		Duration: seconds(r.Duration), Status: r.Status, EndpointStatus: r.EndpointStatus, Received: r.Received, Sent: r.Sent,
		Method: r.Method, URL: r.URL, Proto: r.Proto, UserAgent: r.UserAgent, Retries: r.Retries, Tags: r.Tags,
	}
	if r.Endpoint.IsValid() {
		line.Endpoint = r.Endpoint.String()
	}
	if r.TLSVersion != 0 {
		line.TLSVersion, line.TLSSuite = versionName(r.TLSVersion), tls.CipherSuiteName(r.TLSSuite)
	}
	data, err := json.Marshal(line)
	if err != nil {
		return out // strings and numbers: it can't happen
	}
	return append(append(out, data...), '\n')
}
