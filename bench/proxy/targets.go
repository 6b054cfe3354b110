package main

import "portal/bench/report"

// promisedAt is how many Services the targets of starts, changes and memory are for: with few of them most is what either
// process takes before the first.
const promisedAt = 10_000

// goals are how many times better a mode has to be than the same of kube-proxy; 0: nothing is promised.
var goals = map[string]struct{ start, change, memory float64 }{
	"nftables": {30, 50, 3},
	"iptables": {30, 15, 3},
}

// judge compares Portal with kube-proxy in the same place, and with itself where there are fewest Services.
func judge(at, fewest report.At, r *report.Report, o options, mode string) {
	goal := goals[mode]
	if at.Size >= promisedAt {
		for _, situation := range o.situations {
			times(at, startName[situation], goal.start)
		}
		times(at, changeLatency, goal.change)
		times(at, report.AnonymousSteady, goal.memory)
	}
	if mode == "nftables" && at.Size >= promisedAt && o.churn > 0 {
		at.WantWithin(portal, churnP99, 100)
	}
	// Two medians of the same thing differ by some percent here.
	at.WantTimes(portal, firstByte, kube, 0.95)
	if fewest.Place == at.Place {
		return
	}
	grows(r, at, fewest, changeLatency, changeGrowth, 2)
	if mode == "nftables" {
		grows(r, at, fewest, firstByte, firstByteGrowth, 1.05)
	}
}

func times(at report.At, name string, goal float64) {
	if goal > 0 {
		at.WantTimes(portal, name, kube, goal)
	}
}

// grows sees that more Services make a figure no worse than a limit, as a multiple of that with the fewest.
func grows(r *report.Report, at, fewest report.At, name, growth string, limit float64) {
	for _, subject := range []string{kube, portal} {
		few, ok := r.Find(fewest.Place, name, subject)
		many, there := r.Find(at.Place, name, subject)
		if ok && there && few.Value > 0 {
			at.Lower(subject, growth, many.Value/few.Value, "×")
		}
	}
	at.WantWithin(portal, growth, limit)
}
