// Package report is what the benchmarks have in common: it collects what they measure, judges it against targets, shows
// ratios and writes JSON, from which bench/page makes docs/benchmarks.md. It also samples the memory and CPU time of
// processes. It knows no subject: what is measured, and what is promised about it, is each benchmark's own affair.
package report

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// Report is one run of one benchmark.
type Report struct {
	// Benchmark is its folder below bench; Title is a heading.
	Benchmark string `json:"benchmark"`
	Title     string `json:"title"`
	// Command is how it was started.
	Command string        `json:"command"`
	Started time.Time     `json:"started"`
	Took    time.Duration `json:"tookNanoseconds"`
	Machine Machine       `json:"machine"`
	// Commit is that of the working tree; it ends in "-dirty" if there were changes.
	Commit string `json:"commit,omitempty"`
	// Versions are what the programs say about themselves.
	Versions map[string]string `json:"versions,omitempty"`
	// Peers are what Own subjects are compared with, in the order of the table's columns.
	Peers []string `json:"peers"`
	Own   []string `json:"own"`
	// Notes are what a reader must know to understand the figures.
	Notes    []string  `json:"notes,omitempty"`
	Measures []Measure `json:"measures"`
	Targets  []Target  `json:"targets"`
	Met      bool      `json:"met"`
}

// Place is where something was measured: a situation, and a size such as a number of Services.
type Place struct {
	Situation string `json:"situation"`
	Size      int    `json:"size,omitempty"`
	SizeOf    string `json:"sizeOf,omitempty"`
}

func (p Place) String() string {
	if p.SizeOf == "" {
		return p.Situation
	}
	return fmt.Sprintf("%s, %s %s", p.Situation, thousands(p.Size), p.SizeOf)
}

// Measure is one figure of one subject.
type Measure struct {
	Place
	Name    string  `json:"name"`
	Subject string  `json:"subject"`
	Value   float64 `json:"value"`
	Unit    string  `json:"unit,omitempty"`
	// HigherIsBetter is true of rates; times, memory and CPU are better if lower.
	HigherIsBetter bool `json:"higherIsBetter,omitempty"`
}

// Target is something promised about a figure: how many times better than a peer's it is, or what it is at worst.
type Target struct {
	Place
	Name    string `json:"name"`
	Subject string `json:"subject"`
	// Peer is empty where the figure itself is judged.
	Peer string `json:"peer,omitempty"`
	// Want and Got are in the figure's unit, or times better than the peer.
	Want float64 `json:"want"`
	Got  float64 `json:"got"`
	// Text is Want in words.
	Text string `json:"text"`
	Met  bool   `json:"met"`
	// Missing says that there is no figure, for instance because the subject was not ready in time.
	Missing bool `json:"missing,omitempty"`
}

// New begins a report.
func New(benchmark, title string, peers, own []string) *Report {
	return &Report{
		Benchmark: benchmark, Title: title, Command: command(benchmark), Started: time.Now(), Machine: thisMachine(),
		Commit: commit(), Versions: map[string]string{}, Peers: peers, Own: own, Met: true,
	}
}

// command is this process' command line, as a reader would type it.
func command(benchmark string) string {
	out := "go run ./bench/" + benchmark
	for _, arg := range os.Args[1:] {
		out += " " + arg
	}
	return out
}

// Note adds a sentence that a reader must know.
func (r *Report) Note(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(r.Notes, text) {
		r.Notes = append(r.Notes, text)
	}
}

// At is where the next figures are measured.
func (r *Report) At(situation string, size int, sizeOf string) At {
	return At{r, Place{situation, size, sizeOf}}
}

// At adds figures and targets of one place to a report.
type At struct {
	r *Report
	Place
}

// Lower adds a figure that is better if it is lower.
func (a At) Lower(subject, name string, value float64, unit string) {
	a.r.Measures = append(a.r.Measures, Measure{Place: a.Place, Name: name, Subject: subject, Value: value, Unit: unit})
}

// Higher adds a figure that is better if it is higher.
func (a At) Higher(subject, name string, value float64, unit string) {
	a.r.Measures = append(a.r.Measures, Measure{a.Place, name, subject, value, unit, true})
}

// Find returns a figure.
func (r *Report) Find(p Place, name, subject string) (Measure, bool) {
	for _, m := range r.Measures {
		if m.Place == p && m.Name == name && m.Subject == subject {
			return m, true
		}
	}
	return Measure{}, false
}

// Ratio is how many times better a subject's figure is than a peer's: above 1 it is better, below 1 worse.
func (r *Report) Ratio(p Place, name, subject, peer string) (float64, bool) {
	own, ok := r.Find(p, name, subject)
	theirs, there := r.Find(p, name, peer)
	if !ok || !there || own.Value <= 0 || theirs.Value <= 0 {
		return 0, false
	}
	if own.HigherIsBetter {
		return own.Value / theirs.Value, true
	}
	return theirs.Value / own.Value, true
}

// WantTimes judges how many times better than a peer's figure one must be. Without the peer nothing is judged; without
// the subject's own figure the target is missed.
func (a At) WantTimes(subject, name, peer string, times float64) {
	if _, there := a.r.Find(a.Place, name, peer); !there {
		return
	}
	text := fmt.Sprintf("at least %s× %s", number(times), peer)
	if times == 1 {
		text = "no worse than " + peer
	}
	got, ok := a.r.Ratio(a.Place, name, subject, peer)
	if _, there := a.r.Find(a.Place, name, subject); there && !ok {
		return // a zero: there is nothing to compare
	}
	a.judge(Target{Name: name, Subject: subject, Peer: peer, Want: times, Got: got, Text: text, Met: got >= times, Missing: !ok})
}

// WantWithin judges that a figure is no worse than a limit, in its own unit.
func (a At) WantWithin(subject, name string, limit float64) {
	m, ok := a.r.Find(a.Place, name, subject)
	t := Target{Name: name, Subject: subject, Want: limit, Got: m.Value, Missing: !ok}
	if m.HigherIsBetter {
		t.Text, t.Met = "at least "+number(limit)+unit(m.Unit), ok && m.Value >= limit
	} else {
		t.Text, t.Met = "at most "+number(limit)+unit(m.Unit), ok && m.Value <= limit
	}
	a.judge(t)
}

func (a At) judge(t Target) {
	t.Place = a.Place
	a.r.Targets = append(a.r.Targets, t)
	a.r.Met = a.r.Met && t.Met
}

// Finish prints the tables and, if there is a file, writes the report to it. It returns whether every target was met.
func (r *Report) Finish(file string) (bool, error) {
	r.Took = time.Since(r.Started)
	r.WriteTable(os.Stdout)
	if file == "" {
		return r.Met, nil
	}
	return r.Met, r.Save(file)
}

// Save writes the report as JSON.
func (r *Report) Save(file string) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, append(data, '\n'), 0o644)
}

// Load reads what Save wrote.
func Load(file string) (*Report, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	r := &Report{}
	if err := json.Unmarshal(data, r); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if r.Benchmark == "" {
		return nil, fmt.Errorf("%s: is not a benchmark's report (run the benchmark with -o %s)", file, file)
	}
	return r, nil
}
