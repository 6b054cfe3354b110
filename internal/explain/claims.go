package explain

import (
	"fmt"
	"math/big"
	"net/netip"

	"portal/internal/servicerange"
)

// checkClaims compares the cluster IPs of Services with the IPAddress objects and the ranges.
func checkClaims(v *View) (out []Finding) {
	if !v.sees("services", "ipaddresses", "servicecidrs") || len(v.ServiceCIDRs) == 0 || v.Limited != "" {
		return nil
	}
	claims := map[string]Key{}
	for i := range v.IPAddresses {
		if p := v.IPAddresses[i].Spec.ParentRef; p != nil {
			claims[v.IPAddresses[i].Name] = Key{p.Namespace, p.Name}
		}
	}
	ranges := v.ranges()
	for _, s := range v.order {
		for _, text := range s.Spec.ClusterIPs {
			a, err := netip.ParseAddr(text)
			if err != nil || v.Now.Sub(s.CreationTimestamp.Time) < settle {
				continue
			}
			f := Finding{Severity: Degraded, Sure: Certain, Object: s.ref(), Field: "spec.clusterIPs"}
			owner, claimed := claims[a.String()]
			switch {
			case !servicerange.Covered(ranges, a):
				f.Code = "cluster-ip-outside"
				f.Verdict = fmt.Sprintf("%s has the cluster IP %s, which is in none of the cluster's ranges: proxies and routes may not know it", s.ref(), a)
				f.Evidence = []string{fmt.Sprintf("ranges: %v", ranges)}
				f.Fix = []string{recreate(s)}
			case !claimed:
				f.Code = "claim-missing"
				f.Verdict = fmt.Sprintf("%s has the cluster IP %s, and no IPAddress claims it: another Service could get it", s.ref(), a)
				f.Fix = []string{"portal audit --repair"}
			case owner != Key{s.Namespace, s.Name}:
				f.Code, f.Severity = "address-conflict", Broken
				f.Affects = []Ref{{"Service", owner.Namespace, owner.Name}}
				f.Verdict = fmt.Sprintf("%s has the cluster IP %s, which belongs to Service %s/%s", s.ref(), a, owner.Namespace, owner.Name)
				f.Fix = []string{recreate(s)}
			default:
				continue
			}
			out = append(out, f)
		}
	}
	return out
}

func (v *View) ranges() (out []netip.Prefix) {
	for i := range v.ServiceCIDRs {
		out = append(out, servicerange.Prefixes(&v.ServiceCIDRs[i])...)
	}
	return out
}

// Fill is how full a range of addresses is.
type Fill struct {
	Range string `json:"range"`
	Used  int    `json:"used"`
	// Size is 0 for more than anybody can use.
	Size int `json:"size"`
}

// full is the share from which on a range is worth a word.
const full = 95

func (f Fill) percent() int {
	if f.Size == 0 {
		return 0
	}
	return f.Used * 100 / f.Size
}

// fills counts the claims in each range.
func (v *View) fills() (out []Fill) {
	ranges := v.ranges()
	used := make([]int, len(ranges))
	for i := range v.IPAddresses {
		a, err := netip.ParseAddr(v.IPAddresses[i].Name)
		if err != nil {
			continue
		}
		for j, r := range ranges {
			if r.Contains(a) {
				used[j]++
			}
		}
	}
	for i, r := range ranges {
		f := Fill{Range: r.String(), Used: used[i]}
		if bits := r.Addr().BitLen() - r.Bits(); bits < 31 {
			size := new(big.Int).Lsh(big.NewInt(1), uint(bits))
			f.Size = int(size.Int64()) - 1
			if r.Addr().Is4() {
				f.Size--
			}
		}
		out = append(out, f)
	}
	return out
}

// checkRanges looks for ranges that are nearly full.
func checkRanges(v *View) (out []Finding) {
	if !v.sees("ipaddresses", "servicecidrs") {
		return nil
	}
	for _, fill := range v.fills() {
		if fill.percent() < full {
			continue
		}
		f := Finding{
			Code: "range-full", Severity: Degraded, Sure: Certain, Object: Ref{"ServiceCIDR", "", "kubernetes"}, Field: "spec.cidrs",
			Verdict: fmt.Sprintf("the range of cluster IPs %s is nearly full: %d of %d addresses are taken, and Services that come next get none", fill.Range, fill.Used, fill.Size),
			Fix:     []string{`echo '{"apiVersion":"networking.k8s.io/v1","kind":"ServiceCIDR","metadata":{"name":"more"},"spec":{"cidrs":["10.97.0.0/16"]}}' | kubectl apply -f -`},
		}
		if fill.Used >= fill.Size {
			f.Severity = Broken
		}
		out = append(out, f)
	}
	return out
}

// NodePorts counts the node ports in use.
func (v *View) NodePorts() (used int) {
	for _, s := range v.order {
		for i := range s.Spec.Ports {
			if s.Spec.Ports[i].NodePort != 0 {
				used++
			}
		}
		if s.Spec.HealthCheckNodePort != 0 {
			used++
		}
	}
	return used
}
