package main

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"
)

// result is what was measured of one proxy in one mode. Times are in seconds where the name says nothing, else in
// milliseconds; memory is in MB.
type result struct {
	Who      string `json:"who"`
	Mode     string `json:"mode"`
	Services int    `json:"services"`
	// CutOff: it was not ready when the patience ended; the rest is not measured.
	CutOff bool `json:"cutOff,omitempty"`

	FullSync  float64 `json:"fullSyncSeconds"`
	Syncs     int     `json:"syncs"`
	Start     float64 `json:"startToLastServiceSeconds"`
	Change    float64 `json:"endpointChangedMs"`
	ChangeP99 float64 `json:"endpointChangedP99Ms"`
	// Kernel is what the kernel alone takes to accept a rule.
	Kernel       float64 `json:"ruleAcceptedMs,omitempty"`
	FirstByte    float64 `json:"firstByteMs"`
	FirstByteAny float64 `json:"firstByteOfAnyMs"`
	FirstByteP99 float64 `json:"firstByteP99Ms"`
	Direct       float64 `json:"directMs"`
	DirectP99    float64 `json:"directP99Ms"`
	Churn        float64 `json:"churnMs,omitempty"`
	ChurnP99     float64 `json:"churnP99Ms,omitempty"`
	ChurnCPU     float64 `json:"churnCPU,omitempty"`
	Memory       float64 `json:"memoryMB"`
	MemoryPeak   float64 `json:"memoryPeakMB"`
	// MemoryBusy is that of the moment after a row of changes; Memory is that after a row of connections, which the kernel
	// makes without the proxy.
	MemoryBusy float64 `json:"memoryBusyMB"`
}

func (r *result) String() string {
	if r.CutOff {
		return "was not ready in time"
	}
	kernel := ""
	if r.Kernel > 0 {
		kernel = fmt.Sprintf(" of which the kernel %.2f", r.Kernel)
	}
	return fmt.Sprintf("sync %.3f s (%d), start %.3f s, change %.2f ms (p99 %.2f)%s, first byte %.3f ms (any Service %.3f, direct %.3f), %.0f MB, churn p99 %.1f ms at %.0f %% CPU",
		r.FullSync, r.Syncs, r.Start, r.Change, r.ChangeP99, kernel, r.FirstByte, r.FirstByteAny, r.Direct, r.Memory, r.ChurnP99, 100*r.ChurnCPU)
}

// overDirect is what the first byte takes, as a multiple of what it takes without a proxy in the same seconds. Two medians of
// the same thing still differ by some percent here.
func (r *result) overDirect() float64 { return r.FirstByte / r.Direct }

type report struct {
	Started   time.Time `json:"started"`
	Endpoints int       `json:"endpoints"`
	Results   []*result `json:"results"`
	Relays    []relay   `json:"relays,omitempty"`
	Verdicts  []verdict `json:"verdicts"`
	Met       bool      `json:"met"`
}

// verdict is about one promise.
type verdict struct {
	What   string  `json:"what"`
	Value  float64 `json:"value"`
	Target string  `json:"target"`
	Met    bool    `json:"met"`
}

func (r *report) of(who, mode string, services int) *result {
	for _, x := range r.Results {
		if x.Who == who && x.Mode == mode && x.Services == services {
			return x
		}
	}
	return nil
}

// goals are how many times as fast a mode has to be: full sync, start and one change.
var goals = map[string]struct{ sync, start, change float64 }{
	"nftables": {50, 8, 50},
	"iptables": {30, 0, 15},
	"ipvs":     {2, 0, 0},
}

// defaultMode is the one that the promise about steady changes is for.
const defaultMode = "nftables"

// The promises about a sync and memory are for at least syncPromisedAt Services, those about changes for promisedAt.
const syncPromisedAt, promisedAt = 1000, 10000

// judge compares Portal's results with kube-proxy's of the same round.
func (r *report) judge() {
	r.Met = true
	for _, own := range r.Results {
		if own.Who != portal {
			continue
		}
		at := fmt.Sprintf("%s, %d Services: ", own.Mode, own.Services)
		if own.CutOff {
			r.add(at+"ready in time", 0, "yes", false)
			continue
		}
		if own.ChurnP99 > 0 && own.Mode == defaultMode && own.Services >= promisedAt {
			r.add(at+"endpoint reached under 20 changes/s, p99 ms", own.ChurnP99, "< 100", own.ChurnP99 < 100)
		}
		if peer := r.of(kube, own.Mode, own.Services); peer != nil && !peer.CutOff {
			r.compare(at, own, peer)
		}
		r.flat(at, own)
	}
	r.judgeRelays()
}

