package console

import (
	"container/list"
	"context"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/rest"
)

// key names a Service.
type key struct{ namespace, name string }

// entry is a Service with what belongs to it. A Service can come after its slices, so svc can be nil.
type entry struct {
	svc       *corev1.Service
	slices    map[string]*slice
	endpoints []Endpoint
	row       Row
	revision  uint64
	order     *list.Element // in the feed's order; nil before its Service has come
}

// feed is one session's copy of what the console shows, kept up to date by watches with the session's rights. Each change gets a
// revision, so that a page asks for what came after the one that it has.
type feed struct {
	config    *rest.Config
	wanted    []string // namespaces
	nodePorts string
	id        string
	// ended ends with the feed, which stop does.
	ended context.Context
	stop  func()

	mu      sync.Mutex
	changed chan struct{} // closed at the next change
	// shown are closed at the next change that shows on a Service's page; only those that somebody waits for are there.
	shown    map[key]chan struct{}
	revision uint64
	services map[key]*entry
	order    list.List   // of entries with a Service, the last that changed at the end
	owners   map[key]key // of slices, by namespace and name: their Services
	nodes    map[string]*Node
	nodeRevs map[string]uint64
	nodesRev uint64              // of the last change of any node, counts of endpoints excepted
	ranges   map[string][]string // of ServiceCIDRs, by name
	// goneServices and goneNodes have the revisions of what was deleted; forgotten is the last whose deletions are not known
	// any more.
	goneServices map[key]uint64
	goneNodes    map[string]uint64
	forgotten    uint64
	status       Status
	statusRev    uint64
	// waiting are lists that have not come yet.
	waiting map[string]bool
	history history
	// details counts those that were built, versions how often somebody asked for a Service's, which tests limit.
	details, versions int
}

// Status is what a page says about where its data comes from.
type Status struct {
	// Synced says that everything was listed once.
	Synced bool `json:"synced"`
	// Namespaces are those that are shown; All says that it is all of them.
	Namespaces []string `json:"namespaces"`
	All        bool     `json:"all"`
	// AwaySince is when the API server stopped answering.
	AwaySince *time.Time `json:"awaySince,omitempty"`
	Away      string     `json:"away,omitempty"`
	// SignedOut says that the API server does not accept the credentials any more.
	SignedOut bool `json:"signedOut,omitempty"`
	// Limits are what this user may not see.
	Limits []string `json:"limits,omitempty"`
	// Ranges are those of cluster IPs; NodePorts is the range of node ports, and NodePortsKnown whether it is certain.
	Ranges         []string `json:"ranges,omitempty"`
	NodePorts      string   `json:"nodePorts"`
	NodePortsKnown bool     `json:"nodePortsKnown"`
}

// maxGone is how many deletions are remembered; a page that missed more gets everything.
const maxGone = 5000

func (f *feed) bump() uint64 {
	f.revision++
	close(f.changed)
	f.changed = make(chan struct{})
	return f.revision
}

// bumpService is bump, for what shows on a Service's page.
func (f *feed) bumpService(k key) uint64 {
	if shown := f.shown[k]; shown != nil {
		close(shown)
		delete(f.shown, k)
	}
	return f.bump()
}

// bumpAll is bump, for what shows on all pages.
func (f *feed) bumpAll() uint64 {
	for _, shown := range f.shown {
		close(shown)
	}
	clear(f.shown)
	return f.bump()
}

// setStatus changes the status; change reports whether it did.
func (f *feed) setStatus(change func(*Status) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if change(&f.status) {
		f.statusRev = f.bumpAll()
	}
}

func (f *feed) entry(k key) *entry {
	e := f.services[k]
	if e == nil {
		e = &entry{slices: map[string]*slice{}}
		f.services[k] = e
	}
	return e
}

// refresh judges a Service again, and notes that it changed if that shows, or if the Service itself did.
func (f *feed) refresh(k key, e *entry, changed bool) {
	if e.svc == nil {
		if len(e.slices) == 0 {
			delete(f.services, k)
		}
		return
	}
	row, endpoints := newRow(e.svc), merge(e.slices)
	judge(&row, e.svc, e.slices, endpoints, !f.waiting[sliceList(k.namespace)] && !f.waiting[sliceList("")], f.nodes)
	if !changed && reflect.DeepEqual(row, e.row) && reflect.DeepEqual(endpoints, e.endpoints) {
		return
	}
	f.note(k, e, &row, endpoints)
	e.row, e.endpoints, e.revision = row, endpoints, f.bumpService(k)
	if e.order == nil {
		e.order = f.order.PushBack(e)
	} else {
		f.order.MoveToBack(e.order)
	}
}

func sliceList(namespace string) string { return "endpointslices/" + namespace }

func (f *feed) putService(svc *corev1.Service) {
	f.mu.Lock()
	defer f.mu.Unlock()
	k := key{svc.Namespace, svc.Name}
	e := f.entry(k)
	e.svc = svc
	delete(f.goneServices, k)
	f.refresh(k, e, true)
}

func (f *feed) dropService(svc *corev1.Service) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.removeService(key{svc.Namespace, svc.Name})
}

func (f *feed) removeService(k key) {
	e := f.services[k]
	if e == nil || e.svc == nil {
		return
	}
	if f.status.Synced {
		f.history.add(k, time.Now(), Moment{From: fromService, Kind: bad, What: "The Service was deleted"})
	}
	f.order.Remove(e.order)
	e.svc, e.row, e.order = nil, Row{}, nil
	f.refresh(k, e, false)
	f.goneServices[k] = f.bumpService(k)
	if len(f.goneServices) > maxGone {
		f.forgotten = f.bumpAll()
		clear(f.goneServices)
		clear(f.goneNodes)
	}
}

