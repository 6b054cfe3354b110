package controllers

import (
	"strings"
	"testing"
)

func TestSelection(t *testing.T) {
	all := strings.Join(Names(), ",")
	for _, c := range []struct{ in, want, wrong string }{
		{"", all, ""},
		{"*", all, ""},
		{"none", "none", ""},
		{"endpoints", "endpoints", ""},
		{"endpointslice, endpoints", "endpoints,endpointslice", ""},
		{"-node", strings.Replace(all, ",node", "", 1), ""},
		{"*,-node,-endpoints", strings.Replace(strings.Replace(all, ",node", "", 1), "endpoints,", "", 1), ""},
		{"-node,*", strings.Replace(all, ",node", "", 1), ""},
		{"endpoints,-endpoints", "none", ""},
		{"nodes", "", `no "nodes"; there are endpoints,`},
		{"-nodes", "", `no "nodes"`},
		{"none,endpoints", "", "can't be combined with endpoints"},
	} {
		got, err := ParseSelection([]string{c.in})
		switch {
		case c.wrong != "":
			if err == nil || !strings.Contains(err.Error(), c.wrong) {
				t.Errorf("%q: error %v, want %q", c.in, err, c.wrong)
			}
		case err != nil:
			t.Errorf("%q: %v", c.in, err)
		case got.String() != c.want:
			t.Errorf("%q selects %s, want %s", c.in, got, c.want)
		}
	}
}

func TestConfigIsChecked(t *testing.T) {
	for _, c := range []struct {
		cfg   Config
		wrong string
	}{
		{Config{}, "a configuration of the API server"},
		{Config{REST: restNowhere(), MaxEndpointsPerSlice: 1001}, "from 1 to 1000"},
		{Config{REST: restNowhere(), MaxEndpointsPerSubset: -1}, "from 1 to 1000"},
		{Config{REST: restNowhere(), ClusterCIDRs: prefixes("10.0.0.0/30")}, "mask size"},
		{Config{REST: restNowhere(), ClusterCIDRs: prefixes("10.0.0.0/16", "fd00::/48")}, ""},
	} {
		err := c.cfg.Validate()
		if (err == nil) != (c.wrong == "") || err != nil && !strings.Contains(err.Error(), c.wrong) {
			t.Errorf("%+v: %v, want %q", c.cfg, err, c.wrong)
		}
	}
}