func (r *report) compare(at string, own, peer *result) {
	atLeast := func(what string, ratio, goal float64) {
		r.add(at+what, ratio, fmt.Sprintf(">= %g", goal), ratio >= goal)
	}
	goal, ipvs := goals[own.Mode], own.Mode == "ipvs"
	share := own.Memory / peer.Memory
	if own.Services >= syncPromisedAt || ipvs {
		atLeast("full sync, times as fast", peer.FullSync/own.FullSync, goal.sync)
		atLeast("start to last Service, times as fast", peer.Start/own.Start, goal.start)
		r.add(at+"memory, share", share, "<= 0.33", share <= 1.0/3)
	} else {
		// Of few Services, most is what either process takes before the first of them.
		r.note(at+"full sync, times as fast", peer.FullSync/own.FullSync)
		r.note(at+"start to last Service, times as fast", peer.Start/own.Start)
		r.note(at+"memory, share", share)
	}
	r.note(at+"memory right after changes, share", own.MemoryBusy/peer.MemoryBusy)
	if own.Services >= promisedAt || ipvs {
		atLeast("endpoint changed, times as fast", peer.Change/own.Change, goal.change)
	} else {
		r.note(at+"endpoint changed, times as fast", peer.Change/own.Change)
	}
	share = own.overDirect() / peer.overDirect()
	r.add(at+"first byte, share", share, "<= 1.05", share <= 1.05)
	r.note(at+"first byte, times that of a direct connection", own.overDirect())
}

// flat sees that more Services make nothing slower.
func (r *report) flat(at string, own *result) {
	first := own
	for _, x := range r.Results {
		if x.Who == portal && x.Mode == own.Mode && x.Services < first.Services && !x.CutOff {
			first = x
		}
	}
	if first == own {
		return
	}
	growth := own.Change / first.Change
	what := fmt.Sprintf("%sendpoint changed, times that of %d Services", at, first.Services)
	r.add(what, growth, "<= 2", growth <= 2)
	if own.Kernel > 0 {
		// Whoever changes a rule, the kernel goes through all that packets can reach.
		r.note(fmt.Sprintf("%swithout what the kernel takes for any one rule (%.2f ms)", at, own.Kernel),
			(own.Change-own.Kernel)/(first.Change-first.Kernel))
	}
	if own.Mode == "nftables" {
		growth = own.overDirect() / first.overDirect()
		r.add(fmt.Sprintf("%sfirst byte, times that of %d Services", at, first.Services), growth, "<= 1.05", growth <= 1.05)
	}
}

func (r *report) judgeRelays() {
	if len(r.Relays) != 3 {
		return
	}
	peer, own := r.Relays[1], r.Relays[2]
	share := own.share(&peer, relay.throughput)
	r.add("userspace: throughput, share of HAProxy's", share, ">= 1", share >= 1)
	share = own.share(&peer, relay.rate)
	r.add("userspace: connections a second, share of HAProxy's", share, ">= 0.7", share >= 0.7)
}

func (r *report) add(what string, value float64, target string, met bool) {
	r.Verdicts = append(r.Verdicts, verdict{what, value, target, met})
	r.Met = r.Met && met
}

// note is something to know that nothing is promised about.
func (r *report) note(what string, value float64) {
	r.Verdicts = append(r.Verdicts, verdict{what, value, "told", true})
}

func (r *report) writeJSON(out io.Writer) error {
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

func (r *report) writeTable(out io.Writer) {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', tabwriter.AlignRight)
	if len(r.Results) > 0 {
		fmt.Fprintln(w, "mode\tServices\twho\tfull sync s\tstart s\tchange ms\tp99\tfirst byte ms\tany\tdirect\tMB\tchurn p99 ms\tCPU\t")
	}
	for _, x := range r.Results {
		if x.CutOff {
			fmt.Fprintf(w, "%s\t%d\t%s\tcut off\t\t\t\t\t\t\t\t\t\t\n", x.Mode, x.Services, x.Who)
			continue
		}
		fmt.Fprintf(w, "%s\t%d\t%s\t%.3f\t%.2f\t%.2f\t%.2f\t%.3f\t%.3f\t%.3f\t%.0f\t%.1f\t%.0f %%\t\n", x.Mode, x.Services, x.Who,
			x.FullSync, x.Start, x.Change, x.ChangeP99, x.FirstByte, x.FirstByteAny, x.Direct, x.Memory, x.ChurnP99, 100*x.ChurnCPU)
	}
	_ = w.Flush()
	for _, x := range r.Relays {
		fmt.Fprintf(out, "%s   %.2f and %.2f of the limit\n", &x, x.share(&r.Relays[0], relay.throughput), x.share(&r.Relays[0], relay.rate))
	}
	fmt.Fprintln(out)
	for _, v := range r.Verdicts {
		word := "met   "
		if !v.Met {
			word = "MISSED"
		}
		fmt.Fprintf(out, "%s  %-72s %8.2f  (%s)\n", word, v.What, v.Value, v.Target)
	}
}
