package zone

import (
	"fmt"
	"hash/maphash"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

// named is a table of names as Zones has it.
func named() *Zones {
	z := &Zones{seed: maphash.MakeSeed()}
	z.table = newTable(func(n *Name) uint64 { return maphash.String(z.seed, n.owner) })
	return z
}

func TestTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		z, model := named(), map[string]*Name{}
		for range rapid.IntRange(1, 400).Draw(t, "steps") {
			owner := fmt.Sprint("n", rapid.IntRange(0, 120).Draw(t, "name"))
			if rapid.IntRange(0, 2).Draw(t, "what") == 0 {
				z.remove(owner)
				delete(model, owner)
			} else {
				n := &Name{owner: owner}
				z.put(n)
				model[owner] = n
			}
		}
		for i := range 121 {
			owner := fmt.Sprint("n", i)
			if z.get([]byte(owner)) != model[owner] {
				t.Fatalf("%s is not what was put", owner)
			}
		}
		if z.table.live != len(model) {
			t.Fatalf("%d live, want %d", z.table.live, len(model))
		}
	})
}

// Readers must see a name that is replaced over and over at every moment, while the table grows and shrinks around it.
func TestTableWhileWritten(t *testing.T) {
	z := named()
	z.put(&Name{owner: "always"})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if z.get([]byte("always")) == nil {
					t.Error("a name went that was never removed")
					return
				}
			}
		})
	}
	for round := range 20 {
		for i := range 2000 {
			z.put(&Name{owner: fmt.Sprint(round, i)})
			if i%100 == 0 {
				z.put(&Name{owner: "always"})
			}
		}
		for i := range 2000 {
			z.remove(fmt.Sprint(round, i))
		}
	}
	close(stop)
	wg.Wait()
}
