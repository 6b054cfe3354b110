package nf

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Generation counts every transaction in the network namespace, whoever's.
func (s *Socket) Generation() (id uint32, err error) {
	err = s.get(unix.AF_UNSPEC, unix.NFT_MSG_GETGEN, nil, func(m []byte) { id = attrUint32(m, unix.NFTA_GEN_ID) })
	return id, err
}

// Exists says whether there is such a table. A kernel that has no nf_tables for the family has none.
func (s *Socket) Exists(t *Table) (bool, error) {
	err := s.get(t.Family, unix.NFT_MSG_GETTABLE, appendString(nil, unix.NFTA_TABLE_NAME, t.Name), func([]byte) {})
	if errors.Is(err, unix.ENOENT) || unsupported(err) {
		return false, nil
	}
	return err == nil, err
}

// Remove deletes tables where they are.
func (s *Socket) Remove(tables ...*Table) error {
	b := NewBatch()
	for _, t := range tables {
		there, err := s.Exists(t)
		if err != nil {
			return fmt.Errorf("looking for the table %s: %w", t.Name, err)
		}
		if there {
			b.DeleteTable(t)
		}
	}
	if b.Empty() {
		return nil
	}
	if err := s.Commit(b); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("deleting tables: %w", err)
	}
	return nil
}

// Present is what is in a table.
type Present struct {
	sets   map[string]*presentSet
	chains map[string]chainState
}

type presentSet struct {
	form form
	// elements are contents by key; nil for a set that packets change.
	elements map[string]string
	// unknown: the elements could not be read.
	unknown  bool
	declared *Set
}

// SetSize returns the size that a set was made with, and whether there is one.
func (p *Present) SetSize(name string) (uint32, bool) {
	if p == nil || p.sets[name] == nil {
		return 0, false
	}
	return p.sets[name].form.size, true
}

// Like says whether a set is there in the same form.
func (p *Present) Like(s *Set) bool {
	return p != nil && p.sets[s.Name] != nil && p.sets[s.Name].form == s.form()
}

// Sets are the names of the sets.
func (p *Present) Sets() []string { return slices.Sorted(maps.Keys(p.sets)) }

// Chains are the names of the chains.
func (p *Present) Chains() []string { return slices.Sorted(maps.Keys(p.chains)) }

// Read reads all that is in a table, nil where there is none.
func (s *Socket) Read(t *Table) (*Present, error) {
	there, err := s.Exists(t)
	if err != nil || !there {
		return nil, err
	}
	p, err := s.readNames(t)
	if err != nil {
		return nil, fmt.Errorf("reading the table %s: %w", t.Name, err)
	}
	busy := false
	for name, set := range p.sets {
		as := &Set{Table: t, Name: name, Verdicts: set.form.data == verdictLen}
		if as.Verdicts {
			set.form.data = 0
		}
		if set.form.flags&unix.NFT_SET_EVAL != 0 {
			continue
		}
		if set.unknown = busy; busy {
			continue
		}
		err := s.Elements(as, func() { set.elements = map[string]string{} }, func(e Element) {
			set.elements[string(e.appendKey(nil))] = string(as.appendContent(nil, &e))
		})
		if errors.Is(err, unix.EINTR) {
			// Others change something all the time, so that no list is ever complete.
			busy, set.unknown = true, true
		} else if err != nil {
			return nil, err
		}
	}
	return p, nil
}

// verdictLen stands for the size of a verdict, which is the kernel's own business.
const verdictLen = ^uint32(0)

// readNames reads all but elements.
func (s *Socket) readNames(t *Table) (*Present, error) {
	p := &Present{}
	err := s.dump(t.Family, unix.NFT_MSG_GETSET, appendString(nil, unix.NFTA_SET_TABLE, t.Name), func() { p.sets = map[string]*presentSet{} }, func(m []byte) {
		if attrString(m, unix.NFTA_SET_TABLE) != t.Name {
			return
		}
		f := form{attrUint32(m, unix.NFTA_SET_FLAGS), attrUint32(m, unix.NFTA_SET_KEY_LEN), attrUint32(m, unix.NFTA_SET_DATA_LEN), 0}
		if attrUint32(m, unix.NFTA_SET_DATA_TYPE) == unix.NFT_DATA_VERDICT {
			f.data = verdictLen
		}
		f.size = attrUint32(attr(m, unix.NFTA_SET_DESC), unix.NFTA_SET_DESC_SIZE)
		p.sets[attrString(m, unix.NFTA_SET_NAME)] = &presentSet{form: f}
	})
	if err != nil {
		return nil, err
	}
	p.chains, err = s.readChains(t)
	return p, err
}

