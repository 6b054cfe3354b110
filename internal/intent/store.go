package intent

import (
	"cmp"
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync"
)

// Source is a kind of object that intent is fed with.
type Source uint8

const (
	Services Source = iota
	EndpointSlices
	Nodes
	Namespaces
	Pods
	ServiceCIDRs
	sources
)

func (s Source) String() string {
	return [...]string{"services", "endpointslices", "nodes", "namespaces", "pods", "servicecidrs"}[s]
}

// Cluster is the current intent. One writer changes it; any number of readers follow it through a Feed.
type Cluster struct {
	mu         sync.RWMutex
	services   entries
	nodes      map[string]*Node
	namespaces map[string]*Namespace
	pods       map[Key]*Pod
	ranges     map[string]*ServiceCIDR
	wanted     [sources]bool // sources that will be listed
	listed     [sources]bool // sources that have been
	feeds      []*Feed

	// owner remembers which Service a slice was filed under, since an update may move its label.
	owner map[Key]string
	// version counts the changes of entries.
	version uint64
}

// NewCluster returns an empty intent that is complete once each of the sources has been listed.
func NewCluster(wanted ...Source) *Cluster {
	c := &Cluster{
		services: whole{}, nodes: map[string]*Node{}, namespaces: map[string]*Namespace{},
		pods: map[Key]*Pod{}, ranges: map[string]*ServiceCIDR{}, owner: map[Key]string{},
	}
	for _, s := range wanted {
		c.wanted[s] = true
	}
	return c
}

// NewPackedCluster is NewCluster for readers that take up an entry when it changes and seldom else: entries are kept
// packed, in a fraction of the memory, and each reading makes a new one.
func NewPackedCluster(wanted ...Source) *Cluster {
	c := NewCluster(wanted...)
	c.services = newPacked(0, 0)
	return c
}

// Pack packs entries from now on, but for those with more than upTo endpoints: for who must have read the first lists soon, and
// then gives more for memory. It holds nobody up while it packs.
func (c *Cluster) Pack(upTo int) {
	c.mu.RLock()
	before, ok := c.services.(whole)
	if ok {
		before = maps.Clone(before)
	}
	c.mu.RUnlock()
	if !ok {
		return
	}
	done := newPacked(upTo, len(before))
	for k, e := range before {
		done.set(k, e)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now, ok := c.services.(whole)
	if !ok {
		return // somebody else was sooner
	}
	for k, e := range now {
		if before[k] != e {
			done.set(k, e)
		}
	}
	for k := range before {
		if now[k] == nil {
			done.remove(k)
		}
	}
	c.services = done
}

// SetService adds or replaces a Service.
func (c *Cluster) SetService(s *Service) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.update(s.Key, func(e *Entry) { e.Service, e.Version = s, c.version })
}

// DeleteService removes a Service; slices that name it stay until they are removed themselves.
func (c *Cluster) DeleteService(k Key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.update(k, func(e *Entry) { e.Service, e.Version = nil, c.version })
}

// SetSlice adds or replaces a slice.
func (c *Cluster) SetSlice(s *Slice) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if was, ok := c.owner[s.Key]; ok && was != s.Service {
		c.removeSlice(s.Key)
	}
	if s.Service == "" {
		return
	}
	c.owner[s.Key] = s.Service
	c.update(Key{s.Namespace, s.Service}, func(e *Entry) {
		i, found := slices.BinarySearchFunc(e.Slices, s.Name, sliceByName)
		if found {
			e.Slices, e.Versions = slices.Clone(e.Slices), slices.Clone(e.Versions)
			e.Slices[i], e.Versions[i] = s, c.version
			return
		}
		e.Slices, e.Versions = slices.Insert(slices.Clone(e.Slices), i, s), slices.Insert(slices.Clone(e.Versions), i, c.version)
	})
}

func sliceByName(s *Slice, name string) int { return cmp.Compare(s.Name, name) }

// DeleteSlice removes a slice.
func (c *Cluster) DeleteSlice(k Key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.removeSlice(k)
}

func (c *Cluster) removeSlice(k Key) {
	service, ok := c.owner[k]
	if !ok {
		return
	}
	delete(c.owner, k)
	c.update(Key{k.Namespace, service}, func(e *Entry) {
		if i, found := slices.BinarySearchFunc(e.Slices, k.Name, sliceByName); found {
			e.Slices, e.Versions = slices.Delete(slices.Clone(e.Slices), i, i+1), slices.Delete(slices.Clone(e.Versions), i, i+1)
		}
	})
}

