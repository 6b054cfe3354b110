// Package serviceenv makes the environment variables that tell a container where Services are: the plain pair
// {SVCNAME}_SERVICE_HOST and _SERVICE_PORT, and those of Docker links. It is pure: Services in, variables out.
package serviceenv

import (
	"cmp"
	"net"
	"slices"
	"strconv"
	"strings"

	"portal/internal/intent"
)

// Var is an environment variable.
type Var struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// All returns the variables for the Services, in their order. A Service without a cluster IP or without ports has none.
func All(services []*intent.Service) []Var {
	var vars []Var
	for _, s := range services {
		vars = append(vars, one(s)...)
	}
	return vars
}

// ForPod returns the variables that a Pod of a namespace gets: those of the API server's Service, and with links those
// of every Service in its own namespace; one of those named kubernetes replaces the API server's.
func ForPod(services []*intent.Service, namespace string, links bool) []Var {
	chosen := map[string]*intent.Service{}
	for _, s := range services {
		if !visible(s) {
			continue
		}
		own := links && s.Namespace == namespace
		if s.Namespace == "default" && s.Name == "kubernetes" && chosen[s.Name] == nil || own {
			chosen[s.Name] = s
		}
	}
	list := make([]*intent.Service, 0, len(chosen))
	for _, s := range chosen {
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b *intent.Service) int { return cmp.Compare(a.Name, b.Name) })
	return All(list)
}

func visible(s *intent.Service) bool { return !s.Headless && len(s.ClusterIPs) > 0 }

func one(s *intent.Service) []Var {
	if !visible(s) || len(s.Ports) == 0 {
		return nil
	}
	prefix, host := upper(s.Name), s.ClusterIPs[0].String()
	url := func(p intent.Port) string {
		return strings.ToLower(p.Protocol.String()) + "://" + net.JoinHostPort(host, number(p.Port))
	}
	vars := []Var{{prefix + "_SERVICE_HOST", host}, {prefix + "_SERVICE_PORT", number(s.Ports[0].Port)}}
	for _, p := range s.Ports {
		if p.Name != "" {
			vars = append(vars, Var{prefix + "_SERVICE_PORT_" + upper(p.Name), number(p.Port)})
		}
	}
	vars = append(vars, Var{prefix + "_PORT", url(s.Ports[0])})
	for _, p := range s.Ports {
		link := prefix + "_PORT_" + number(p.Port) + "_" + p.Protocol.String()
		vars = append(vars,
			Var{link, url(p)},
			Var{link + "_PROTO", strings.ToLower(p.Protocol.String())},
			Var{link + "_PORT", number(p.Port)},
			Var{link + "_ADDR", host})
	}
	return vars
}

func upper(name string) string { return strings.ToUpper(strings.ReplaceAll(name, "-", "_")) }

func number(port uint16) string { return strconv.Itoa(int(port)) }