func (s *Socket) readChains(t *Table) (out map[string]chainState, err error) {
	err = s.dump(t.Family, unix.NFT_MSG_GETCHAIN, appendString(nil, unix.NFTA_CHAIN_TABLE, t.Name), func() { out = map[string]chainState{} }, func(m []byte) {
		if attrString(m, unix.NFTA_CHAIN_TABLE) != t.Name {
			return
		}
		c := chainState{}
		if h := attr(m, unix.NFTA_CHAIN_HOOK); h != nil {
			c.hook = Hook{attrString(m, unix.NFTA_CHAIN_TYPE), attrUint32(h, unix.NFTA_HOOK_HOOKNUM), int32(attrUint32(h, unix.NFTA_HOOK_PRIORITY))}
		}
		out[attrString(m, unix.NFTA_CHAIN_NAME)] = c
	})
	if err != nil {
		return nil, err
	}
	tags := map[string][]string{}
	err = s.Rules(t, "", func() { clear(tags) }, func(r RuleInfo) { tags[r.Chain] = append(tags[r.Chain], r.tag) })
	for name, c := range out {
		c.tags = tags[name]
		out[name] = c
	}
	return out, err
}

// Elements lists the elements of a set; what got gets is valid during the call. reset is called before each attempt. The
// kernel may list an element twice or leave one out while the set grows.
func (s *Socket) Elements(set *Set, reset func(), got func(Element)) error {
	body := appendString(appendString(nil, unix.NFTA_SET_ELEM_LIST_TABLE, set.Table.Name), unix.NFTA_SET_ELEM_LIST_SET, set.Name)
	err := s.dump(set.Table.Family, unix.NFT_MSG_GETSETELEM, body, reset, func(m []byte) {
		for _, v := range Attributes(attr(m, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
			got(readElement(v))
		}
	})
	if err != nil {
		return fmt.Errorf("listing the set %s of the table %s: %w", set.Name, set.Table.Name, err)
	}
	return nil
}

// Check compares tables with what the last acknowledged transactions left in them. It costs one question while nobody
// else changes anything in nf_tables, and otherwise reads all of the tables.
func (s *Socket) Check(tables ...*Table) error {
	return s.Verify(func() error {
		for _, t := range tables {
			if err := s.compare(t); err != nil {
				return fmt.Errorf("the table %s of %s is not as it was written: %w", t.Name, familyName(t.Family), err)
			}
		}
		return nil
	})
}

// Verify calls compare, unless nobody else has changed anything in nf_tables since it last returned nil. A set that grows
// while it is listed may look as if it lacked something: what differs is looked at again before it is believed.
func (s *Socket) Verify(compare func() error) error {
	now, err := s.Generation()
	if err != nil {
		return fmt.Errorf("reading the generation of nf_tables: %w", err)
	}
	if now == s.verified {
		return nil
	}
	for pause := 10 * time.Millisecond; ; pause *= 4 {
		if err = compare(); err == nil || pause > 200*time.Millisecond {
			break
		}
		time.Sleep(pause)
	}
	if err == nil {
		s.verified = now
	}
	return err
}

func familyName(f byte) string {
	if f == unix.NFPROTO_IPV6 {
		return "IPv6"
	}
	return "IPv4"
}

func (s *Socket) compare(t *Table) error {
	if there, err := s.Exists(t); err != nil || !there {
		return errors.Join(err, errors.New("it is missing"))
	}
	p, err := s.readNames(t)
	if err != nil {
		return err
	}
	var differ []string
	for name, want := range t.chains {
		have, there := p.chains[name]
		switch {
		case !there:
			differ = append(differ, fmt.Sprintf("the chain %s is missing", name))
		case have.hook != want.hook:
			differ = append(differ, fmt.Sprintf("the chain %s has another hook", name))
		case len(have.tags) != len(want.tags):
			differ = append(differ, fmt.Sprintf("the chain %s has %d rules instead of %d", name, len(have.tags), len(want.tags)))
		case !slices.Equal(have.tags, want.tags):
			differ = append(differ, fmt.Sprintf("the chain %s has other rules", name))
		}
	}
	for name, want := range t.sets {
		there := p.sets[name]
		if there == nil {
			differ = append(differ, fmt.Sprintf("the set %s is missing", name))
			continue
		}
		set := &Set{Table: t, Name: name, Verdicts: there.form.data == verdictLen}
		var have digest
		var scratch []byte
		err := s.Elements(set, func() { have = digest{} }, func(e Element) {
			var d digest
			d, scratch = set.digest(scratch, &e)
			have = have.plus(d)
		})
		switch {
		case err != nil:
			return err
		case have.count != want.count:
			differ = append(differ, fmt.Sprintf("the set %s has %d elements instead of %d", name, have.count, want.count))
		case have != want:
			differ = append(differ, fmt.Sprintf("the set %s has other elements", name))
		}
	}
	if len(differ) == 0 {
		return nil
	}
	slices.Sort(differ)
	return errors.New(strings.Join(differ, "; "))
}
