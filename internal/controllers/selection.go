package controllers

import (
	"fmt"
	"slices"
	"strings"
)

// Selection is which controllers run.
type Selection struct{ names []string }

// ParseSelection reads the value of --controllers: a list of names; "*" stands for all, "-name" takes one out, "none"
// alone is none. A list that only takes out takes out of all. own are the names of controllers that the caller adds.
func ParseSelection(values []string, own ...string) (Selection, error) {
	names := append(Names(), own...)
	var words []string
	for _, value := range values {
		for word := range strings.SplitSeq(value, ",") {
			if word = strings.TrimSpace(word); word != "" {
				words = append(words, word)
			}
		}
	}
	if slices.Contains(words, "none") {
		if len(words) > 1 {
			return Selection{}, fmt.Errorf("controllers: none stands alone, it can't be combined with %s",
				strings.Join(slices.DeleteFunc(words, func(w string) bool { return w == "none" }), ", "))
		}
		return Selection{}, nil
	}
	on := map[string]bool{}
	all := !slices.ContainsFunc(words, func(w string) bool { return !strings.HasPrefix(w, "-") })
	for _, word := range words {
		name, off := strings.CutPrefix(word, "-")
		switch {
		case word == "*":
			all = true
		case !slices.Contains(names, name):
			return Selection{}, fmt.Errorf("controllers: there is no %q; there are %s, and * for all, none, and -name to leave one out", name, strings.Join(names, ", "))
		default:
			on[name] = !off
		}
	}
	var s Selection
	for _, name := range names {
		if chosen, said := on[name]; chosen || all && !said {
			s.names = append(s.names, name)
		}
	}
	return s, nil
}

// Has reports whether a controller runs.
func (s Selection) Has(name string) bool { return slices.Contains(s.names, name) }

// Empty reports whether none runs.
func (s Selection) Empty() bool { return len(s.names) == 0 }

func (s Selection) String() string {
	if s.Empty() {
		return "none"
	}
	return strings.Join(s.names, ",")
}
