package queue

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func named(name string) Key { return Key{Namespace: "ns", Name: name} }

func TestWhatHasChangedGoesFirst(t *testing.T) {
	l := newLanes()
	for i := range 20 {
		l.Push(named(fmt.Sprint("listed", i)))
	}
	l.Touch(named("listed3")) // two events of one list
	l.setListed()
	l.Touch(named("listed7"))
	l.Push(named("new"))
	l.Touch(named("listed7"))
	var got []string
	for range 5 {
		got = append(got, l.Pop().Name)
	}
	if want := []string{"listed7", "new", "listed0", "listed1", "listed2"}; !slices.Equal(got, want) {
		t.Errorf("order %v, want %v", got, want)
	}
}

// A change that somebody else has dealt with is no longer urgent; the next one is again, behind those that came before.
func TestDeprioritizedKeysWait(t *testing.T) {
	l := newLanes()
	for _, name := range []string{"a", "b", "c"} {
		l.Push(named(name))
	}
	l.setListed()
	for _, name := range []string{"a", "b"} {
		l.Touch(named(name))
	}
	l.deprioritize(named("a"))
	l.deprioritize(named("nobody"))
	l.Touch(named("c"))
	l.Touch(named("a"))
	l.deprioritize(named("b"))
	var got []string
	for range 3 {
		got = append(got, l.Pop().Name)
	}
	if want := []string{"c", "a", "b"}; !slices.Equal(got, want) {
		t.Errorf("order %v, want %v", got, want)
	}
}

// Somebody may stand by for months.
func TestLanesDoNotGrow(t *testing.T) {
	l := newLanes()
	for i := range 10 {
		l.Push(named(fmt.Sprint(i)))
	}
	l.setListed()
	for i := range 10_000 {
		l.Touch(named(fmt.Sprint(i % 10)))
		l.deprioritize(named(fmt.Sprint((i + 5) % 10)))
	}
	if a, b := len(l.lane[urgent].places), len(l.lane[rest].places); a+b > 200 {
		t.Errorf("10 keys have %d and %d places", a, b)
	}
}

// However many changes there are, what was only listed comes to its turn.
func TestNobodyStarves(t *testing.T) {
	l := newLanes()
	l.Push(named("listed"))
	l.setListed()
	for i := range 2 * share {
		l.Push(named(fmt.Sprint("new", i)))
		if l.Pop().Name == "listed" {
			return
		}
	}
	t.Errorf("%d others went before what was listed", 2*share)
}

// Whatever happens in whatever order, every key comes out as often as it was put in.
func TestLanesLoseNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l, in := newLanes(), map[Key]bool{}
		pop := func() {
			if key := l.Pop(); !in[key] {
				t.Fatalf("%s comes out and was not in", key)
			} else {
				delete(in, key)
			}
		}
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			switch key := named(rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(t, "key")); {
			case rapid.IntRange(0, 9).Draw(t, "list") == 0:
				l.setListed()
			case len(in) > 0 && rapid.Bool().Draw(t, "pop"):
				pop()
			case in[key] && rapid.Bool().Draw(t, "settle"):
				l.deprioritize(key)
			case in[key]:
				l.Touch(key)
			default:
				in[key] = true
				l.Push(key)
			}
			if l.Len() != len(in) {
				t.Fatalf("%d keys, and it says %d", len(in), l.Len())
			}
		}
		for len(in) > 0 {
			pop()
		}
	})
}