// update replaces an entry by a changed copy and tells the feeds.
func (c *Cluster) update(k Key, change func(*Entry)) {
	next := &Entry{}
	if old := c.services.get(k); old != nil {
		*next = *old
	}
	c.version++
	change(next)
	if next.Service == nil && len(next.Slices) == 0 {
		c.services.remove(k)
	} else {
		c.services.set(k, next)
	}
	for _, f := range c.feeds {
		f.mark(func(d *Changes) { d.Services[k] = struct{}{} })
	}
}

// SetNode adds or replaces a node.
func (c *Cluster) SetNode(n *Node) {
	set(c, c.nodes, n.Name, n, func(d *Changes) map[string]struct{} { return d.Nodes })
}

// DeleteNode removes a node.
func (c *Cluster) DeleteNode(name string) {
	unset(c, c.nodes, name, func(d *Changes) map[string]struct{} { return d.Nodes })
}

// SetNamespace adds or replaces a namespace.
func (c *Cluster) SetNamespace(n *Namespace) {
	set(c, c.namespaces, n.Name, n, func(d *Changes) map[string]struct{} { return d.Namespaces })
}

// DeleteNamespace removes a namespace.
func (c *Cluster) DeleteNamespace(name string) {
	unset(c, c.namespaces, name, func(d *Changes) map[string]struct{} { return d.Namespaces })
}

// SetPod adds or replaces a Pod.
func (c *Cluster) SetPod(p *Pod) {
	set(c, c.pods, p.Key, p, func(d *Changes) map[Key]struct{} { return d.Pods })
}

// DeletePod removes a Pod.
func (c *Cluster) DeletePod(k Key) {
	unset(c, c.pods, k, func(d *Changes) map[Key]struct{} { return d.Pods })
}

// SetServiceCIDR adds or replaces a range of Services' addresses.
func (c *Cluster) SetServiceCIDR(r *ServiceCIDR) {
	set(c, c.ranges, r.Name, r, func(d *Changes) map[string]struct{} { return d.ServiceCIDRs })
}

// DeleteServiceCIDR removes a range.
func (c *Cluster) DeleteServiceCIDR(name string) {
	unset(c, c.ranges, name, func(d *Changes) map[string]struct{} { return d.ServiceCIDRs })
}

func set[K comparable, V any](c *Cluster, m map[K]V, k K, v V, dirty func(*Changes) map[K]struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m[k] = v
	for _, f := range c.feeds {
		f.mark(func(d *Changes) { dirty(d)[k] = struct{}{} })
	}
}

func unset[K comparable, V any](c *Cluster, m map[K]V, k K, dirty func(*Changes) map[K]struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := m[k]; !ok {
		return
	}
	delete(m, k)
	for _, f := range c.feeds {
		f.mark(func(d *Changes) { dirty(d)[k] = struct{}{} })
	}
}

// MarkListed says that a source has been listed in full.
func (c *Cluster) MarkListed(s Source) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.listed[s] {
		return
	}
	c.listed[s] = true
	if c.complete() {
		for _, f := range c.feeds {
			f.mark(func(*Changes) {})
		}
	}
}

// Complete says whether every source has been listed: nothing may be pruned before.
func (c *Cluster) Complete() bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.complete()
}

// Listed says whether a source has been listed, or never will be.
func (c *Cluster) Listed(s Source) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return !c.wanted[s] || c.listed[s]
}

func (c *Cluster) complete() bool {
	for s := range c.wanted {
		if c.wanted[s] && !c.listed[s] {
			return false
		}
	}
	return true
}

// Entry returns what is known about a Service name, nil for nothing.
func (c *Cluster) Entry(k Key) *Entry {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.services.get(k)
}

// Slice returns a slice, nil for none.
func (c *Cluster) Slice(k Key) *Slice {
	c.mu.RLock()
	defer c.mu.RUnlock()
	service, ok := c.owner[k]
	if !ok {
		return nil
	}
	e := c.services.get(Key{k.Namespace, service})
	i, _ := slices.BinarySearchFunc(e.Slices, k.Name, sliceByName)
	return e.Slices[i]
}

// Node returns a node, nil for none.
func (c *Cluster) Node(name string) *Node {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.nodes[name]
}

// Namespace returns a namespace, nil for none.
func (c *Cluster) Namespace(name string) *Namespace {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.namespaces[name]
}

