package audit

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/runtime"
	netutils "k8s.io/utils/net"

	"portal/internal/apiserver/registry/service"
	"portal/internal/servicerange"
	"portal/internal/store"
)

// pageSize is how many keys are read at once: a page of large Services must fit into one answer of etcd.
const pageSize = 500

// read takes a Snapshot, all of it at the revision of the first page, so that no write can fall between two of them.
func (a *Auditor) read(ctx context.Context) (Snapshot, error) {
	s := Snapshot{NodePorts: a.opts.NodePorts}
	for _, kind := range []struct {
		prefix string
		take   func(*mvccpb.KeyValue)
	}{
		{servicePrefix, func(kv *mvccpb.KeyValue) { s.Services = append(s.Services, a.readService(kv)) }},
		{addressPrefix, func(kv *mvccpb.KeyValue) { s.Claims = append(s.Claims, a.readAddress(kv)) }},
		{portPrefix, func(kv *mvccpb.KeyValue) { s.Claims = append(s.Claims, readPort(kv)) }},
		{rangePrefix, func(kv *mvccpb.KeyValue) { a.readRange(kv, &s) }},
	} {
		if err := a.readPages(ctx, kind.prefix, &s.Revision, kind.take); err != nil {
			return Snapshot{}, fmt.Errorf("read %s from etcd: %w", kind.prefix, err)
		}
	}
	return s, nil
}

// readPages reads all keys of a prefix in order, at a revision, which it sets if it is 0.
func (a *Auditor) readPages(ctx context.Context, prefix string, revision *int64, take func(*mvccpb.KeyValue)) error {
	end := clientv3.GetPrefixRangeEnd(prefix)
	for from := prefix; ; {
		resp, err := a.opts.KV.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(pageSize), clientv3.WithRev(*revision))
		if err != nil {
			return err
		}
		if *revision == 0 {
			*revision = resp.Header.Revision
		}
		for _, kv := range resp.Kvs {
			take(kv)
		}
		if !resp.More || len(resp.Kvs) == 0 {
			return nil
		}
		from = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
	}
}

func (a *Auditor) readService(kv *mvccpb.KeyValue) Service {
	out := Service{Key: string(kv.Key), Created: kv.CreateRevision, Modified: kv.ModRevision}
	out.Owner.Namespace, out.Owner.Name, _ = strings.Cut(strings.TrimPrefix(out.Key, servicePrefix), "/")
	svc, err := decode[*corev1.Service](a.opts.Core, kv.Value)
	switch {
	case err != nil:
		out.Flaw = brief(err)
	case svc.Namespace != out.Owner.Namespace || svc.Name != out.Owner.Name:
		out.Flaw = fmt.Sprintf("it says that it is %s/%s", svc.Namespace, svc.Name)
	default:
		out.Owner.UID = string(svc.UID)
		out.Held = service.Claims(svc)
		out.Invalid = invalidAddresses(&svc.Spec)
	}
	return out
}

func invalidAddresses(spec *corev1.ServiceSpec) []string {
	if spec.Type == corev1.ServiceTypeExternalName {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(spec.ClusterIPs), func(ip string) bool {
		return ip == corev1.ClusterIPNone || netutils.ParseIPSloppy(ip) != nil
	})
}

func (a *Auditor) readAddress(kv *mvccpb.KeyValue) Claim {
	out := Claim{Key: string(kv.Key), Modified: kv.ModRevision}
	on, ok := service.ParseClaim(store.Prefix, out.Key)
	if !ok || keyOf(on) != out.Key || on.Addr.Is4In6() || on.Addr.Zone() != "" {
		out.Flaw = "its key is not an address in canonical form"
		return out
	}
	out.On = on
	object, err := decode[*networkingv1.IPAddress](a.opts.Networking, kv.Value)
	switch {
	case err != nil:
		out.Flaw = brief(err)
		return out
	case object.Name != on.Addr.String():
		out.Flaw = fmt.Sprintf("it says that it is %s", object.Name)
		return out
	case object.Spec.ParentRef == nil:
		out.Flaw = "it does not say what it is for"
		return out
	}
	out.UID = object.UID
	out.Managed = object.Labels[networkingv1.LabelManagedBy] == managedBy
	out.Labelled = out.Managed && object.Labels[networkingv1.LabelIPAddressFamily] == family(on.Addr)
	parent := object.Spec.ParentRef
	if parent.Group == corev1.GroupName && parent.Resource == "services" {
		out.Owner = service.Owner{Namespace: parent.Namespace, Name: parent.Name}
		return out
	}
	out.Parent = strings.TrimPrefix(parent.Group+"/", "/") + parent.Resource + " " + strings.TrimPrefix(parent.Namespace+"/", "/") + parent.Name
	return out
}

// managedBy is the value of Kubernetes' label on addresses that an API server allocated.
const managedBy = "ipallocator.k8s.io"

func family(addr netip.Addr) string {
	if addr.Is6() {
		return string(corev1.IPv6Protocol)
	}
	return string(corev1.IPv4Protocol)
}

func readPort(kv *mvccpb.KeyValue) Claim {
	out := Claim{Key: string(kv.Key), Modified: kv.ModRevision, Managed: true, Labelled: true}
	on, ok := service.ParseClaim(store.Prefix, out.Key)
	if !ok || on.Port == 0 || keyOf(on) != out.Key {
		out.Flaw = "its key is not a port"
		return out
	}
	out.On = on
	if err := json.Unmarshal(kv.Value, &out.Owner); err != nil {
		out.Flaw = brief(err)
	} else if out.Owner.Name == "" {
		out.Flaw = "it does not say which Service has it"
	}
	return out
}

func (a *Auditor) readRange(kv *mvccpb.KeyValue, s *Snapshot) {
	object, err := decode[*networkingv1.ServiceCIDR](a.opts.Networking, kv.Value)
	if err == nil && len(servicerange.Prefixes(object)) != len(object.Spec.CIDRs) {
		err = fmt.Errorf("%q are not all ranges", object.Spec.CIDRs)
	}
	if err != nil {
		s.LostRanges = append(s.LostRanges, Unreadable{Key: string(kv.Key), Flaw: brief(err)})
		return
	}
	s.Ranges = append(s.Ranges, servicerange.Prefixes(object)...)
}

func decode[T runtime.Object](decoder runtime.Decoder, data []byte) (T, error) {
	var none T
	object, err := runtime.Decode(decoder, data)
	if err != nil {
		return none, err
	}
	out, ok := object.(T)
	if !ok {
		return none, fmt.Errorf("it is a %T", object)
	}
	return out, nil
}

// brief is an error without the bytes that a decoder may quote in it.
func brief(err error) string {
	const most = 200
	text := strings.ToValidUTF8(err.Error(), "?")
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + " ..."
	}
	return text
}
