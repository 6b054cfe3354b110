package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// result is what was measured of one server with one number of clients. Times are milliseconds, memory is megabytes.
type result struct {
	Server  string `json:"server"`
	Clients int    `json:"clients"`

	PerSecond    float64 `json:"servicesPerSecond"`
	Failed       int64   `json:"failedRequests"`
	FirstFailure string  `json:"firstFailure,omitempty"`
	// Few and Many are creates while there are fewServices and all of them.
	Few   spread  `json:"createFew"`
	Many  spread  `json:"createMany"`
	Curve []point `json:"curve"`

	// CPU is for a Service with its slice; Memory is that of the process after the last of them.
	CPU        float64 `json:"serverCPUms"`
	EtcdCPU    float64 `json:"etcdCPUms"`
	ClientCPU  float64 `json:"clientCPUms"`
	Memory     float64 `json:"serverMemoryMB"`
	MemoryPeak float64 `json:"serverMemoryPeakMB"`
	// MemoryPrivate is Memory without the pages of files, such as the program itself.
	MemoryPrivate float64 `json:"serverMemoryPrivateMB"`
	EtcdMemory    float64 `json:"etcdMemoryMB"`

	Lists *lists   `json:"lists,omitempty"`
	Watch *watches `json:"watch,omitempty"`
}

// report is everything that was measured and what is to be thought of it.
type report struct {
	Started  time.Time `json:"started"`
	Services int       `json:"services"`
	Samples  int       `json:"samples"`
	Watchers int       `json:"watchers"`
	Results  []*result `json:"results"`
	Verdicts []verdict `json:"verdicts"`
	Met      bool      `json:"met"`
}

// verdict is about one target of one of Portal's servers.
type verdict struct {
	Server  string  `json:"server"`
	Clients int     `json:"clients"`
	Measure string  `json:"measure"`
	Value   float64 `json:"value"`
	Target  string  `json:"target"`
	Met     bool    `json:"met"`
}

// of finds a result; nil if it was not measured.
func (r *report) of(server string, clients int) *result {
	for _, one := range r.Results {
		if one.Server == server && one.Clients == clients {
			return one
		}
	}
	return nil
}

func (r *report) clients() []int {
	var out []int
	for _, one := range r.Results {
		if !slices.Contains(out, one.Clients) {
			out = append(out, one.Clients)
		}
	}
	return out
}

// judge compares Portal with kube-apiserver and with what was promised.
func (r *report) judge() {
	r.Met = true
	for _, clients := range r.clients() {
		peer := r.of(kubernetes, clients)
		for _, m := range measures(r) {
			for _, server := range []string{portal, portalEmbedded} {
				own := r.of(server, clients)
				if own == nil || m.target == nil || !m.applies(own) {
					continue
				}
				value, known := m.target.value(m, own, peer)
				if !known {
					continue
				}
				v := verdict{
					Server: server, Clients: clients, Measure: m.name, Value: value,
					Target: m.target.text, Met: m.target.met(value),
				}
				r.Verdicts = append(r.Verdicts, v)
				r.Met = r.Met && v.Met
			}
		}
	}
}

// verdict finds the one on a measure; nil if there is none.
func (r *report) verdict(server string, clients int, measure string) *verdict {
	for i := range r.Verdicts {
		if v := &r.Verdicts[i]; v.Server == server && v.Clients == clients && v.Measure == measure {
			return v
		}
	}
	return nil
}

func (r *report) writeJSON(out io.Writer) error {
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// writeTable shows a block for each number of clients: a line a figure, a column a server.
func (r *report) writeTable(out io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "\nServices with an EndpointSlice each, from none to %d; ×: compared with %s\n", r.Services, kubernetes)
	for _, clients := range r.clients() {
		fmt.Fprintf(&b, "\n%-40s", fmt.Sprintf("%d clients", clients))
		for _, server := range allServers() {
			if r.of(server, clients) != nil {
				fmt.Fprintf(&b, " %24s", server)
			}
		}
		b.WriteString("  target\n")
		for _, m := range measures(r) {
			r.writeMeasure(&b, m, clients)
		}
	}
	if missed := r.missed(); len(missed) > 0 {
		fmt.Fprintf(&b, "\nMissed: %s\n", strings.Join(missed, "; "))
	} else if len(r.Verdicts) > 0 {
		b.WriteString("\nAll targets met.\n")
	}
	for _, one := range r.Results {
		if one.FirstFailure != "" {
			fmt.Fprintf(&b, "First failure of %s, %d clients: %s\n", one.Server, one.Clients, one.FirstFailure)
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}

func (r *report) writeMeasure(b *strings.Builder, m measurement, clients int) {
	peer := r.of(kubernetes, clients)
	line := fmt.Sprintf("  %-38s", m.name)
	any := false
	for _, server := range allServers() {
		own := r.of(server, clients)
		if own == nil {
			continue
		}
		cell := ""
		if m.has(own) {
			any = true
			cell = fmt.Sprintf(m.format, m.of(own))
			if own != peer && peer != nil && m.has(peer) && m.of(peer) > 0 && m.compared {
				cell += fmt.Sprintf(" %6.2f×", m.of(own)/m.of(peer))
			} else {
				cell += "        "
			}
			if v := r.verdict(server, clients, m.name); v != nil {
				cell += map[bool]string{true: " ok", false: " NO"}[v.Met]
			} else {
				cell += "   "
			}
		}
		line += fmt.Sprintf(" %24s", cell)
	}
	if !any {
		return
	}
	if m.target != nil {
		line += "  " + m.target.text
	}
	b.WriteString(strings.TrimRight(line, " ") + "\n")
}

func (r *report) missed() []string {
	var out []string
	for _, v := range r.Verdicts {
		if !v.Met {
			out = append(out, fmt.Sprintf("%s of %s with %d clients is %.2f, not %s", v.Measure, v.Server, v.Clients, v.Value, v.Target))
		}
	}
	return out
}
