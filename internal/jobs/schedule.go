package jobs

import (
	"errors"
	"fmt"
	"strings"
	"time"
	_ "time/tzdata" // the time zones of CronJobs are the same on every machine

	"github.com/robfig/cron/v3"
)

// Schedule says when something is due.
type Schedule interface {
	// Next is the first time after another one; the zero time if there is none.
	Next(after time.Time) time.Time
}

// ParseSchedule reads a schedule in the notation of cron: five fields, or @hourly, @every 5m and the like. zone is the name of a
// time zone; "" is that of the process.
func ParseSchedule(text, zone string) (Schedule, error) {
	if zone != "" && !HasZone(text) {
		if _, err := LoadZone(zone); err != nil {
			return nil, err
		}
		text = "TZ=" + zone + " " + text
	}
	return parse(text)
}

// parse calls a library that panics on some texts.
func parse(text string) (schedule Schedule, err error) {
	defer func() {
		if p := recover(); p != nil {
			schedule, err = nil, fmt.Errorf("%q is no schedule", text)
		}
	}()
	return cron.ParseStandard(text)
}

// HasZone says that a schedule names a time zone itself, which was never meant to be possible.
func HasZone(text string) bool { return strings.Contains(text, "TZ") }

// LoadZone is the time zone of a name.
func LoadZone(name string) (*time.Location, error) {
	if strings.EqualFold(name, "Local") {
		return nil, errors.New("must be a time zone by its name, such as Europe/Paris")
	}
	return time.LoadLocation(name)
}

// tooMany is how many times may have been missed before somebody should hear of it.
const tooMany = 100

// Due is the last time that a schedule was due after since and not after now; the zero time if it was not. missed says that it
// was due so often in between that a clock may be wrong.
func Due(schedule Schedule, since, now time.Time) (due time.Time, missed bool, err error) {
	if oldest := now.AddDate(-10, 0, 0); since.Before(oldest) {
		since = oldest
	}
	first := schedule.Next(since)
	if first.IsZero() || first.After(now) {
		return time.Time{}, false, nil
	}
	second := schedule.Next(first)
	if second.After(now) {
		return first, false, nil
	}
	step := second.Sub(first).Round(time.Second)
	if step < time.Second {
		return time.Time{}, false, errors.New("the schedule is never due a second time")
	}
	// There may be years between; most of them can be skipped. Steps differ, so that it may take going back some more of them
	// to find the last one that fits.
	skipped := now.Sub(first) / step
	for back := time.Duration(1); due.IsZero(); back *= 2 {
		from := first
		if skipped > back {
			from = first.Add((skipped - back) * step)
		} else {
			due = first
		}
		for next := schedule.Next(from); !next.After(now) && !next.IsZero(); next = schedule.Next(next) {
			due = next
		}
	}
	return due, skipped >= tooMany, nil
}
