package intent

import (
	"fmt"
	"maps"
	"testing"

	"pgregory.net/rapid"
)

// A reader that only follows its feed must arrive at what a snapshot shows, whatever the order of changes.
func TestFeedLeadsToSnapshot(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := NewCluster(Services, EndpointSlices)
		feed := c.Follow()
		seen := map[Key]*Entry{}
		namespaces := map[string]*Namespace{}
		follow := func() {
			d := feed.Take()
			for k := range d.Services {
				if e := c.Entry(k); e != nil {
					seen[k] = e
				} else {
					delete(seen, k)
				}
			}
			for n := range d.Namespaces {
				if v := c.Namespace(n); v != nil {
					namespaces[n] = v
				} else {
					delete(namespaces, n)
				}
			}
		}
		name := rapid.SampledFrom([]string{"a", "b", "c"})
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			k := Key{"ns", name.Draw(t, "name")}
			switch rapid.IntRange(0, 6).Draw(t, "what") {
			case 0:
				c.SetService(&Service{Key: k})
			case 1:
				c.DeleteService(k)
			case 2, 3:
				slice := Key{"ns", fmt.Sprint("slice-", rapid.IntRange(0, 3).Draw(t, "slice"))}
				c.SetSlice(&Slice{Key: slice, Service: rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "service")})
			case 4:
				c.DeleteSlice(Key{"ns", fmt.Sprint("slice-", rapid.IntRange(0, 3).Draw(t, "slice"))})
			case 5:
				c.SetNamespace(&Namespace{Name: k.Name})
			case 6:
				c.DeleteNamespace(k.Name)
			}
			if rapid.Bool().Draw(t, "read") {
				follow()
			}
		}
		follow()
		s := c.Snapshot()
		if !maps.Equal(seen, s.Services) || !maps.Equal(namespaces, s.Namespaces) {
			t.Fatalf("followed %v %v, snapshot %v %v", seen, namespaces, s.Services, s.Namespaces)
		}
		for k, e := range s.Services {
			for i, sl := range e.Slices {
				if sl.Service != k.Name || i > 0 && e.Slices[i-1].Name >= sl.Name {
					t.Fatalf("%v holds %v out of place", k, sl)
				}
			}
		}
	})
}

func TestHandedOutEntriesDoNotChange(t *testing.T) {
	c := NewCluster()
	k := Key{"ns", "web"}
	c.SetSlice(&Slice{Key: Key{"ns", "1"}, Service: "web"})
	before := c.Entry(k)
	c.SetSlice(&Slice{Key: Key{"ns", "0"}, Service: "web"})
	c.SetService(&Service{Key: k})
	c.DeleteSlice(Key{"ns", "1"})
	if before.Service != nil || len(before.Slices) != 1 || before.Slices[0].Name != "1" {
		t.Fatalf("an entry that a reader holds was changed: %+v", before)
	}
	if now := c.Entry(k); now.Service == nil || len(now.Slices) != 1 || now.Slices[0].Name != "0" {
		t.Fatalf("got %+v", now)
	}
}

func TestCompleteWaitsForEverySource(t *testing.T) {
	c := NewCluster(Services, Nodes)
	c.MarkListed(Services)
	if c.Complete() {
		t.Fatal("complete before nodes were listed")
	}
	f := c.Follow()
	<-f.Wake()
	c.MarkListed(Nodes)
	if !c.Complete() {
		t.Fatal("not complete after every source was listed")
	}
	select {
	case <-f.Wake():
	default:
		t.Fatal("nobody was notified that intent is complete")
	}
}
