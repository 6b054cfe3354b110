package service

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// cluster stores Services in a map and leads a request through the steps in the order that the API server does:
// Default, Allocate, Prepare, Validate.
type cluster struct {
	ranges map[corev1.IPFamily]netip.Prefix
	has    []corev1.IPFamily
	first  int32 // of the node-port range
	last   int32
	stored map[string]*corev1.Service
}

// newCluster has the ranges that the conformance cases were recorded with, or the families given.
func newCluster(families ...corev1.IPFamily) *cluster {
	if len(families) == 0 {
		families = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	}
	return &cluster{
		ranges: map[corev1.IPFamily]netip.Prefix{
			corev1.IPv4Protocol: netip.MustParsePrefix("10.96.0.0/16"),
			corev1.IPv6Protocol: netip.MustParsePrefix("fd00:96::/112"),
		},
		has: families, first: 30000, last: 32767,
		stored: map[string]*corev1.Service{},
	}
}

// create gives neither a Service nor errors when the name is taken.
func (c *cluster) create(svc *corev1.Service) (*corev1.Service, field.ErrorList) {
	ctx := context.Background()
	if svc.Name == "" && svc.GenerateName != "" {
		svc.Name = svc.GenerateName + "x7k2p"
	}
	if errs := Allocate(svc, nil, c.choice()); len(errs) > 0 {
		return nil, errs
	}
	PrepareCreate(ctx, svc)
	errs := validation.ValidateObjectMeta(&svc.ObjectMeta, true, validation.NameIsDNSLabel, field.NewPath("metadata"))
	if errs = append(errs, Validate(ctx, svc)...); len(errs) > 0 {
		return nil, errs.Filter() // tells each mistake once
	}
	if c.stored[svc.Name] != nil {
		return nil, nil // a name is found to be taken last of all
	}
	svc.UID, svc.ResourceVersion = "c0ffee00-0000-0000-0000-000000000000", "1"
	c.stored[svc.Name] = svc
	return c.read(svc.Name), nil
}

func (c *cluster) update(svc *corev1.Service) (*corev1.Service, field.ErrorList) {
	ctx, old := context.Background(), c.known(svc)
	if errs := Allocate(svc, old, c.choice()); len(errs) > 0 {
		return nil, errs
	}
	PrepareUpdate(ctx, svc, old)
	errs := validation.ValidateObjectMetaUpdate(&svc.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	if errs = append(errs, ValidateUpdate(ctx, svc, old)...); len(errs) > 0 {
		return nil, errs.Filter()
	}
	c.stored[svc.Name] = svc
	return c.read(svc.Name), nil
}

func (c *cluster) updateStatus(svc *corev1.Service) (*corev1.Service, field.ErrorList) {
	ctx, old := context.Background(), c.known(svc)
	PrepareStatus(ctx, svc, old)
	errs := validation.ValidateObjectMetaUpdate(&svc.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	if errs = append(errs, ValidateStatus(ctx, svc, old)...); len(errs) > 0 {
		return nil, errs.Filter()
	}
	c.stored[svc.Name] = svc
	return c.read(svc.Name), nil
}

// known is the stored Service that svc is to replace. What a client may leave out of its metadata is filled in.
func (c *cluster) known(svc *corev1.Service) *corev1.Service {
	old := c.read(svc.Name)
	svc.ResourceVersion, svc.CreationTimestamp = old.ResourceVersion, old.CreationTimestamp
	if svc.UID == "" {
		svc.UID = old.UID
	}
	return old
}

// read is a Service as it comes from the store.
func (c *cluster) read(name string) *corev1.Service {
	svc := c.stored[name].DeepCopy()
	OnRead(svc, c.has)
	return svc
}

// decode reads what a client sends.
func decode(body []byte) (*corev1.Service, error) {
	svc := &corev1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}}
	if err := json.Unmarshal(body, svc); err != nil {
		return nil, err
	}
	Default(svc)
	return svc, nil
}

// patch is the stored Service with a patch of the kind SMP (strategic), MP (merge) or JP (JSON) applied.
func (c *cluster) patch(name, kind string, body []byte) (*corev1.Service, error) {
	before, err := json.Marshal(c.read(name))
	if err != nil {
		return nil, err
	}
	after := before
	switch kind {
	case "SMP":
		after, err = strategicpatch.StrategicMergePatch(before, body, corev1.Service{})
	case "MP":
		after, err = jsonpatch.MergePatch(before, body)
	case "JP":
		var p jsonpatch.Patch
		if p, err = jsonpatch.DecodePatch(body); err == nil {
			after, err = p.Apply(before)
		}
	}
	if err != nil {
		return nil, err
	}
	return decode(after)
}

// choice is a hold on what no stored Service claims.
func (c *cluster) choice() *fakeChoice {
	f := &fakeChoice{cluster: c, addresses: map[netip.Addr]bool{}, ports: map[int32]bool{}}
	f.addresses[c.ranges[corev1.IPv4Protocol].Addr().Next()] = true // default/kubernetes has it
	for _, svc := range c.stored {
		held := Claims(svc)
		for _, a := range held.Addresses {
			f.addresses[a] = true
		}
		for _, p := range held.Ports() {
			f.ports[p] = true
		}
	}
	return f
}

type fakeChoice struct {
	cluster   *cluster
	addresses map[netip.Addr]bool
	ports     map[int32]bool
	full      bool     // has no address left to choose
	asked     []string // what it was asked for, in order
}

var errHeld, errFull = errors.New("it is taken"), errors.New("the range is full")

func (f *fakeChoice) Families() []corev1.IPFamily { return f.cluster.has }

func (f *fakeChoice) Address(family corev1.IPFamily) (string, error) {
	f.asked = append(f.asked, string(family))
	prefix := f.cluster.ranges[family]
	for addr := prefix.Addr().Next(); prefix.Contains(addr); addr = addr.Next() {
		if !f.full && !f.addresses[addr] {
			f.addresses[addr] = true
			return addr.String(), nil
		}
	}
	return "", errFull
}

func (f *fakeChoice) TakeAddress(family corev1.IPFamily, ip string) error {
	f.asked = append(f.asked, ip)
	addr, ok := parseAddress(ip)
	prefix := f.cluster.ranges[family]
	switch {
	case !ok || !prefix.Contains(addr) || addr == prefix.Addr() || !prefix.Contains(addr.Next()) && addr.Is4():
		return fmt.Errorf("it is not in the range %s", prefix)
	case f.addresses[addr]:
		return errHeld
	}
	f.addresses[addr] = true
	return nil
}

func (f *fakeChoice) NodePort() (int32, error) {
	f.asked = append(f.asked, "port")
	for port := f.cluster.last; port >= f.cluster.first; port-- {
		if !f.ports[port] {
			f.ports[port] = true
			return port, nil
		}
	}
	return 0, errFull
}

func (f *fakeChoice) TakeNodePort(port int32) error {
	f.asked = append(f.asked, fmt.Sprint(port))
	switch {
	case port < f.cluster.first || port > f.cluster.last:
		return fmt.Errorf("it is not in the range %d-%d", f.cluster.first, f.cluster.last)
	case f.ports[port]:
		return errHeld
	}
	f.ports[port] = true
	return nil
}

// causes are errors as the conformance cases record them: "field reason", sorted.
func causes(errs field.ErrorList) []string {
	out := []string{}
	for _, err := range errs {
		out = append(out, err.Field+" "+strings.TrimPrefix(string(err.Type), "FieldValue"))
	}
	slices.Sort(out)
	return out
}