// Pod returns a Pod, nil for none.
func (c *Cluster) Pod(k Key) *Pod {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.pods[k]
}

// ServiceCIDR returns a range, nil for none.
func (c *Cluster) ServiceCIDR(name string) *ServiceCIDR {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.ranges[name]
}

// ServicePrefixes are the prefixes of all ranges, in order and without duplicates.
func (c *Cluster) ServicePrefixes() (out []netip.Prefix) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	for _, r := range c.ranges {
		out = append(out, r.Prefixes...)
	}
	slices.SortFunc(out, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	return slices.Compact(out)
}

// Keys lists what a source holds at the moment: for a writer that replaces everything, and for people.
func (c *Cluster) Keys(s Source) []Key {
	c.mu.RLock()
	defer c.mu.RUnlock()
	var out []Key
	switch s {
	case Services:
		c.services.keys(func(k Key, service bool) {
			if service {
				out = append(out, k)
			}
		})
	case EndpointSlices:
		out = slices.Collect(maps.Keys(c.owner))
	case Pods:
		out = slices.Collect(maps.Keys(c.pods))
	case Nodes:
		for name := range c.nodes {
			out = append(out, Key{Name: name})
		}
	case Namespaces:
		for name := range c.namespaces {
			out = append(out, Key{Name: name})
		}
	case ServiceCIDRs:
		for name := range c.ranges {
			out = append(out, Key{Name: name})
		}
	}
	return out
}

// Snapshot is the whole intent at one moment. Copying it costs the maps, not what they point to.
type Snapshot struct {
	Services   map[Key]*Entry
	Nodes      map[string]*Node
	Namespaces map[string]*Namespace
	Pods       map[Key]*Pod
	Complete   bool
}

// Snapshot returns the intent of this moment.
func (c *Cluster) Snapshot() Snapshot {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return Snapshot{c.services.clone(), maps.Clone(c.nodes), maps.Clone(c.namespaces), maps.Clone(c.pods), c.complete()}
}

// Changes are the keys that changed since a feed was last read.
type Changes struct {
	Services   map[Key]struct{}
	Nodes      map[string]struct{}
	Namespaces map[string]struct{}
	Pods       map[Key]struct{}
	// ServiceCIDRs are by name.
	ServiceCIDRs map[string]struct{}
}

func newChanges() *Changes {
	return &Changes{map[Key]struct{}{}, map[string]struct{}{}, map[string]struct{}{}, map[Key]struct{}{}, map[string]struct{}{}}
}

// Feed collects changes for one reader. However slow the reader, a key waits in it once.
type Feed struct {
	cluster *Cluster
	mu      sync.Mutex
	dirty   *Changes
	wake    chan struct{}
}

// Follow returns a feed that begins with all that is there.
func (c *Cluster) Follow() *Feed {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := &Feed{cluster: c, dirty: newChanges(), wake: make(chan struct{}, 1)}
	c.services.keys(func(k Key, _ bool) { f.dirty.Services[k] = struct{}{} })
	for k := range c.nodes {
		f.dirty.Nodes[k] = struct{}{}
	}
	for k := range c.namespaces {
		f.dirty.Namespaces[k] = struct{}{}
	}
	for k := range c.pods {
		f.dirty.Pods[k] = struct{}{}
	}
	for k := range c.ranges {
		f.dirty.ServiceCIDRs[k] = struct{}{}
	}
	f.wake <- struct{}{}
	c.feeds = append(c.feeds, f)
	return f
}

func (f *Feed) mark(change func(*Changes)) {
	f.mu.Lock()
	change(f.dirty)
	f.mu.Unlock()
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// Wake receives when there is something to Take.
func (f *Feed) Wake() <-chan struct{} { return f.wake }

// Take returns the changes since the last call. Values are to be read from the Cluster afterwards: they are at least as
// new as the change.
func (f *Feed) Take() *Changes {
	f.mu.Lock()
	defer f.mu.Unlock()
	d := f.dirty
	f.dirty = newChanges()
	return d
}

// Next waits for changes and takes them.
func (f *Feed) Next(ctx context.Context) (*Changes, error) {
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-f.wake:
		return f.Take(), nil
	}
}

// Close ends the feed.
func (f *Feed) Close() {
	f.cluster.mu.Lock()
	defer f.cluster.mu.Unlock()
	f.cluster.feeds = slices.DeleteFunc(f.cluster.feeds, func(g *Feed) bool { return g == f })
}