// listed notes that a list has come.
func (f *feed) listed(name string) {
	if !f.waiting[name] {
		return
	}
	delete(f.waiting, name)
	if f.status.Synced = len(f.waiting) == 0; f.status.Synced && f.history.since.IsZero() {
		f.history.since = time.Now()
	}
	f.statusRev = f.bumpAll()
}

func (f *feed) replaceServices(namespace string, list []*corev1.Service) {
	f.mu.Lock()
	defer f.mu.Unlock()
	have := map[key]bool{}
	for _, svc := range list {
		k := key{svc.Namespace, svc.Name}
		have[k] = true
		e := f.entry(k)
		if e.svc != nil && e.svc.ResourceVersion == svc.ResourceVersion && e.svc.UID == svc.UID {
			continue
		}
		e.svc = svc
		delete(f.goneServices, k)
		f.refresh(k, e, true)
	}
	for k := range maps.Clone(f.services) {
		if (namespace == "" || k.namespace == namespace) && !have[k] {
			f.removeService(k)
		}
	}
	f.listed("services/" + namespace)
}

func sliceKey(s *discoveryv1.EndpointSlice) key {
	return key{s.Namespace, s.Labels[discoveryv1.LabelServiceName]}
}

func (f *feed) putSlice(from *discoveryv1.EndpointSlice) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.storeSlice(from)
}

func (f *feed) storeSlice(from *discoveryv1.EndpointSlice) {
	k, id := sliceKey(from), key{from.Namespace, from.Name}
	if before, known := f.owners[id]; known && before != k {
		f.removeSlice(before, from.Name) // it belongs to another Service now
	}
	if k.name == "" {
		return
	}
	f.owners[id] = k
	e := f.entry(k)
	f.count(e.slices[from.Name], -1)
	e.slices[from.Name] = newSlice(from)
	f.count(e.slices[from.Name], 1)
	f.refresh(k, e, false)
}

func (f *feed) dropSlice(from *discoveryv1.EndpointSlice) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.removeSlice(sliceKey(from), from.Name)
}

func (f *feed) removeSlice(k key, name string) {
	e := f.services[k]
	if e == nil || e.slices[name] == nil {
		return
	}
	f.count(e.slices[name], -1)
	delete(e.slices, name)
	delete(f.owners, key{k.namespace, name})
	f.refresh(k, e, false)
}

func (f *feed) replaceSlices(namespace string, list []*discoveryv1.EndpointSlice) {
	f.mu.Lock()
	defer f.mu.Unlock()
	type place struct {
		key
		slice string
	}
	have := map[place]bool{}
	for _, s := range list {
		have[place{sliceKey(s), s.Name}] = true
		f.storeSlice(s)
	}
	f.listed(sliceList(namespace))
	for k, e := range maps.Clone(f.services) {
		if namespace != "" && k.namespace != namespace {
			continue
		}
		for _, name := range slices.Collect(maps.Keys(e.slices)) {
			if !have[place{k, name}] {
				f.removeSlice(k, name)
			}
		}
		f.refresh(k, e, false) // now that its endpoints are known to be all
	}
}

// count adds a slice's ready endpoints to their nodes, or takes them away.
func (f *feed) count(s *slice, by int) {
	if s == nil {
		return
	}
	touched := map[string]bool{}
	for _, e := range s.endpoints {
		if node := f.nodes[e.Node]; e.Ready && node != nil {
			node.Endpoints += by
			touched[e.Node] = true
		}
	}
	for name := range touched {
		f.nodeRevs[name] = f.bump()
	}
}

func (f *feed) putNode(from *corev1.Node) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.storeNode(from)
}

func (f *feed) storeNode(from *corev1.Node) {
	node, old := newNode(from), f.nodes[from.Name]
	f.nodes[from.Name] = node
	delete(f.goneNodes, from.Name)
	if old != nil {
		node.Endpoints = old.Endpoints
		if old.Ready == node.Ready && old.Zone == node.Zone && old.Reason == node.Reason && old.Unschedulable == node.Unschedulable && slices.Equal(old.Addresses, node.Addresses) {
			return // nodes renew their heartbeats all the time
		}
	} else {
		for _, e := range f.services {
			for _, s := range e.slices {
				for _, one := range s.endpoints {
					if one.Ready && one.Node == node.Name {
						node.Endpoints++
					}
				}
			}
		}
	}
	f.nodesRev = f.bumpAll()
	f.nodeRevs[from.Name] = f.nodesRev
	if old == nil && node.Ready || old != nil && old.Ready == node.Ready {
		return
	}
	f.refreshOn(node.Name)
}

// refreshOn judges the Services again that have endpoints on a node.
func (f *feed) refreshOn(node string) {
	for k, e := range f.services {
		if slices.ContainsFunc(e.endpoints, func(one Endpoint) bool { return one.Node == node }) {
			f.refresh(k, e, false)
		}
	}
}

func (f *feed) dropNode(from *corev1.Node) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.removeNode(from.Name)
}

func (f *feed) removeNode(name string) {
	if f.nodes[name] == nil {
		return
	}
	delete(f.nodes, name)
	delete(f.nodeRevs, name)
	f.nodesRev = f.bumpAll()
	f.goneNodes[name] = f.nodesRev
	f.refreshOn(name)
}

func (f *feed) replaceNodes(_ string, list []*corev1.Node) {
	f.mu.Lock()
	defer f.mu.Unlock()
	have := map[string]bool{}
	for _, node := range list {
		have[node.Name] = true
		f.storeNode(node)
	}
	for name := range maps.Clone(f.nodes) {
		if !have[name] {
			f.removeNode(name)
		}
	}
	f.listed("nodes/")
}
